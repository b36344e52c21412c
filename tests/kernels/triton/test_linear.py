"""Products with norm, residual, bias and activation in one pass: the reference's values within rounding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from tests.kernels.triton.cases import relative_error
from tests.kernels.triton.device import DEVICE, NARROW, few, quiet
from tests.laws import assert_pure, equal

import purestep.kernels.triton.linear  # isort: skip
from purestep.kernels.triton import cuda_donating  # isort: skip
from purestep.kernels.triton.gemv import GemvTile, gemv  # isort: skip
from purestep.kernels.triton.linear import linear, tile_for  # isort: skip
from purestep.kernels.triton.skinny import SkinnyTile, skinny  # isort: skip
from purestep.kernels.triton.thin import ThinTile, thin  # isort: skip

pytestmark = quiet

OURS = cuda_donating()
# Norm-wise, against float64 from the same rounded parts: a rounding of the result, and of what lies between.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = tuple(ERROR)
TOKENS = st.sampled_from([1, 2, 3, 8, 16, 17, 40])
WIDTHS = st.sampled_from([8, 24, 64, 200, 512, 1024 + 512])
OUTS = st.sampled_from([1, 5, 24, 70])


@pytest.fixture(autouse=True, scope="module")
def _few_rows() -> Iterator[None]:
    """Weights of few rows are multiplied by the kernels that are meant for many."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MANY_ROWS", "VOCABULARY", "FEWEST_ROWS"):
            patch.setattr(purestep.kernels.triton.linear, name, 1)
        yield


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


def wide(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.double() for x in tensors]


def product_error(ours: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> float:
    """Norm-wise, against what such a product weighs: where terms happen to cancel, no more is known than elsewhere."""
    usual = x.double().norm() * weight.double().norm() / weight.shape[1] ** 0.5
    return float((ours.double() - expected).norm() / torch.maximum(expected.norm(), usual))


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    assert relative_error(ours, expected) < ERROR[ours.dtype]


@few(12)
@given(TOKENS, WIDTHS, OUTS, st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_linear(tokens: int, width: int, outs: int, has_bias: bool, dtype: torch.dtype, seed: int) -> None:
    x, weight = normal(tokens, width, dtype=dtype, seed=seed), normal(outs, width, dtype=dtype, seed=seed + 1)
    bias = normal(outs, dtype=dtype, seed=seed + 2) if has_bias else None
    ours = assert_pure(OURS.linear, x, weight, bias)
    assert ours.dtype == dtype
    assert product_error(ours, reference.linear(*wide(x, weight, bias)), x, weight) < ERROR[dtype]


@few(8)
@given(TOKENS, WIDTHS, OUTS, st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_logits(tokens: int, width: int, outs: int, dtype: torch.dtype, seed: int) -> None:
    """In float32, from any type."""
    x, weight = normal(tokens, width, dtype=dtype, seed=seed), normal(outs, width, dtype=dtype, seed=seed + 1)
    ours = assert_pure(OURS.logits, OURS, x, weight)
    assert ours.dtype == torch.float32
    expected = reference.logits(reference, *wide(x, weight))
    assert product_error(ours, expected, x, weight) < ERROR[torch.float32]


@few(12)
@given(TOKENS, WIDTHS, OUTS, st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_norm_linear(tokens: int, width: int, outs: int, adds: bool, dtype: torch.dtype, seed: int) -> None:
    """The sum is the reference's to the bit, and what is normed is what the reference norms."""
    x, gain = normal(tokens, width, dtype=dtype, seed=seed), normal(width, dtype=dtype, seed=seed + 1)
    residual = normal(tokens, width, dtype=dtype, seed=seed + 2) if adds else None
    weight, bias = normal(outs, width, dtype=dtype, seed=seed + 3), normal(outs, dtype=dtype, seed=seed + 4)
    ours, total = assert_pure(OURS.norm_linear, OURS, x, residual, gain, 1e-5, weight, bias)
    _, expected_total = reference.norm_linear(reference, x, residual, gain, 1e-5, weight, bias)
    assert equal(total, expected_total)
    normed = reference.rms_norm(expected_total, gain, 1e-5)
    assert product_error(ours, reference.linear(*wide(normed, weight, bias)), normed, weight) < ERROR[dtype]


@few(12)
@given(TOKENS, WIDTHS, OUTS, st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_norm_gate_up(tokens: int, width: int, outs: int, adds: bool, dtype: torch.dtype, seed: int) -> None:
    x, gain = normal(tokens, width, dtype=dtype, seed=seed), normal(width, dtype=dtype, seed=seed + 1)
    residual = normal(tokens, width, dtype=dtype, seed=seed + 2) if adds else None
    weight = normal(2 * outs, width, dtype=dtype, seed=seed + 3) * width**-0.5
    ours, total = assert_pure(OURS.norm_gate_up, OURS, x, residual, gain, 1e-5, weight)
    _, expected_total = reference.norm_gate_up(reference, x, residual, gain, 1e-5, weight)
    assert equal(total, expected_total)
    normed = reference.rms_norm(expected_total, gain, 1e-5)
    assert_close(ours, reference.silu_and_mul(reference.linear(*wide(normed, weight, None))))


@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (1, 1)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, 64, dtype=torch.bfloat16, seed=0), normal(10, 64, dtype=torch.bfloat16, seed=1)
    assert_close(OURS.linear(x, weight), reference.linear(*wide(x, weight)))
    ours, total = OURS.norm_gate_up(OURS, x, x, weight[0], 1e-5, weight)
    expected, _ = reference.norm_gate_up(reference, x, x, weight[0], 1e-5, weight)
    assert total.shape == x.shape
    assert_close(ours, expected)


@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("columns", [64, 128])
def test_rows_know_nothing_of_each_other(tokens: int, columns: int) -> None:
    """Whatever the others are, and wherever it stands, a row has the same bits; in tiles of any shape."""
    tile = SkinnyTile(tokens, 64, columns, 4, 2)
    x, weight = normal(9, 200, dtype=torch.bfloat16, seed=0), normal(40, 200, dtype=torch.bfloat16, seed=1)
    result = skinny(x, weight, gated=True, tile=tile)
    order = torch.tensor([4, 8, 2], device=DEVICE)
    assert equal(skinny(x[order], weight, gated=True, tile=tile), result[order])
    expected = reference.silu_and_mul(reference.linear(*wide(x, weight)))
    assert_close(result, expected)


@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_slices_stand_in_for_rows(tokens: int, slices: int) -> None:
    """Columns that a tile divides and that it does not, rows that end within a program, several tiles of tokens."""
    tile = SkinnyTile(tokens, 64, 32, 4, 2, slices)
    for width in (64 * slices, 40 * slices):
        x, weight = (
            normal(9, width, dtype=torch.bfloat16, seed=0),
            normal(42, width, dtype=torch.bfloat16, seed=1),
        )
        bias, order = normal(42, dtype=torch.bfloat16, seed=2), torch.tensor([4, 8, 2], device=DEVICE)
        plain = skinny(x, weight, bias, tile=tile)
        assert_close(plain, reference.linear(*wide(x, weight, bias)))
        assert equal(skinny(x[order], weight, bias, tile=tile), plain[order])
        gated = skinny(x, weight, gated=True, tile=tile)
        assert_close(gated, reference.silu_and_mul(reference.linear(*wide(x, weight))))


THIN = st.builds(ThinTile, *map(st.sampled_from, ([8, 16], [16, 32], [1, 2, 4], [16, 64], [16, 32], [2, 3])))


@few(12)
@given(THIN, st.integers(0, 3), st.sampled_from([1, 5, 8, 9]), OUTS, st.booleans(), st.sampled_from(NARROW))
def test_thin_tiles_of_any_shape(
    tile: ThinTile, steps: int, tokens: int, outs: int, is_gated: bool, dtype: torch.dtype
) -> None:
    """What is fetched first is all or a part; a row has the same bits wherever it stands, whatever the others are."""
    width = tile.slices * (tile.first + steps * tile.columns)
    assert tile.divides(width) and not tile.divides(width + 1)
    x, weight = normal(tokens, width, dtype=dtype, seed=0), normal(2 * outs, width, dtype=dtype, seed=1)
    weight = (weight if is_gated else weight[:outs]) * width**-0.5
    bias = None if is_gated else normal(outs, dtype=dtype, seed=2)
    ours = thin(x, weight, bias, gated=is_gated, tile=tile)
    expected = reference.linear(*wide(x, weight, bias))
    if is_gated:  # three roundings: of both halves, and of the activation
        assert relative_error(ours, reference.silu_and_mul(expected)) < 3 * ERROR[dtype]
    else:
        assert product_error(ours, expected, x, weight) < ERROR[dtype]
    order = torch.arange(tokens - 1, -1, -1, device=DEVICE)[: max(tokens - 1, 1)]
    assert equal(thin(x[order], weight, bias, gated=is_gated, tile=tile), ours[order])


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: gemv(x[0], w, b, gated=True, tile=GemvTile(4, 64, 4)),
        lambda x, w, b: skinny(x, w, b, gated=True, tile=SkinnyTile(16, 64, 32, 4, 2)),
        lambda x, w, b: thin(x, w, b, gated=True, tile=ThinTile(8, 16, 1, 64, 64, 2)),
    ],
)
def test_a_bias_of_a_gated_product_is_refused(product: Any) -> None:
    x, weight = normal(2, 64, dtype=torch.bfloat16, seed=0), normal(8, 64, dtype=torch.bfloat16, seed=1)
    with pytest.raises(ValueError, match="a bias beside gated"):
        product(x, weight, weight[:4, 0])


@pytest.mark.parametrize("tile", [GemvTile(1, 64, 4), GemvTile(8, 128, 4), GemvTile(4, 256, 8)])
def test_one_row_in_tiles_of_any_shape(tile: GemvTile) -> None:
    """Columns that a tile divides and that it does not, rows that end within a tile."""
    x, weight = normal(200, dtype=torch.float16, seed=0), normal(14, 200, dtype=torch.float16, seed=1)
    residual = normal(200, dtype=torch.float16, seed=2)
    ours, total = gemv(x, weight, residual=residual, gated=True, tile=tile)
    assert equal(total, residual + x)
    expected = reference.silu_and_mul(reference.linear(*wide(total, weight)))
    assert relative_error(ours, expected) < 2**-10


def test_nan_is_passed_on() -> None:
    x, weight = normal(3, 64, dtype=torch.bfloat16, seed=0), normal(10, 64, dtype=torch.bfloat16, seed=1)
    x[1, 5] = torch.nan
    isnan = OURS.norm_gate_up(OURS, x, x, weight[0], 1e-5, weight)[0].isnan()
    assert isnan[1].all() and not isnan[[0, 2]].any()
    assert OURS.norm_gate_up(OURS, x[1:2], None, weight[0], 1e-5, weight)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_no_kernel_of_ours_takes_is_torchs(dtype: torch.dtype) -> None:
    """float64, and a weight that does not lie row by row."""
    x, weight = normal(1, 64, dtype=dtype, seed=0), normal(64, 10, dtype=dtype, seed=1).T
    assert equal(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_part_that_was_replaced_is_used(tokens: int) -> None:
    """A set with another `linear` or norm is composed of its parts."""
    x, weight = normal(tokens, 64, dtype=torch.bfloat16, seed=0), normal(10, 64, dtype=torch.bfloat16, seed=1)

    def doubled(*arguments: Any) -> Tensor:
        return 2 * reference.linear(*arguments)

    kernels = replace(OURS, linear=doubled)
    ours, _ = kernels.norm_linear(kernels, x, None, weight[0], 1e-5, weight)
    assert_close(ours, 2 * reference.norm_linear(reference, x, None, weight[0], 1e-5, weight)[0])
    kernels = replace(OURS, rms_norm=lambda x, gain, eps: 0 * x)
    for fused in (kernels.norm_linear, kernels.norm_gate_up):
        assert not fused(kernels, x, None, weight[0], 1e-5, weight)[0].any()


def test_which_kernel_takes_which_shape() -> None:
    """By shape and type alone: one row of any type, a few rows of a narrow one."""
    assert isinstance(tile_for(1, 7, 96, torch.float32), GemvTile)
    assert isinstance(tile_for(16, 7, 96, torch.bfloat16), SkinnyTile)
    assert isinstance(tile_for(64, 7, 96, torch.float16, gated=True), SkinnyTile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(purestep.kernels.triton.linear, "VOCABULARY", 32768)
        patch.setattr(purestep.kernels.triton.linear, "FEWEST_ROWS", 960)
        tile = tile_for(8, 2048, 8192, torch.bfloat16)
        assert isinstance(tile, SkinnyTile) and (tile.tokens, tile.slices) == (8, 4)
        assert tile_for(8, 100, 8192, torch.bfloat16) is None
        assert tile_for(16, 3072, 2048, torch.bfloat16) is None  # 192 programs on 132 processors
        assert tile_for(8, 3072, 2048, torch.bfloat16) == ThinTile(8, 16, 8, 256, 128, 3)
        assert tile_for(8, 3072, 2560, torch.bfloat16) is None  # 320 columns a slice
        assert tile_for(8, 6144, 4096, torch.bfloat16) == ThinTile(8, 16, 4, 256, 128, 4)
        assert tile_for(8, 4096, 14336, torch.bfloat16) == ThinTile(8, 16, 4, 128, 128, 5)
        for tokens, width, stages, slices in (
            (8, 1024, 4, 4),
            (8, 2048, 5, 4),
            (16, 2048, 4, 4),
            (32, 8192, 4, 2),
        ):
            tile = tile_for(tokens, 4096, width, torch.bfloat16)
            assert tile == SkinnyTile(tokens, 64, 128, 4, stages, slices)
        assert tile_for(32, 2048, 8192, torch.bfloat16) == SkinnyTile(32, 64, 128, 4, 4, 4)
        for tokens in (8, 16, 32, 64):
            tile = tile_for(tokens, 32768, 2048, torch.bfloat16)
            assert isinstance(tile, SkinnyTile) and tile.tokens == max(tokens, 16)
        assert tile_for(64, 4096, 2048, torch.bfloat16) is None
        patch.setattr(purestep.kernels.triton.linear, "MANY_ROWS", 6400)
        assert tile_for(8, 3072, 1024, torch.bfloat16, gated=True) == ThinTile(8, 16, 4, 256, 128, 2)
        assert tile_for(8, 14336, 4096, torch.bfloat16, gated=True) == ThinTile(8, 16, 1, 128, 128, 4)
        for tokens, slices in ((16, 2), (32, 2)):
            tile = tile_for(tokens, 3072, 1024, torch.bfloat16, gated=True)
            assert tile == SkinnyTile(tokens, 64, 64, 4, 5, slices)
        for tokens, width, stages in ((8, 2048, 5), (32, 2048, 6), (64, 2048, 5), (64, 4096, 4)):
            tile = tile_for(tokens, 8192, width, torch.bfloat16, gated=True)
            assert tile == SkinnyTile(max(tokens, 16), 64, 64, 4, stages)
    assert tile_for(16, 7, 96, torch.float32) is None
    assert tile_for(65, 7, 96, torch.bfloat16, gated=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize("width", [1024, 2048, 3072, 4096, 8192, 14336])
def test_shapes_of_models_against_float64(dtype: torch.dtype, tokens: int, width: int) -> None:
    x, weight = normal(tokens, width, dtype=dtype, seed=0), normal(4096, width, dtype=dtype, seed=1)
    assert_close(OURS.linear(x, weight), reference.linear(*wide(x, weight)))
    gain = normal(width, dtype=dtype, seed=2)
    ours, total = OURS.norm_gate_up(OURS, x, x, gain, 1e-5, weight * width**-0.5)
    normed = reference.rms_norm(total, gain, 1e-5)
    expected = reference.silu_and_mul(reference.linear(*wide(normed, weight * width**-0.5)))
    assert_close(ours, expected)
