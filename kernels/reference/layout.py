"""Which request a token belongs to, and what the rows of a batch say."""

import torch
from torch import Tensor


def ragged_index(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request of each token of a batch laid end to end, and the token's place within it.

    query_start_loc [reqs+1], cumulative, at least one request. Returns index and offset, int64 [tokens]. A
    request without tokens owns none; padding tokens past query_start_loc[-1] count on in the last request.
    """
    # Both contiguous, also as batches: searchsorted warns of anything else under vmap.
    ends = query_start_loc[1:].clone()
    token = query_start_loc[0] + torch.arange(
        num_tokens, device=query_start_loc.device, dtype=query_start_loc.dtype
    )
    index = torch.searchsorted(ends, token, right=True).clamp(max=ends.shape[0] - 1)
    return index, (token - query_start_loc[index]).to(torch.int64)


def take_rows(tables: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    """Of each table [all rows, ...] the given rows [reqs], in their order: [reqs, ...]."""
    return tuple([table.index_select(0, rows) for table in tables])
