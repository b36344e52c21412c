"""Which request a token belongs to."""

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
