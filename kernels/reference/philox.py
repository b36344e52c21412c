"""Random numbers as a function of what they are for: Philox 4x32-10, with the same bits on every device.

Layout, which every other implementation must keep:
    key      (low, high) words of the 64-bit seed
    counter  (column // 4, output_index | purpose << 28, low, high words of the 64-bit stream)
and column c takes word c % 4 of the block. So an output index lies below 2**28 and a purpose below 16.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
WEYL = (0x9E3779B9, 0xBB67AE85)
# The multipliers 0xD2511F53 and 0xCD9E8D57 as negative numbers: a product with a 32-bit word then fits int64.
MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32_10(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words for a counter of four and a key of two.

    Integer tensors that broadcast against each other; only their low 32 bits count. Returns int64 tensors
    with values in [0, 2**32).
    """
    c0, c1, c2, c3 = (word.to(torch.int64) & MASK for word in counter)
    k0, k1 = (word.to(torch.int64) & MASK for word in key)
    for _ in range(10):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # The halves of c * (multiplier + 2**32): high is (product >> 32) + c, low is the product's own.
        high0, high1 = (product0 >> 32) + c0, (product1 >> 32) + c2
        c0, c1, c2, c3 = (high1 ^ c1 ^ k0) & MASK, product1, (high0 ^ c3 ^ k1) & MASK, product0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def uniforms(seed: Tensor, stream: Tensor, output_index: Tensor, *, purpose: int, width: int) -> Tensor:
    """Uniform numbers strictly between 0 and 1, one row a request: float32 [reqs, width].

    seed and stream int64 [reqs]; output_index int [reqs], below 2**28; purpose, below 16, separates draws
    made for the same output. Entry [r, c] is a function of (seed[r], stream[r], output_index[r], purpose, c):
    neither the batch nor the width matters. Its value is (k + 1/2) / 2**23 with k the top 23 bits of its
    word; with 24 bits the largest would round to 1, and its noise would be infinite.
    """
    column = torch.arange((width + 3) // 4, device=seed.device)
    seed, stream, output_index = (x.to(torch.int64)[:, None] for x in (seed, stream, output_index))
    counter = (column, output_index | purpose << 28, stream, stream >> 32)
    words = torch.stack(philox_4x32_10(counter, (seed, seed >> 32)), -1).flatten(-2)[:, :width]
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
