"""Rotary angles: the reference's within float32's error, which grows with the position."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, NARROW, few, quiet
from tests.laws import assert_pure

from purestep.kernels.triton.rope import angles  # isort: skip

pytestmark = quiet


@few(12)
@given(
    st.lists(st.integers(0, 131_071), max_size=5),
    st.sampled_from([2, 24, 64, 128]),
    st.sampled_from([500.0, 1e4, 5e5]),
    st.sampled_from([None, (8.0, 1.0, 4.0, 8192), (32.0, 2.0, 3.0, 100)]),
)
def test_equals_float64(positions: list[int], dim: int, theta: float, scaling: Any) -> None:
    at = torch.tensor(positions, dtype=torch.int64, device=DEVICE)
    how = {"head_dim": dim, "theta": theta, "scaling": scaling}
    ours = assert_pure(angles, at, dtype=torch.float32, **how)
    for got, want in zip(ours, reference.angles(at, dtype=torch.float64, **how), strict=True):
        assert got.shape == (len(positions), dim // 2)
        assert ((got - want).abs() <= 1e-6 + at[:, None] * 2.0**-22).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_types_are_rounded_from_float32(dtype: torch.dtype) -> None:
    at = torch.arange(7, device=DEVICE) * 1000
    how: dict[str, Any] = {"head_dim": 64, "theta": 1e4, "scaling": None}
    for got, wide in zip(angles(at, dtype=dtype, **how), angles(at, dtype=torch.float32, **how), strict=True):
        assert torch.equal(got, wide.to(dtype))


def test_float64_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        angles(torch.arange(3, device=DEVICE), head_dim=8, theta=1e4, scaling=None, dtype=torch.float64)
