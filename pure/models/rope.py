"""Angles of the rotary position embedding."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.models.config import RopeConfig


def rope_cos_sin(
    rope: RopeConfig,
    positions: Int[Tensor, " tokens"],
    head_dim: int,
    dtype: torch.dtype,
    *,
    kernels: Kernels,
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """cos and sin of every token's angles, in `dtype`; computed once a step, in float32 or wider."""
    scaling, numbers = rope.scaling, None
    if scaling is not None:
        context = scaling.original_max_position_embeddings
        numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, context)
    cos, sin = kernels.angles(positions, head_dim=head_dim, theta=rope.theta, scaling=numbers, dtype=dtype)
    return cos, sin
