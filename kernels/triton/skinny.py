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
    """How the kernel is cut: rows of x (all, rounded up), rows of the weight (of each half, if gated) a program: at
    least 64, as Hopper's wide products want; columns a step, warps, pipeline stages."""

    tokens: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: SkinnyTile,
) -> Tensor:
    """x [tokens, in], a few rows, times the transpose of weight [out, in], plus bias: [tokens, out].

    With `gated` the weight is [gate, up], and the result silu(gate) * up: [tokens, out / 2]. All of one narrow type,
    contiguous; gate and up are rounded to it, as if they had been written. The result is of that type, or of out_dtype.
    """
    (num_tokens, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_tokens, num_out, dtype=out_dtype or x.dtype, device=x.device)
    threads = 32 * tile.num_warps
    pieces = max(threads // tile.rows, 1)  # of a row of the weight, one for each thread to fetch ahead
    _skinny[(triton.cdiv(num_out, tile.rows), triton.cdiv(num_tokens, tile.tokens))](
        x, weight, bias, out, num_tokens, num_out,
        WIDTH=num_in, TOKENS=tile.tokens, ROWS=tile.rows, BLOCK=tile.columns, STAGES=tile.num_stages, GATED=gated,
        THREADS=threads, PIECE=min(tile.columns * tile.num_stages, num_in) // pieces, num_warps=tile.num_warps,
        **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _fetch_ahead(
    weight, first, num_out, WIDTH: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Bring the first columns of some rows into the cache that all processors share; each thread asks for a piece."""
    thread = tl.arange(0, THREADS)
    own = tl.minimum(first + thread % ROWS, num_out - 1)
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
def _part(rows, at, column, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns from `at` on of some rows, 0 for those that do not exist; no mask that is not needed."""
    if WIDTH % BLOCK == 0:
        if exists is None:
            return tl.load(rows + at)
        else:
            return tl.load(rows + at, mask=exists, other=0.0)
    else:
        inside = (at + column < WIDTH)[None, :]
        if exists is not None:
            inside = inside & exists
        return tl.load(rows + at, mask=inside, other=0.0)


@triton.jit
def _product(part, x, sums):
    """sums + the rows of `part` times those of x: [rows, tokens]."""
    if INTERPRETED:
        part, x = part.to(tl.float32), x.to(tl.float32)
    return tl.dot(part, tl.trans(x), sums)


@triton.jit(do_not_specialize=["num_tokens", "num_out"])
def _skinny(
    x, weight, bias, out, num_tokens, num_out, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, THREADS: tl.constexpr, PIECE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    first = tl.program_id(0) * ROWS
    other = num_out.to(tl.int64) * WIDTH  # from a row of the gate to that of `up`
    if EARLY and PIECE % 8 == 0:
        _fetch_ahead(weight, first, num_out, WIDTH, ROWS, THREADS, PIECE)
        if GATED:
            _fetch_ahead(weight + other, first, num_out, WIDTH, ROWS, THREADS, PIECE)
    wait_for_previous(EARLY)
    row = first + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    weight += tl.minimum(row, num_out - 1).to(tl.int64)[:, None] * WIDTH + column[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    x += token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    exists = (token < num_tokens)[:, None]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    up_sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        own = _part(x, at, column, exists, WIDTH, BLOCK)
        sums = _product(_part(weight, at, column, None, WIDTH, BLOCK), own, sums)
        if GATED:
            up_sums = _product(_part(weight + other, at, column, None, WIDTH, BLOCK), own, up_sums)
    if bias is not None:
        sums += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = rounded(sums, dtype).to(tl.float32)
        activated = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        sums = activated * rounded(up_sums, dtype).to(tl.float32)
    place = token.to(tl.int64)[:, None] * num_out + row[None, :]
    result = rounded(tl.trans(sums), out.dtype.element_ty)
    tl.store(out + place, result, mask=exists & (row < num_out)[None, :])
