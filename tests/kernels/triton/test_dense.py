"""Norms, rotation and activation: the reference's values, rounded where it rounds."""

import pytest
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.triton.cases import relative_error
from tests.kernels.triton.device import DEVICE, NARROW, quiet
from tests.laws import equal

from purestep.kernels.triton.dense import add_rms_norm, rms_norm, rotate, silu_and_mul  # isort: skip

pytestmark = quiet

DTYPES = (torch.float32, *NARROW)
# A sum in another order, or a function of another library, moves a result to its neighbour at times.
NEIGHBOUR = {torch.float32: 2**-21, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """Each entry is the expected one or at most two beside it: both sides round twice, before and after the gain, and
    another order of summation may turn the first rounding.
    """
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=2 * NEIGHBOUR[ours.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 48, 100, 1500])
def test_rms_norm_equals_reference(dtype: torch.dtype, width: int) -> None:
    x, gain = normal(5, width, dtype=dtype) * 3, normal(width, dtype=dtype)
    assert_near(rms_norm(x, gain, 1e-5), reference.rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_rounded_before_it_is_normalized(dtype: torch.dtype) -> None:
    x, residual, gain = normal(3, 200, dtype=dtype), normal(3, 200, dtype=dtype), normal(200, dtype=dtype)
    ours, total = add_rms_norm(x, residual, gain, 1e-6)
    expected, expected_total = reference.add_rms_norm(x, residual, gain, 1e-6)
    assert equal(total, expected_total)
    assert_near(ours, expected)


def test_heads_of_a_fused_projection_are_normalized_where_they_lie() -> None:
    q = normal(4, 7, 96, dtype=torch.bfloat16)[:, 1:4]
    gain = normal(96, dtype=torch.bfloat16)
    assert_near(rms_norm(q, gain, 1e-5), reference.rms_norm(q, gain, 1e-5))


def test_a_wider_gain_widens_the_result() -> None:
    x, gain = normal(2, 64, dtype=torch.bfloat16), normal(64, dtype=torch.float32)
    assert_near(rms_norm(x, gain, 1e-5), reference.rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 96])
def test_rotation_equals_reference_to_the_bit(dtype: torch.dtype, dim: int) -> None:
    """Every product and every sum is rounded to the type."""
    qkv = normal(5, 3 + 1 + 1, dim, dtype=dtype)
    cos, sin = normal(5, dim // 2, dtype=dtype), normal(5, dim // 2, dtype=dtype)
    q, k = qkv[:, :3], qkv[:, 3:4]
    assert equal(rotate(q, k, cos, sin), reference.rotate(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_equals_reference(dtype: torch.dtype) -> None:
    x = normal(3, 2 * 1100, dtype=dtype) * 5
    assert_near(silu_and_mul(x), reference.silu_and_mul(x))


def test_float64_is_refused() -> None:
    x = torch.ones(2, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        rms_norm(x, x[0], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [2048, 4096, 5120])
def test_large_rows_against_float64(dtype: torch.dtype, hidden: int) -> None:
    x, residual = normal(777, hidden, dtype=dtype), normal(777, hidden, dtype=dtype)
    gain = normal(hidden, dtype=dtype)
    ours, total = add_rms_norm(x, residual, gain, 1e-5)
    wide = total.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    assert relative_error(ours, expected) < NEIGHBOUR[dtype]
    gate, up = x.double().chunk(2, -1)
    assert relative_error(silu_and_mul(x), gate * gate.sigmoid() * up) < NEIGHBOUR[dtype]
