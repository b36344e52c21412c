"""Rotary angles against transformers."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from purestep.kernels.reference import reference
from purestep.pure.models.config import RopeConfig, RopeScaling
from purestep.pure.models.rope import rope_cos_sin
from tests.laws import assert_pure

SCALINGS = {
    "none": None,
    "Llama 3.1": RopeScaling(8.0, 1.0, 4.0, 8192),
    "tiny": RopeScaling(32.0, 2.0, 3.0, 100),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    dim=st.sampled_from([2, 8, 24, 64, 128]),
    theta=st.sampled_from([500.0, 1e4, 5e5]),
    scaling=st.sampled_from(sorted(SCALINGS)),
    positions=st.lists(st.integers(0, 131_071), min_size=1, max_size=5),
)
def test_angles_are_transformers_to_the_bit(
    dtype: torch.dtype, dim: int, theta: float, scaling: str, positions: list[int]
) -> None:
    """In float32, and rounded from it: scaling, long contexts and all."""
    made = SCALINGS[scaling]
    parameters = {"rope_type": "default", "rope_theta": theta}
    if made is not None:
        parameters |= {
            name: getattr(made, name) for name in RopeScaling.__slots__ if not name.startswith("_")
        }
        parameters["rope_type"] = "llama3"
    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=200_000,
        rope_parameters=parameters,
    )
    at = torch.tensor(positions)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), at[None])
    found = assert_pure(
        rope_cos_sin, RopeConfig(theta=theta, scaling=made), at, dim, dtype, kernels=reference
    )
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want[0, :, : dim // 2])


def test_float64_angles_have_float64_precision() -> None:
    """At position 100,000 float32 angles are off by thousandths; these are not."""
    rope, at = RopeConfig(theta=10000.0), torch.tensor([100_000])
    cos, _ = rope_cos_sin(rope, at, 4, torch.float64, kernels=reference)
    exact = torch.tensor([[100_000.0, 1000.0]], dtype=torch.float64).cos()
    assert (cos - exact).abs().max() < 1e-12
