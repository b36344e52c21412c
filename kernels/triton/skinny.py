"""A product with a few rows, on tensor cores: the weight streams through, and every program keeps all rows of x.

A program takes some rows of the weight and all of their columns, in order: no sum is split, so a result depends
neither on timing nor on the other rows of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.triton.shared import (
    INTERPRETED,
    early_launch,
    let_next_begin,
    rounded,
    wait_for_previous,
)


@record(static=True)
class SkinnyTile:
    """How the kernel is cut: rows of x (all, rounded up), rows of the weight (of each half, if gated) a program,
    columns a step, warps, pipeline stages; and whether the weight is the left operand, which has to be 64 rows for
    Hopper's wide products."""

    tokens: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    weight_first: bool


def skinny(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, tile: SkinnyTile
) -> Tensor:
    """x [tokens, in], a few rows, times the transpose of weight [out, in], plus bias: [tokens, out].

    With `gated` the weight is [gate, up], and the result silu(gate) * up: [tokens, out / 2]. All of one narrow type,
    contiguous; gate and up are rounded to it, as if they had been written.
    """
    (num_tokens, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    threads = 32 * tile.num_warps
    pieces = max(threads // tile.rows, 1)  # of a row of the weight, one for each thread to fetch ahead
    _skinny[(triton.cdiv(num_out, tile.rows), triton.cdiv(num_tokens, tile.tokens))](
        x, weight, bias, out, num_tokens, num_out,
        WIDTH=num_in, TOKENS=tile.tokens, ROWS=tile.rows, BLOCK=tile.columns, STAGES=tile.num_stages, GATED=gated,
        WEIGHT_FIRST=tile.weight_first, THREADS=threads, PIECE=min(tile.columns * tile.num_stages, num_in) // pieces,
        num_warps=tile.num_warps, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _fetch_ahead(weight, row, WIDTH: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, PIECE: tl.constexpr):
    """Bring the first columns of some rows into the cache that all processors share; each thread asks for a piece."""
    thread = tl.arange(0, THREADS)
    own = tl.minimum(row + thread % ROWS, row + ROWS - 1)
    place = (weight + own.to(tl.int64) * WIDTH + thread // ROWS * PIECE).to(tl.int64)
    size = thread * 0 + PIECE * weight.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _product(x, part, sums, WEIGHT_FIRST: tl.constexpr):
    """sums + x times the transpose of `part`, transposed if the weight is the left operand."""
    if INTERPRETED:
        x, part = x.to(tl.float32), part.to(tl.float32)
    if WEIGHT_FIRST:
        return tl.dot(part, tl.trans(x), sums)
    else:
        return tl.dot(x, tl.trans(part), sums)


@triton.jit(do_not_specialize=["num_tokens", "num_out"])
def _skinny(
    x, weight, bias, out, num_tokens, num_out, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    THREADS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    first = tl.program_id(0) * ROWS
    other = num_out.to(tl.int64) * WIDTH  # from a row of the gate to that of `up`
    if EARLY and PIECE * 2 % 16 == 0:
        if first + ROWS <= num_out:
            _fetch_ahead(weight, first, WIDTH, ROWS, THREADS, PIECE)
            if GATED:
                _fetch_ahead(weight + other, first, WIDTH, ROWS, THREADS, PIECE)
    wait_for_previous(EARLY)
    row = first + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    weight += tl.minimum(row, num_out - 1).to(tl.int64)[:, None] * WIDTH + column[None, :]
    x += token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    exists = (token < num_tokens)[:, None]
    if WEIGHT_FIRST:
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        sums = tl.zeros([TOKENS, ROWS], tl.float32)
    up_sums = sums
    for at in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        if WIDTH % BLOCK == 0:
            own = tl.load(x + at, mask=exists, other=0.0)
            part = tl.load(weight + at)
        else:
            inside = (at + column < WIDTH)[None, :]
            own = tl.load(x + at, mask=exists & inside, other=0.0)
            part = tl.load(weight + at, mask=inside, other=0.0)
        sums = _product(own, part, sums, WEIGHT_FIRST)
        if GATED:
            if WIDTH % BLOCK == 0:
                up = tl.load(weight + other + at)
            else:
                up = tl.load(weight + other + at, mask=inside, other=0.0)
            up_sums = _product(own, up, up_sums, WEIGHT_FIRST)
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        shift = tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
        sums += shift[:, None] if WEIGHT_FIRST else shift[None, :]
    if GATED:
        gate = rounded(sums, dtype).to(tl.float32)
        activated = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        sums = activated * rounded(up_sums, dtype).to(tl.float32)
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
    place = token.to(tl.int64)[:, None] * num_out + row[None, :]
    tl.store(out + place, rounded(sums, dtype), mask=exists & (row < num_out)[None, :])
