"""Products whose bits depend on nothing but a row of x and the weight: neither on the batch nor on how it is cut.

The columns are cut into slices, as many as the weight's shape says. Every slice is summed in order of its columns, by
the same instructions whatever the tile, and slices are added in one order. So tiles may be chosen by the number of
rows: up to 16 as `skinny` does it, up to 256 with a program for every slice and a kernel that adds them, else with a
program that takes one slice after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import cdiv, check_floats, early_launch, rounded, take_turn
from purestep.kernels.triton.skinny import SkinnyTile, load_part, product, skinny
from purestep.kernels.types import Kernels

ROWS_OF_MANY = 64 * 120  # of a weight that gives every processor of a large chip a program, without slices
SLICES = 4
COLUMNS = 64  # a step
CHUNK = 512  # entries that a program of the sum takes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times the transpose of weight [out, in], plus bias [out]: [n, out], each row as if it were alone."""
    out = _multiplied(x.reshape(-1, x.shape[-1]), weight, bias, x.dtype)
    return out.view(*x.shape[:-1], -1)


def logits(kernels: Kernels, x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] times the transpose of weight [vocab, in], as it was summed: float32 [n, vocab]."""
    return _multiplied(x, weight, None, torch.float32)


def num_slices(num_out: int, num_in: int) -> int:
    """Into how many slices the columns of a weight are cut."""
    return SLICES if num_out < ROWS_OF_MANY and num_in % (SLICES * COLUMNS) == 0 else 1


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    check_floats("linear", x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    if x.dtype != weight.dtype:
        raise TypeError(f"linear: x {x.dtype} and the weight {weight.dtype} have to be of one type")
    (num_tokens, num_in), num_out = x.shape, weight.shape[0]
    slices = num_slices(num_out, num_in)
    if num_tokens <= 16:
        tile = SkinnyTile(16, 64, COLUMNS, 4, 6 if x.dtype.itemsize == 2 else 3, slices)
        return skinny(x, weight, bias, out_dtype=dtype, tile=tile)
    is_large = num_tokens > 256 and x.dtype.itemsize == 2
    tokens, rows, warps = (128, 128, 8) if is_large else (64, 64, 4)
    splits = slices > 1 and num_tokens <= 256
    out = torch.empty(num_tokens, num_out, dtype=dtype, device=x.device)
    target = torch.empty(slices, num_tokens, num_out, dtype=torch.float32, device=x.device) if splits else out
    grid = (cdiv(num_out, rows), cdiv(num_tokens, tokens), slices if splits else 1)
    stages = 4 if x.dtype.itemsize == 2 else 2
    _fixed[grid](
        x, weight, bias, target, num_tokens, num_out, WIDTH=num_in, TOKENS=tokens, ROWS=rows, SLICES=slices,
        BLOCK=COLUMNS, STAGES=stages, SPLIT=splits, num_warps=warps, **early_launch(),
    )  # fmt: skip
    if splits:
        _add_slices[(num_tokens, cdiv(num_out, CHUNK))](
            target, bias, out, num_out, num_tokens * num_out, SLICES=slices, CHUNK=CHUNK, **early_launch()
        )
    return out


@triton.jit
def _sum_of_slice(
    x, weight, row, token, num_tokens, num_out, number, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sum over one slice: [rows, tokens]."""
    column = tl.arange(0, BLOCK)
    start = number * PART + column[None, :]
    weight += tl.minimum(row, num_out - 1).to(tl.int64)[:, None] * WIDTH + start
    x += token.to(tl.int64)[:, None] * WIDTH + start
    exists = (token < num_tokens)[:, None]
    sums = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for at in tl.range(0, PART, BLOCK, num_stages=STAGES):
        part = load_part(x, at, column, exists, PART, BLOCK)
        sums = product(load_part(weight, at, column, None, PART, BLOCK), part, sums)
    return sums


@triton.jit(do_not_specialize=["num_tokens", "num_out"])
def _fixed(
    x, weight, bias, out, num_tokens, num_out, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    PART: tl.constexpr = WIDTH // SLICES
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    number = tl.program_id(2)
    sums = _sum_of_slice(x, weight, row, token, num_tokens, num_out, number, WIDTH, PART, BLOCK, STAGES)
    if SPLIT:
        out += number.to(tl.int64) * num_tokens * num_out
    else:
        if SLICES == 4:
            sums += _sum_of_slice(x, weight, row, token, num_tokens, num_out, 2, WIDTH, PART, BLOCK, STAGES)
            others = _sum_of_slice(x, weight, row, token, num_tokens, num_out, 1, WIDTH, PART, BLOCK, STAGES)
            others += _sum_of_slice(x, weight, row, token, num_tokens, num_out, 3, WIDTH, PART, BLOCK, STAGES)
            sums += others
        if bias is not None:
            sums += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    target = out + token.to(tl.int64)[:, None] * num_out + row[None, :]
    result = rounded(tl.trans(sums), out.dtype.element_ty)
    tl.store(target, result, mask=(token < num_tokens)[:, None] & (row < num_out)[None, :])


@triton.jit
def _add_slices(
    slices, bias, out, num_out, size, SLICES: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):
    take_turn(EARLY)
    row = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = tl.program_id(0).to(tl.int64) * num_out + row
    exists = row < num_out
    tl.static_assert(SLICES == 4)
    first = tl.load(slices + place, mask=exists, other=0.0)
    second = tl.load(slices + size + place, mask=exists, other=0.0)
    first += tl.load(slices + size.to(tl.int64) * 2 + place, mask=exists, other=0.0)
    second += tl.load(slices + size.to(tl.int64) * 3 + place, mask=exists, other=0.0)
    first += second
    if bias is not None:
        first += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, rounded(first, out.dtype.element_ty), mask=exists)
