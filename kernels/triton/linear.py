"""Products with a weight, and what is fused with them: which kernel takes which shape.

One row: a kernel of our own reads the weight once, with norm, residual, bias and activation in the same pass. A few
rows of a narrow type: tensor cores, with the activation in the same pass. Else torch, that is cuBLAS. The choice is
made by shapes and types alone; it is what was fastest within the captured decode steps of three models on an H200, or
at most 2 % slower (tests/bench/results/h200_products.json, measured by tests/bench/gpu_gemm.py). All accumulate in
float32 and round where the reference rounds.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from purestep.kernels.reference import compositions
from purestep.kernels.triton.dense import add_rms_norm, rms_norm, silu_and_mul
from purestep.kernels.triton.gemv import GemvTile, Norm, gemv
from purestep.kernels.triton.shared import FLOATS, next_power_of_2
from purestep.kernels.triton.skinny import SkinnyTile, skinny
from purestep.kernels.triton.thin import ThinTile, thin
from purestep.kernels.types import Kernels

MANY_ROWS = 6400  # of each half of a gated weight: a hundred programs of 64
VOCABULARY = 32768  # rows of a weight that is a head
FEWEST_ROWS, MOST_ROWS = 960, 4096  # of a weight that is cut into slices
SLICES = 4
PROCESSORS = 132  # of a large chip
MOST_TOKENS = 64  # rows of a product that may be our own kernel's

Tile = GemvTile | SkinnyTile | ThinTile


def tile_for(
    num_tokens: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    normed: bool = False,
) -> Tile | None:
    """How to cut x [num_tokens, num_in] times the transpose of a weight [num_out, num_in], or two if gated; None:
    torch's product is to be used. `normed`: a norm of x is made on the way."""
    if num_tokens == 1:
        return _tile_for_one(num_in, gated=gated, normed=normed)
    if dtype.itemsize != 2:
        return None
    if num_tokens <= 8:
        tile = _tile_for_eight(num_out, num_in, gated=gated)
        if tile is not None and tile.divides(num_in):
            return tile
    if num_tokens <= 32:
        tokens = 8 if num_tokens <= 8 else 16 if num_tokens <= 16 else 32
        return _tile_for_a_few(tokens, num_out, num_in, gated=gated)
    if num_tokens <= MOST_TOKENS and num_out >= (MANY_ROWS if gated else VOCABULARY):
        return SkinnyTile(64, 64, 64, 4, (5 if num_in <= 2048 else 4) if gated else 6)
    return None


def _tile_for_eight(num_out: int, num_in: int, *, gated: bool) -> ThinTile | None:
    """The tile for up to 8 rows where programs that begin early win: a wide or a small weight, if gated; else a large
    one, and one of which slices make more programs than processors."""
    if gated:
        if num_out >= MANY_ROWS:
            return ThinTile(8, 16, 1, 128, 128, 4) if num_in > 2048 else None
        return ThinTile(8, 16, 4, 256, 128, 2) if num_out >= FEWEST_ROWS else None
    if VOCABULARY > num_out >= 4096 and num_in >= 4096:
        return ThinTile(8, 16, 4, 256, 128, 4) if num_out > 4096 else ThinTile(8, 16, 4, 128, 128, 5)
    if FEWEST_ROWS <= num_out <= MOST_ROWS and _wait_for_some(num_out):
        return ThinTile(8, 16, 8, 256, 128, 3)
    return None


def _wait_for_some(num_out: int) -> bool:
    """With all slices most processors would wait for a few that have two programs; with half, none is faster."""
    return PROCESSORS < num_out * SLICES // 64 < 3 * PROCESSORS // 2


def _tile_for_a_few(tokens: int, num_out: int, num_in: int, *, gated: bool) -> SkinnyTile | None:
    """The tile for 8, 16 or 32 rows: slices where they give most processors of a large chip something to do."""
    if num_out >= (MANY_ROWS if gated else VOCABULARY):
        columns, stages = (64, 6 if tokens == 32 else 5) if gated else (128, 4)
        return SkinnyTile(max(tokens, 16), 64, columns, 4, stages)
    if not FEWEST_ROWS <= num_out <= MOST_ROWS or num_in % (SLICES * 128):
        return None
    if gated:
        return SkinnyTile(tokens, 64, 64, 4, 5, SLICES if tokens == 8 else SLICES // 2)
    if _wait_for_some(num_out):
        return None
    stages = 5 if tokens <= 16 and num_in > tokens * 128 else 4
    return SkinnyTile(tokens, 64, 128, 4, stages, SLICES // 2 if tokens == 32 and num_out > 2048 else SLICES)


def _tile_for_one(num_in: int, *, gated: bool, normed: bool) -> GemvTile | None:
    """The tile for one row: columns that divide it if any do, and as many rows as keep enough on their way."""
    divisors = [c for c in (2048, 1024, 512) if num_in % c == 0]
    columns = divisors[0] if divisors else min(next_power_of_2(num_in), 2048)
    if gated:
        if num_in > 2048:
            return None
        return GemvTile(2, columns, 4) if columns == 2048 else GemvTile(4, columns, 8)
    if normed and num_in > 2048:
        return GemvTile(8, min(columns, 1024), 4)
    if num_in > 2048:
        return GemvTile(1, columns, 4) if columns == 2048 else GemvTile(2, 2048, 4)
    return GemvTile(2 if normed and num_in <= 1024 else 4, columns, 4)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times the transpose of weight [out, in], plus bias [out]: [n, out]."""
    tile = _tile(x, weight, bias)
    if isinstance(tile, GemvTile):
        return gemv(x.flatten(), weight, bias, tile=tile)[0].view(*x.shape[:-1], -1)
    if tile is not None:
        return _of_a_few(x, weight, bias, tile=tile)
    return functional.linear(x, weight, bias)


def logits(kernels: Kernels, x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] times the transpose of weight [vocab, in], as it was summed: float32 [n, vocab]."""
    tile = _tile(x, weight) if is_own(kernels) else None
    if isinstance(tile, GemvTile):
        return gemv(x.flatten(), weight, out_dtype=torch.float32, tile=tile)[0].view(*x.shape[:-1], -1)
    if tile is not None:
        return _of_a_few(x, weight, out_dtype=torch.float32, tile=tile)
    if x.is_cuda and x.ndim == 2 and x.dtype.itemsize == 2 and x.dtype == weight.dtype and is_own(kernels):
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return compositions.logits(kernels, x, weight)


def norm_linear(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """linear of the RMS norm of x + residual, and x + residual; one kernel for one row."""
    tile = _tile(x, weight, bias, gain, residual, normed=True) if is_own(kernels) else None
    if isinstance(tile, GemvTile):
        return _normed_gemv(x, residual, Norm(gain, eps), weight, bias, tile, gated=False)
    return compositions.norm_linear(kernels, x, residual, gain, eps, weight, bias)


def norm_gate_up(
    kernels: Kernels, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of the RMS norm of x + residual, and x + residual; one kernel for one row, two for a few."""
    tile = _tile(x, weight, gain, residual, gated=True, normed=True) if is_own(kernels) else None
    if isinstance(tile, GemvTile):
        return _normed_gemv(x, residual, Norm(gain, eps), weight, None, tile, gated=True)
    if tile is not None:
        normed, total = (
            (rms_norm(x, gain, eps), x) if residual is None else add_rms_norm(x, residual, gain, eps)
        )
        return _of_a_few(normed, weight, gated=True, tile=tile), total
    return compositions.norm_gate_up(kernels, x, residual, gain, eps, weight)


def _of_a_few(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: SkinnyTile | ThinTile, **how: Any
) -> Tensor:
    rows = x.flatten(0, -2)
    if isinstance(tile, ThinTile):
        out = thin(rows, weight, bias, tile=tile, **how)
    else:
        out = skinny(rows, weight, bias, tile=tile, **how)
    return out.view(*x.shape[:-1], -1)


def _normed_gemv(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    tile: GemvTile,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    kept = None if residual is None else residual.flatten()
    out, total = gemv(x.flatten(), weight, bias, residual=kept, norm=norm, gated=gated, tile=tile)
    return out.view(*x.shape[:-1], -1), total.view(x.shape)


def is_own(kernels: Kernels) -> bool:
    """Whether the parts that the fused kernels stand for are ours: a set with another part is composed of its parts."""
    parts = (kernels.linear, kernels.rms_norm, kernels.add_rms_norm, kernels.silu_and_mul)
    return parts == (linear, rms_norm, add_rms_norm, silu_and_mul)


def _tile(
    x: Tensor, weight: Tensor, *others: Tensor | None, gated: bool = False, normed: bool = False
) -> Tile | None:
    """How to cut the product; None if types or strides are not those that our kernels take."""
    if x.numel() > MOST_TOKENS * x.shape[-1]:
        return None
    given = (x, weight, *(other for other in others if other is not None))
    if x.numel() == 0 or x.dtype not in FLOATS:
        return None
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in given):
        return None
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    return tile_for(x.numel() // num_in, num_out, num_in, x.dtype, gated=gated, normed=normed)
