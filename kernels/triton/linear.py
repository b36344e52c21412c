"""Products with a weight, and what is fused with them: which kernel takes which shape.

One row: a kernel of our own reads the weight once, with norm, residual, bias and activation in the same pass. A few
rows of a narrow type: tensor cores, with the activation in the same pass. More: torch, that is cuBLAS. The choice is
made by shapes and types alone. All accumulate in float32 and round where the reference rounds.
"""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from purestep.kernels.reference import compositions
from purestep.kernels.triton.dense import add_rms_norm, rms_norm, silu_and_mul
from purestep.kernels.triton.gemv import GemvTile, Norm, gemv
from purestep.kernels.triton.shared import FLOATS
from purestep.kernels.triton.skinny import SkinnyTile, skinny
from purestep.kernels.types import Kernels

MOST_TOKENS = 16  # of a product that is not torch's


def tile_for(
    num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype, *, gated: bool
) -> GemvTile | SkinnyTile | None:
    """How to cut x [num_tokens, num_in] times the transpose of a weight [num_out, num_in], or two if gated; None:
    torch's product is to be used."""
    if num_tokens == 1:
        columns = next((c for c in (2048, 1024, 512) if num_in % c == 0), None)
        columns = columns or min(triton.next_power_of_2(num_in), 2048)
        return GemvTile(rows=4, columns=columns, num_warps=8 if gated else 4)
    if 1 < num_tokens <= MOST_TOKENS and dtype.itemsize == 2:
        rows = 16 if num_out <= 2112 else 32
        return SkinnyTile(16, rows, 128 if gated else 256, 4, 4, False)
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times the transpose of weight [out, in], plus bias [out]: [n, out]."""
    tile = _tile(x, weight, bias)
    if isinstance(tile, GemvTile):
        return gemv(x.flatten(), weight, bias, tile=tile)[0].view(*x.shape[:-1], -1)
    if isinstance(tile, SkinnyTile):
        return skinny(x.flatten(0, -2), weight, bias, tile=tile).view(*x.shape[:-1], -1)
    return functional.linear(x, weight, bias)


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
    tile = _tile(x, weight, bias, gain, residual) if _is_own(kernels) else None
    if isinstance(tile, GemvTile):
        return _normed_gemv(x, residual, Norm(gain, eps), weight, bias, tile, gated=False)
    return compositions.norm_linear(kernels, x, residual, gain, eps, weight, bias)


def norm_gate_up(
    kernels: Kernels, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of the RMS norm of x + residual, and x + residual; one kernel for one row, two for a few."""
    tile = _tile(x, weight, None, gain, residual, gated=True) if _is_own(kernels) else None
    if isinstance(tile, GemvTile):
        return _normed_gemv(x, residual, Norm(gain, eps), weight, None, tile, gated=True)
    if isinstance(tile, SkinnyTile):
        normed, total = (rms_norm(x, gain, eps), x) if residual is None else add_rms_norm(x, residual, gain, eps)
        out = skinny(normed.flatten(0, -2), weight, gated=True, tile=tile)
        return out.view(*x.shape[:-1], -1), total
    return compositions.norm_gate_up(kernels, x, residual, gain, eps, weight)


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


def _is_own(kernels: Kernels) -> bool:
    """Whether the parts that the fused kernels stand for are ours: a set with another part is composed of its parts."""
    parts = (kernels.linear, kernels.rms_norm, kernels.add_rms_norm, kernels.silu_and_mul)
    return parts == (linear, rms_norm, add_rms_norm, silu_and_mul)


def _tile(
    x: Tensor, weight: Tensor, *others: Tensor | None, gated: bool = False
) -> GemvTile | SkinnyTile | None:
    """How to cut the product; None if types or strides are not those that our kernels take."""
    given = (x, weight, *(other for other in others if other is not None))
    if x.numel() == 0 or x.dtype not in FLOATS:
        return None
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in given):
        return None
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    return tile_for(x.numel() // num_in, num_out, num_in, x.dtype, gated=gated)
