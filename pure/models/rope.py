"""Angles of the rotary position embedding."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from purestep.kernels.record import replace
from purestep.pure.models.config import RopeConfig, RopeScaling


def rope_cos_sin(
    rope: RopeConfig, positions: Int[Tensor, " tokens"], head_dim: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """cos and sin of every token's angles, in `dtype`; computed once a step, in float32 or wider.

    Source: https://arxiv.org/abs/2104.09864; operations in transformers' order, so that float32 agrees.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency = _frequency(rope, head_dim, device=positions.device, dtype=wide)
    angle = positions.to(wide)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def frequency_divisors(rope: RopeConfig, head_dim: int) -> Float[Tensor, " half"]:
    """By how much each rotary frequency is slowed; 1 where there is no scaling."""
    plain = replace(rope, scaling=None)
    cpu = torch.device("cpu")
    return _frequency(plain, head_dim, device=cpu, dtype=torch.float32) / _frequency(
        rope, head_dim, device=cpu, dtype=torch.float32
    )


def _frequency(rope: RopeConfig, head_dim: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    steps = torch.arange(0, head_dim, 2, device=device, dtype=dtype)
    frequency = 1.0 / (rope.theta ** (steps / head_dim))
    return frequency if rope.scaling is None else _slowed(frequency, rope.scaling)


def _slowed(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves slowed by `factor`, short ones kept, a linear passage between. Source: Llama 3.1's code."""
    low, high, factor = scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    weight = (context / wavelength - low) / (high - low)
    between = (1 - weight) * frequency / factor + weight * frequency
    is_long, is_short = wavelength > context / low, wavelength < context / high
    return torch.where(is_long, frequency / factor, torch.where(is_short, frequency, between))
