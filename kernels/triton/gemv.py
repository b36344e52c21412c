"""A product with one row: as fast as the weight can be read, with what lies around it in the same pass.

A program takes some rows of the weight and all of their columns, and adds in float32 in one fixed order: the lanes'
own sums first, then across lanes. So a result depends neither on timing nor on the number of programs. The first part
of the weight is fetched before the kernel waits for its input, which hides the launch and the first access.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.triton.shared import (
    cdiv,
    check_gated,
    early_launch,
    let_next_begin,
    next_power_of_2,
    rounded,
    silu_times,
    wait_for_previous,
)


@record(static=True)
class GemvTile:
    """How the kernel is cut: rows of the weight (of each half, if gated) a program, columns at a time, warps."""

    rows: int
    columns: int
    num_warps: int


@record(static=True)
class Norm:
    """RMS norm of the input: whose gain, and the small number under the root."""

    gain: Tensor
    eps: float


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: GemvTile,
) -> tuple[Tensor, Tensor]:
    """One row x [in], or x + residual, normed if a norm is given, times the transpose of weight [out, in], plus bias.

    With `gated` the weight is [gate, up], and the result silu(gate) * up: [out / 2]. Also returns x + residual. All
    of one type, contiguous; the sum, the normed row, gate and up are rounded to it, as if they had been written. The
    result is of that type, or of out_dtype.
    """
    check_gated("gemv", bias, gated=gated)
    num_in, num_out = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    out = torch.empty(num_out, dtype=out_dtype or x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    _gemv[(cdiv(num_out, tile.rows),)](
        x, residual, None if norm is None else norm.gain, weight, bias, out, total,
        0.0 if norm is None else norm.eps, num_out,
        WIDTH=num_in, FULL=next_power_of_2(num_in), ROWS=tile.rows, BLOCK=tile.columns, GATED=gated,
        num_warps=tile.num_warps, **early_launch(),
    )  # fmt: skip
    return out, total


@triton.jit
def _input(x, residual, column, WIDTH: tl.constexpr):
    """Entries of x + residual, rounded to their type, in float32; 0 past the end."""
    value = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if residual is not None:
        kept = tl.load(residual + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        value = rounded(kept + value, x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _weights(weight, place, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of some rows, which are read once a step."""
    if WIDTH % BLOCK == 0:
        return tl.load(weight + place, eviction_policy="evict_first")
    else:
        return tl.load(
            weight + place, mask=(column < WIDTH)[None, :], other=0.0, eviction_policy="evict_first"
        )


@triton.jit(do_not_specialize=["num_out"])
def _gemv(
    x, residual, gain, weight, bias, out, total, eps, num_out, WIDTH: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    place = tl.minimum(row, num_out - 1).to(tl.int64)[:, None] * WIDTH + column[None, :]
    other = num_out.to(tl.int64) * WIDTH  # from a row of the gate to that of `up`
    next_part = _weights(weight, place, column, WIDTH, BLOCK)
    next_up = next_part
    if GATED:
        next_up = _weights(weight + other, place, column, WIDTH, BLOCK)
    next_gain = column
    if gain is not None:
        next_gain = tl.load(gain + column, mask=column < WIDTH, other=0.0)
    wait_for_previous(EARLY)
    dtype: tl.constexpr = x.dtype.element_ty
    everywhere = tl.arange(0, FULL)
    whole = _input(x, residual, everywhere, WIDTH)
    scale = 1.0
    if gain is not None:
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / WIDTH + eps)
    if residual is not None and tl.program_id(0) == 0:
        tl.store(total + everywhere, whole.to(dtype), mask=everywhere < WIDTH)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    up_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
        part, up, own_gain = next_part, next_up, next_gain
        at = i * BLOCK + column
        if (i + 1) * BLOCK < WIDTH:
            next_part = _weights(weight, place + (i + 1) * BLOCK, at + BLOCK, WIDTH, BLOCK)
            if GATED:
                next_up = _weights(weight + other, place + (i + 1) * BLOCK, at + BLOCK, WIDTH, BLOCK)
            if gain is not None:
                next_gain = tl.load(gain + at + BLOCK, mask=at + BLOCK < WIDTH, other=0.0)
        value = whole if BLOCK == FULL else _input(x, residual, at, WIDTH)
        if gain is not None:
            value = own_gain.to(tl.float32) * rounded(value * scale, dtype).to(tl.float32)
            value = rounded(value, dtype).to(tl.float32)
        sums += part.to(tl.float32) * value[None, :]
        if GATED:
            up_sums += up.to(tl.float32) * value[None, :]
    result = tl.sum(sums, 1)
    if bias is not None:
        result += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
    if GATED:
        result = silu_times(result, tl.sum(up_sums, 1), dtype)
    tl.store(out + row, rounded(result, out.dtype.element_ty), mask=row < num_out)
