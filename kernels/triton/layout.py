"""Which request a token belongs to."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 128  # per program


def ragged_index(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request of each token of a batch laid end to end, and the token's place within it: int64 [tokens] each."""
    index = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    offset = torch.empty_like(index)
    num_reqs = query_start_loc.shape[0] - 1
    if num_tokens:
        _ragged_index[(triton.cdiv(num_tokens, TOKENS),)](
            query_start_loc, index, offset, num_tokens, num_reqs, STEPS=num_reqs.bit_length(), TOKENS=TOKENS
        )
    return index, offset


@triton.jit
def request_of(query_start_loc, token, num_reqs, STEPS: tl.constexpr, TOKENS: tl.constexpr):
    """The request of each token and the token's place within it; padding counts on in the last. 2**STEPS > num_reqs."""
    low = tl.zeros([TOKENS], tl.int32)  # the requests that end at or before the token
    high = low + num_reqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        before = tl.load(query_start_loc + 1 + middle, mask=searching, other=0) <= token
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & ~before, middle, high)
    own = tl.minimum(low, num_reqs - 1)
    return own, token - tl.load(query_start_loc + own)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"], do_not_specialize_on_alignment=["query_start_loc"])
def _ragged_index(
    query_start_loc, index, offset, num_tokens, num_reqs, STEPS: tl.constexpr, TOKENS: tl.constexpr
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    own, place = request_of(query_start_loc, token, num_reqs, STEPS, TOKENS)
    tl.store(index + token, own.to(tl.int64), mask=token < num_tokens)
    tl.store(offset + token, place.to(tl.int64), mask=token < num_tokens)
