"""The dense CPU kernels against the reference."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.cpu import dense
from purestep.kernels.reference import reference
from tests.laws import assert_pure, equal
from tests.profiles import examples

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SEEDS = st.integers(0, 2**32)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Equal up to a few roundings of their type, relative to the largest of the row."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.numel():
        scale = want.abs().amax(-1, keepdim=True).double() + 1e-30
        assert float(((got.double() - want.double()).abs() / scale).max()) < 8 * torch.finfo(got.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS, rows=st.integers(0, 5), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_norms(dtype: torch.dtype, seed: int, rows: int, scale: float) -> None:
    """rms_norm over any leading dimensions, of single tensors and of sums."""
    x, weight = normal(rows, 2, 16, dtype=dtype, seed=seed) * scale, normal(16, dtype=dtype, seed=seed + 1)
    residual = normal(rows, 2, 16, dtype=dtype, seed=seed + 2) * scale
    assert_close(assert_pure(dense.rms_norm, x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    got = assert_pure(dense.add_rms_norm, x, residual, weight, 1e-5)
    want = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(got[0], want[0])
    assert equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS, tokens=st.integers(0, 4))
def test_rotate(dtype: torch.dtype, seed: int, tokens: int) -> None:
    """Also of heads that are views of one tensor, as a model gives them."""
    heads, angle = normal(tokens, 6, 8, dtype=dtype, seed=seed), normal(tokens, 4, dtype=dtype, seed=seed + 1)
    q, k, _ = heads.split([3, 2, 1], dim=-2)
    arguments = (q, k, angle.cos(), angle.sin())
    for got, want in zip(assert_pure(dense.rotate, *arguments), reference.rotate(*arguments), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS, rows=st.integers(0, 4))
def test_silu_and_mul(dtype: torch.dtype, seed: int, rows: int) -> None:
    """The same operations as the reference's, so the same bits."""
    x = normal(rows, 10, dtype=dtype, seed=seed)
    assert equal(assert_pure(dense.silu_and_mul, x), reference.silu_and_mul(x))


@pytest.mark.parametrize("num_threads", [1, 2, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@examples(0.3)
@given(
    seed=SEEDS,
    rows=st.sampled_from([0, 1, 2, 40]),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    small=st.sampled_from([0, 2**20]),
)
@example(seed=0, rows=1, size=(16, 8), small=2**20)
def test_prepared_weights(
    dtype: torch.dtype, num_threads: int, seed: int, rows: int, size: tuple[int, int], small: int
) -> None:
    """linear and embed give the same with a prepared weight as with a plain one, with a bias and without, in whatever
    parts it was prepared."""
    weight, bias = normal(*size, dtype=dtype, seed=seed), normal(size[0], dtype=dtype, seed=seed + 1)
    x = normal(rows, size[1], dtype=dtype, seed=seed + 2)
    ids = torch.arange(rows) % size[0]
    with (
        mock.patch.object(torch, "get_num_threads", lambda: num_threads),
        mock.patch.object(dense, "SMALL_BYTES", small),
    ):
        prepared = dense.prepare(weight)
    for b in (None, bias):
        scale = x.abs() @ weight.abs().T + (0 if b is None else b.abs()) + 1e-30
        for form in (weight, prepared):
            got, want = dense.linear(x, form, b), reference.linear(x, weight, b)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert ((got.double() - want.double()).abs() <= 4 * torch.finfo(dtype).eps * scale.double()).all()
    for form in (weight, prepared):
        assert equal(dense.embed(form, ids), reference.embed(weight, ids))


def test_what_has_no_packed_form_stays_as_it_is() -> None:
    """float64, and anything but a matrix."""
    for weight in (torch.ones(4, 4, dtype=torch.float64), torch.ones(4), torch.ones(0, 4)):
        assert dense.prepare(weight) is weight


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN has no packed form"
)
def test_a_prepared_weight_keeps_the_weight_and_a_copy() -> None:
    """The weight itself is kept, not copied; the packed copy holds the values of the moment."""
    weight = torch.ones(4, 4)
    prepared = dense.prepare(weight)
    assert isinstance(prepared, dense.PackedWeight)
    assert prepared.dense is weight
    weight.zero_()
    for rows in (1, 2):
        assert dense.linear(torch.ones(rows, 4), prepared).tolist() == [[4.0] * 4] * rows


def test_copies_take_no_part_in_gradients() -> None:
    """A trainer's parameters can be prepared; what comes of them is cut off from its graph."""
    y = dense.linear(torch.ones(1, 4), dense.prepare(torch.ones(4, 4, requires_grad=True)))
    assert not y.requires_grad
