"""Random numbers as a function of what they are for: the bits of `kernels/reference/philox.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import cdiv

BLOCKS = 512  # of four columns each, per program


def uniforms(seed: Tensor, stream: Tensor, output_index: Tensor, *, purpose: int, width: int) -> Tensor:
    """Uniform numbers strictly between 0 and 1, one row a request: float32 [reqs, width].

    seed and stream int64 [reqs]; output_index int [reqs], below 2**28; purpose below 16.
    """
    out = torch.empty(seed.shape[0], width, dtype=torch.float32, device=seed.device)
    if out.numel():
        grid = (seed.shape[0], cdiv(width, 4 * BLOCKS))
        _uniforms[grid](
            out, seed, stream, output_index, seed.stride(0), stream.stride(0), output_index.stride(0), width,
            PURPOSE=purpose, BLOCKS=BLOCKS,
        )  # fmt: skip
    return out


@triton.jit
def random_words(seed, stream, output_index, block, PURPOSE: tl.constexpr):
    """Four words of 32 random bits for each block of four columns; seed, stream and output_index are scalars."""
    nothing = tl.zeros_like(block)
    index = (output_index.to(tl.int64) | (PURPOSE << 28)).to(tl.int32)
    low, high = stream.to(tl.int32), (stream >> 32).to(tl.int32)
    return tl.philox(seed, block, nothing + index, nothing + low, nothing + high)


@triton.jit
def uniform_of(word):
    """(k + 1/2) / 2**23, k being the top 23 bits: 24 would round to 1."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["seed", "stream", "output_index"])
def _uniforms(
    out, seed, stream, output_index, seed_step, stream_step, index_step, width, PURPOSE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    seed = tl.load(seed + row * seed_step)
    stream = tl.load(stream + row * stream_step)
    output_index = tl.load(output_index + row * index_step)
    a, b, c, d = random_words(seed, stream, output_index, block, PURPOSE)
    # Interleaved twice: a, b, c, d of one block stand beside each other.
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    column = tl.program_id(1) * BLOCKS * 4 + tl.arange(0, BLOCKS * 4)
    tl.store(out + row * width + column, uniform_of(word), mask=column < width)
