"""A product with up to eight rows, or a few more, on tensor cores: what the launch and the first access take is hidden.

A program takes few rows of the weight and cuts their columns into slices, one for each of its warps, which are added in
the end in one order: so a result depends neither on timing nor on the other rows of x. The first columns of each slice
are fetched before the kernel waits for x, by programs so small that they begin while the kernel before still runs.
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
class ThinTile:
    """How the kernel is cut: rows of x (all, rounded up), rows of the weight (of each half, if gated) a program, slices
    of its columns, columns of a slice that are fetched first, columns a step behind them, pipeline stages."""

    tokens: int
    rows: int
    slices: int
    first: int
    columns: int
    num_stages: int

    def divides(self, num_in: int) -> bool:
        """Whether so many columns can be cut like this."""
        part, rest = divmod(num_in, self.slices)
        return rest == 0 and part >= self.first and (part - self.first) % self.columns == 0


def thin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: ThinTile,
) -> Tensor:
    """x [tokens, in], a few rows, times the transpose of weight [out, in], plus bias: [tokens, out].

    With `gated` the weight is [gate, up], there is no bias, and the result is silu(gate) * up: [tokens, out / 2]. All
    of one narrow type, contiguous; gate and up are rounded to it, as if they had been written. The result is of that
    type, or of out_dtype. The tile must divide the columns.
    """
    check_gated("thin", bias, gated=gated)
    (num_tokens, num_in), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_tokens, num_out, dtype=out_dtype or x.dtype, device=x.device)
    _thin[(cdiv(num_out, tile.rows), cdiv(num_tokens, tile.tokens))](
        x, weight, bias, out, num_tokens, num_out, WIDTH=num_in, TOKENS=tile.tokens, ROWS=tile.rows,
        SLICES=tile.slices, FIRST=tile.first, BLOCK=tile.columns, STAGES=tile.num_stages, GATED=gated,
        num_warps=tile.slices, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _product(part, x, sums):
    """sums + the rows of `part` [slices, rows, columns] times those of x [slices, tokens, columns], slice by slice."""
    if INTERPRETED:
        part, x = part.to(tl.float32), x.to(tl.float32)
    return tl.dot(part, tl.permute(x, (0, 2, 1)), sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "num_out"])
def _thin(
    x, weight, bias, out, num_tokens, num_out, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    PART: tl.constexpr = WIDTH // SLICES
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    begin = tl.arange(0, SLICES)[:, None, None] * PART
    weight += begin + (tl.minimum(row, num_out - 1).to(tl.int64) * WIDTH)[None, :, None]
    other = num_out.to(tl.int64) * WIDTH  # from a row of the gate to that of `up`
    column = tl.arange(0, FIRST)[None, None, :]
    first_gate = tl.load(weight + column, eviction_policy="evict_first")
    first_up = first_gate
    if GATED:
        first_up = tl.load(weight + other + column, eviction_policy="evict_first")
    wait_for_previous(EARLY)
    x += begin + (token.to(tl.int64) * WIDTH)[None, :, None]
    exists = (token < num_tokens)[None, :, None]
    first_x = tl.load(x + column, mask=exists, other=0.0)
    sums = _product(first_gate, first_x, tl.zeros([SLICES, ROWS, TOKENS], tl.float32))
    up_sums = sums
    if GATED:
        up_sums = _product(first_up, first_x, tl.zeros([SLICES, ROWS, TOKENS], tl.float32))
    column = tl.arange(0, BLOCK)[None, None, :]
    for at in tl.range(FIRST, PART, BLOCK, num_stages=STAGES):
        part_of_x = tl.load(x + at + column, mask=exists, other=0.0)
        sums = _product(tl.load(weight + at + column), part_of_x, sums)
        if GATED:
            up_sums = _product(tl.load(weight + other + at + column), part_of_x, up_sums)
    total = tl.sum(sums, 0)
    dtype: tl.constexpr = x.dtype.element_ty
    if bias is not None:
        total += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = silu_times(total, tl.sum(up_sums, 0), dtype)
    target = out + token.to(tl.int64)[None, :] * num_out + row[:, None]
    there = (token < num_tokens)[None, :] & (row < num_out)[:, None]
    tl.store(target, rounded(total, out.dtype.element_ty), mask=there)
