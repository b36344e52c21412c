"""The dense kernels against transformers, which defines their rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from purestep.kernels.reference import dense
from tests.laws import assert_pure
from tests.profiles import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_rms_norm_is_transformers_to_the_bit(dtype: torch.dtype, seed: int, scale: float) -> None:
    """Narrow types are widened, normalised, rounded, and only then weighted."""
    x, weight = normal(3, 16, dtype=dtype, seed=seed) * scale, normal(16, dtype=dtype, seed=seed + 1)
    norm = LlamaRMSNorm(16, eps=1e-5)
    norm.weight.data = weight
    assert torch.equal(assert_pure(dense.rms_norm, x, weight, 1e-5), norm(x))


def test_rms_norm_keeps_float64() -> None:
    """Nothing is rounded to float32 on the way."""
    x, weight = normal(3, 16, dtype=torch.float64), normal(16, dtype=torch.float64, seed=1)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (dense.rms_norm(x, weight, 1e-5) - expected).abs().max() < 1e-14


@given(seed=st.integers(0, 2**32))
def test_add_rms_norm_is_an_addition_and_a_norm(seed: int) -> None:
    """It gives the norm of the sum, and the sum."""
    x, residual, weight = normal(4, 8, seed=seed), normal(4, 8, seed=seed + 1), normal(8, seed=seed + 2)
    y, total = assert_pure(dense.add_rms_norm, x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(y, dense.rms_norm(residual + x, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@examples(0.3)
@given(seed=st.integers(0, 2**32))
def test_rotation_is_transformers_to_the_bit(dtype: torch.dtype, seed: int) -> None:
    """Halves of a head turn against each other; cos and sin are given once for both halves."""
    q, k = normal(5, 4, 8, dtype=dtype, seed=seed), normal(5, 2, 8, dtype=dtype, seed=seed + 1)
    angle = normal(5, 4, dtype=torch.float64, seed=seed + 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    twice = [torch.cat((x, x), -1)[None] for x in (cos, sin)]
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *twice)
    for got, want in zip(assert_pure(dense.rotate, q, k, cos, sin), expected, strict=True):
        assert torch.equal(got, want[0].transpose(0, 1))


@given(seed=st.integers(0, 2**32), shift=st.integers(0, 1000))
def test_rotated_products_know_only_distances(seed: int, shift: int) -> None:
    """Moving query and key by the same number of positions leaves their product."""
    q, k = (
        normal(1, 1, 8, dtype=torch.float64, seed=seed),
        normal(1, 1, 8, dtype=torch.float64, seed=seed + 1),
    )
    frequency = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)

    def product(at_q: int, at_k: int) -> float:
        (a, _), (b, _) = (
            dense.rotate(x, x, (at * frequency).cos()[None], (at * frequency).sin()[None])
            for x, at in ((q, at_q), (k, at_k))
        )
        return float((a * b).sum())

    assert abs(product(7, 3) - product(7 + shift, 3 + shift)) < 1e-9


def test_silu_and_mul_gates_the_second_half() -> None:
    """The first half is the gate."""
    gate, up = normal(3, 4), normal(3, 4, seed=1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.equal(assert_pure(dense.silu_and_mul, torch.cat((gate, up), -1)), expected)


def test_embed_and_linear() -> None:
    """Rows by id; a product with the transposed weight."""
    weight, ids = normal(5, 4), torch.tensor([3, 0, 3])
    assert torch.equal(assert_pure(dense.embed, weight, ids), weight[ids])
    x, bias = normal(3, 4, seed=1), normal(5, seed=2)
    assert torch.allclose(assert_pure(dense.linear, x, weight, bias), x @ weight.T + bias)
    assert torch.allclose(dense.linear(x, weight), x @ weight.T)
