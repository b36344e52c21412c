"""Angles of the rotary position embedding."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.reference.rope import Scaling
from purestep.kernels.triton.shared import FLOATS, cdiv, late_launch, let_next_begin, rounded

ENTRIES = 256  # per program


def angles(
    positions: Tensor, *, head_dim: int, theta: float, scaling: Scaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles in `dtype`, [tokens, head_dim / 2].

    It begins when all that was launched before has ended, which `attend_qkv` may build on. Frequencies are computed in
    float64 and rounded, angles in float32: at 100,000 either side of float32's own error, some thousandths of a radian.

    Raises:
        TypeError: dtype is not float32, bfloat16 or float16.
    """
    if dtype not in FLOATS:
        raise TypeError(
            f"angles were asked for in {dtype}; the Triton kernels give float32, bfloat16 and float16"
        )
    half = head_dim // 2
    cos = torch.empty(len(positions), half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if cos.numel():
        factor, low, high, context = scaling or (1.0, 0.0, 1.0, 0)
        _angles[(cdiv(cos.numel(), ENTRIES),)](
            positions, cos, sin, cos.numel(), positions.stride(0), HALF=half, STEP=-2 * math.log2(theta) / head_dim,
            FACTOR=factor, LOW=low, HIGH=high, CONTEXT=context, SLOWED=scaling is not None, ENTRIES=ENTRIES,
            **late_launch(),
        )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize=["count", "step"], do_not_specialize_on_alignment=["positions"])
def _angles(
    positions, cos, sin, count, step, HALF: tl.constexpr, STEP: tl.constexpr, FACTOR: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, CONTEXT: tl.constexpr, SLOWED: tl.constexpr, ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    exponent = (entry % HALF).to(tl.float64) * tl.full([ENTRIES], STEP, tl.float64)
    frequency = tl.exp2(exponent)
    if SLOWED:
        waves = frequency * (CONTEXT / 6.283185307179586)  # in the context
        weight = (waves - LOW) / (HIGH - LOW)
        between = (1 - weight) * frequency / FACTOR + weight * frequency
        slowed = tl.where(waves < LOW, frequency / FACTOR, tl.where(waves > HIGH, frequency, between))
        frequency = slowed
    position = tl.load(positions + entry // HALF * step, mask=entry < count, other=0).to(tl.float32)
    angle = position * frequency.to(tl.float32)
    dtype: tl.constexpr = cos.dtype.element_ty
    tl.store(cos + entry, rounded(tl.cos(angle), dtype), mask=entry < count)
    tl.store(sin + entry, rounded(tl.sin(angle), dtype), mask=entry < count)
