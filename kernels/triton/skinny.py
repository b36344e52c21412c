"""A product with a few rows, on tensor cores: the weight streams through, and every program keeps all rows of x.

A program takes some rows of the weight and all of their columns. Where the weight has too few rows for a chip of
programs of 64, which is what the widest products want, the columns are cut into slices, which stand in for rows: the
program multiplies every slice of the weight with every slice of x, keeps what belongs together, and adds the slices in
a fixed order. So a result depends neither on timing nor on the other rows of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.triton.shared import (
    INTERPRETED,
    cdiv,
    check_gated,
    early_launch,
    let_next_begin,
    rounded,
    silu_times,
    wait_for_previous,
)


@record(static=True)
class SkinnyTile:
    """How the kernel is cut: rows of x (all, rounded up), rows of the weight (of each half, if gated) times slices a
    program: at least 64, as Hopper's wide products want; columns a step, warps, pipeline stages, slices (a power of two
    that divides the columns)."""

    tokens: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    slices: int = 1


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
    check_gated("skinny", bias, gated=gated)
    (num_tokens, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_tokens, num_out, dtype=out_dtype or x.dtype, device=x.device)
    threads, part = 32 * tile.num_warps, num_in // tile.slices
    pieces = max(threads // tile.rows, 1)  # of a row of the weight, one for each thread to fetch ahead
    _skinny[(cdiv(num_out, tile.rows // tile.slices), cdiv(num_tokens, tile.tokens))](
        x, weight, bias, out, num_tokens, num_out,
        WIDTH=num_in, TOKENS=tile.tokens, ROWS=tile.rows, SLICES=tile.slices,
        LEVELS=tile.slices.bit_length() - 1, BLOCK=tile.columns, STAGES=tile.num_stages, GATED=gated, THREADS=threads,
        PIECE=min(tile.columns * tile.num_stages, part) // pieces, num_warps=tile.num_warps, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _fetch_ahead(
    weight, first, num_out, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, THREADS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Bring the first columns of some rows into the cache that all processors share; each thread asks for a piece."""
    thread = tl.arange(0, THREADS)
    own, slice_of_row = first + thread % (ROWS // SLICES), thread % ROWS // (ROWS // SLICES)
    column = slice_of_row * (WIDTH // SLICES) + thread // ROWS * PIECE
    place = (weight + tl.minimum(own, num_out - 1).to(tl.int64) * WIDTH + column).to(tl.int64)
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
def load_part(rows, at, column, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
def product(part, x, sums):
    """sums + the rows of `part` times those of x: [rows, tokens]."""
    if INTERPRETED:
        part, x = part.to(tl.float32), x.to(tl.float32)
    return tl.dot(part, tl.trans(x), sums, input_precision="ieee")


@triton.jit
def _joined(sums, SLICES: tl.constexpr, LEVELS: tl.constexpr, OWN: tl.constexpr, TOKENS: tl.constexpr):
    """[slices * own, slices * tokens] to [own, tokens]: equal slices belong together, and the halves of them are added
    until one is left."""
    if SLICES == 1:
        return sums
    of_row = tl.arange(0, SLICES * OWN) // OWN
    of_token = tl.arange(0, SLICES * TOKENS) // TOKENS
    kept = tl.where(of_row[:, None] == of_token[None, :], sums, 0.0)
    kept = tl.sum(tl.reshape(kept, [SLICES, OWN, SLICES, TOKENS]), 2)
    for level in tl.static_range(LEVELS):
        low, high = tl.split(
            tl.permute(tl.reshape(kept, [2, SLICES >> (level + 1), OWN, TOKENS]), (1, 2, 3, 0))
        )
        kept = low + high
    return tl.reshape(kept, [OWN, TOKENS])


@triton.jit(do_not_specialize=["num_tokens", "num_out"])
def _skinny(
    x, weight, bias, out, num_tokens, num_out, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    THREADS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    OWN: tl.constexpr = ROWS // SLICES
    PART: tl.constexpr = WIDTH // SLICES
    first = tl.program_id(0) * OWN
    other = num_out.to(tl.int64) * WIDTH  # from a row of the gate to that of `up`
    if EARLY and PIECE % 8 == 0 and WIDTH % 8 == 0:  # 16 bytes, as such fetches want
        _fetch_ahead(weight, first, num_out, WIDTH, ROWS, SLICES, THREADS, PIECE)
        if GATED:
            _fetch_ahead(weight + other, first, num_out, WIDTH, ROWS, SLICES, THREADS, PIECE)
    wait_for_previous(EARLY)
    sliced_row = tl.arange(0, ROWS)
    sliced_token = tl.arange(0, SLICES * TOKENS)
    column = tl.arange(0, BLOCK)
    own = tl.minimum(first + sliced_row % OWN, num_out - 1).to(tl.int64)
    weight += (own * WIDTH + sliced_row // OWN * PART)[:, None] + column[None, :]
    place = tl.program_id(1) * TOKENS + sliced_token % TOKENS
    dtype: tl.constexpr = x.dtype.element_ty
    x += (place.to(tl.int64) * WIDTH + sliced_token // TOKENS * PART)[:, None] + column[None, :]
    exists = (place < num_tokens)[:, None]
    sums = tl.zeros([ROWS, SLICES * TOKENS], tl.float32)
    up_sums = tl.zeros([ROWS, SLICES * TOKENS], tl.float32)
    for at in tl.range(0, PART, BLOCK, num_stages=STAGES):
        part_of_x = load_part(x, at, column, exists, PART, BLOCK)
        sums = product(load_part(weight, at, column, None, PART, BLOCK), part_of_x, sums)
        if GATED:
            up_sums = product(load_part(weight + other, at, column, None, PART, BLOCK), part_of_x, up_sums)
    sums = _joined(sums, SLICES, LEVELS, OWN, TOKENS)
    row = first + tl.arange(0, OWN)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if bias is not None:
        sums += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    if GATED:
        sums = silu_times(sums, _joined(up_sums, SLICES, LEVELS, OWN, TOKENS), dtype)
    target = out + token.to(tl.int64)[:, None] * num_out + row[None, :]
    result = rounded(tl.trans(sums), out.dtype.element_ty)
    tl.store(target, result, mask=(token < num_tokens)[:, None] & (row < num_out)[None, :])
