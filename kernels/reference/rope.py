"""Angles of the rotary position embedding."""

import math

import torch
from torch import Tensor

# Llama 3's slowing of low frequencies: by which factor, the two bounds of the passage between slowed and kept (as
# waves in the context), the context's length. Source: transformers' `llama3` rope type.
Scaling = tuple[float, float, float, int]


def angles(
    positions: Tensor, *, head_dim: int, theta: float, scaling: Scaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles in `dtype`, [tokens, head_dim / 2]; computed in float32 or wider.

    Source: https://arxiv.org/abs/2104.09864; operations in transformers' order, so that float32 agrees.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency = frequencies(head_dim, theta, scaling, device=positions.device, dtype=wide)
    angle = positions.to(wide)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def frequency_divisors(head_dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    """By how much each rotary frequency is slowed, float32 [head_dim / 2]; 1 where there is no scaling."""
    cpu = torch.device("cpu")
    plain = frequencies(head_dim, theta, None, device=cpu, dtype=torch.float32)
    return plain / frequencies(head_dim, theta, scaling, device=cpu, dtype=torch.float32)


def frequencies(
    head_dim: int, theta: float, scaling: Scaling | None, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Radians a position, [head_dim / 2]."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=dtype)
    frequency = 1.0 / (theta ** (steps / head_dim))
    return frequency if scaling is None else _slowed(frequency, *scaling)


def _slowed(frequency: Tensor, factor: float, low: float, high: float, context: int) -> Tensor:
    """Long waves slowed by `factor`, short ones kept, a linear passage between. Source: Llama 3.1's code."""
    wavelength = 2 * math.pi / frequency
    weight = (context / wavelength - low) / (high - low)
    between = (1 - weight) * frequency / factor + weight * frequency
    is_long, is_short = wavelength > context / low, wavelength < context / high
    return torch.where(is_long, frequency / factor, torch.where(is_short, frequency, between))
