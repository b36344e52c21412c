"""Products, norms and activations in C against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter

from purestep.kernels.native.dense import BFLOAT16, EIGHT_BITS, FLOAT32, FOUR_BITS, PanelWeight
from purestep.kernels.reference import reference
from tests.kernels.native.variants import VARIANTS, kernels_of
from tests.laws import assert_pure, equal
from tests.profiles import examples

SEEDS = st.integers(0, 2**32)
KINDS = (FLOAT32, BFLOAT16, EIGHT_BITS, FOUR_BITS)
EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: int, num_out: int, num_in: int, seed: int) -> Tensor:
    """A weight whose numbers are of a kind and, in all likelihood, of none that takes less."""
    weight = normal(num_out, num_in, seed=seed)
    if kind == FLOAT32:
        return weight
    if kind == BFLOAT16:
        return weight.to(torch.bfloat16).float()
    blocks = weight.view(num_out, -1, 32)
    most, least = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True).half().float()
    if kind == EIGHT_BITS:  # GGUF's Q8_0
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
        return (scale * (blocks / scale).round().clamp(-127, 127)).view_as(weight)
    scale = ((most - least) / 15).half().float()  # GGUF's Q4_1
    return (scale * ((blocks - least) / scale).round().clamp(0, 15) + least).view_as(weight)


def assert_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Equal to float64's up to the roundings that sums of so many terms may have."""
    want = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs()) + 1e-30
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= (4 + weight.shape[1] ** 0.5) * EPS * scale).all()


@pytest.mark.parametrize("kind", KINDS)
@examples(0.3)
@given(
    seed=SEEDS,
    rows=st.sampled_from([0, 1, 2, 3, 11, 12, 13, 16, 25, 40]),
    num_out=st.integers(1, 100),
    blocks=st.integers(1, 3),
    ragged=st.integers(0, 31),
)
def test_products(
    variant: str, kind: int, seed: int, rows: int, num_out: int, blocks: int, ragged: int
) -> None:
    """Of every kind of numbers, for few rows and many, with a bias and without; embeddings to the bit."""
    kernels = kernels_of(variant)
    num_in = 32 * blocks + (ragged if kind in (FLOAT32, BFLOAT16) else 0)
    weight, x = weight_of(kind, num_out, num_in, seed), normal(rows, num_in, seed=seed + 1)
    prepared = kernels.prepare(weight)

    assert isinstance(prepared, PanelWeight)
    assert prepared.kind == kind
    for bias in (None, normal(num_out, seed=seed + 2)):
        assert_product(assert_pure(kernels.linear, x, prepared, bias), x, weight, bias)
    ids = torch.arange(rows) % num_out
    assert equal(kernels.embed(prepared, ids), reference.embed(weight, ids))


@pytest.mark.parametrize("kind", KINDS)
@examples(0.1)
@given(seed=SEEDS, rows=st.integers(2, 40))
def test_a_row_has_the_same_bits_in_every_batch(variant: str, kind: int, seed: int, rows: int) -> None:
    """And with any number of threads; the codes of a weight give the bits that its float32 gives."""
    kernels = kernels_of(variant)
    weight, x = weight_of(kind, 192, 64, seed), normal(rows, 64, seed=seed + 1)
    prepared, gain = kernels.prepare(weight), normal(64, seed=seed + 2)
    whole = kernels.linear(x, prepared, None)
    gated, _ = kernels.norm_gate_up(kernels, x, None, gain, 1e-5, prepared)

    for r in range(rows):
        assert equal(kernels.linear(x[r : r + 1], prepared, None)[0], whole[r])
        assert equal(kernels.norm_gate_up(kernels, x[r : r + 1], None, gain, 1e-5, prepared)[0][0], gated[r])
    wide = kernels.prepare(torch.cat([weight, normal(32, 64, seed=seed)]))
    assert wide.kind == FLOAT32
    assert equal(kernels.linear(x, wide, None)[:, :192], whole)


@examples(0.3)
@given(
    seed=SEEDS, rows=st.sampled_from([0, 1, 5, 13]), width=st.sampled_from([32, 48, 64]), added=st.booleans()
)
def test_gated_products(variant: str, seed: int, rows: int, width: int, added: bool) -> None:
    """norm_gate_up is its parts, whether the gate and what it lets through lie in panels of their own or not."""
    kernels = kernels_of(variant)
    weight, gain = normal(2 * width, 40, seed=seed), normal(40, seed=seed + 1)
    x, residual = normal(rows, 40, seed=seed + 2), normal(rows, 40, seed=seed + 3) if added else None
    prepared = kernels.prepare(weight)

    got, total = kernels.norm_gate_up(kernels, x, residual, gain, 1e-5, prepared)

    want, wanted_total = reference.norm_gate_up(reference, x, residual, gain, 1e-5, weight)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert equal(total, wanted_total)


@given(
    seed=SEEDS, rows=st.integers(0, 5), width=st.integers(1, 70), scale=st.sampled_from([1e-4, 1.0, 300.0])
)
def test_norms(variant: str, seed: int, rows: int, width: int, scale: float) -> None:
    """rms_norm over any leading dimensions, of single tensors and of sums; sums to the bit."""
    kernels = kernels_of(variant)
    x, weight = normal(rows, 2, width, seed=seed) * scale, normal(width, seed=seed + 1)
    residual = normal(rows, 2, width, seed=seed + 2) * scale
    torch.testing.assert_close(
        assert_pure(kernels.rms_norm, x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    )
    got = assert_pure(kernels.add_rms_norm, x, residual, weight, 1e-5)
    want = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert equal(got[1], want[1])


@given(
    seed=SEEDS, rows=st.integers(0, 4), width=st.integers(1, 40), scale=st.sampled_from([0.1, 10.0, 200.0])
)
def test_silu_and_mul(variant: str, seed: int, rows: int, width: int, scale: float) -> None:
    """Also where the exponential is beyond what float32 holds."""
    kernels = kernels_of(variant)
    x = normal(rows, 2 * width, seed=seed) * scale
    got = assert_pure(kernels.silu_and_mul, x)
    torch.testing.assert_close(got, reference.silu_and_mul(x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -100.0, 100.0])
def test_values_that_are_no_numbers_stay_so(variant: str, value: float) -> None:
    """Where the reference gives NaN or infinity, so do these: a row of NaN is found by it."""
    kernels = kernels_of(variant)
    x, weight = torch.full((2, 64), value), torch.ones(64, 64)
    weight[0, 0] = value
    for got, want in (
        (kernels.silu_and_mul(x), reference.silu_and_mul(x)),
        (kernels.rms_norm(x, weight[1], 1e-5), reference.rms_norm(x, weight[1], 1e-5)),
        (kernels.linear(x, kernels.prepare(weight), None), reference.linear(x, weight, None)),
    ):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_other_types_and_shapes_are_torchs(variant: str) -> None:
    """What the C code does not read is computed all the same, or refused by torch."""
    kernels = kernels_of(variant)
    for dtype in (torch.float64, torch.bfloat16):
        x, weight = torch.ones(3, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
        assert equal(kernels.linear(x, kernels.prepare(weight), None), torch.full((3, 4), 8, dtype=dtype))
        assert kernels.rms_norm(x, weight[0], 1e-5).dtype == dtype
    prepared = kernels.prepare(torch.ones(4, 8))
    assert equal(kernels.linear(torch.ones(8, 3).T, prepared, None), torch.full((3, 4), 8.0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        kernels.linear(torch.ones(3, 9), prepared, None)
    with pytest.raises(RuntimeError):
        kernels.rms_norm(torch.ones(3, 8), torch.ones(9), 1e-5)


def test_what_c_knows_nothing_of_is_torchs(variant: str) -> None:
    """Other devices, what is traced or transformed, gradients, shapes that do not match."""
    kernels = kernels_of(variant)
    x, gain, prepared = normal(3, 8, seed=0), normal(8, seed=1), kernels.prepare(normal(64, 8, seed=2))

    assert kernels.rms_norm(x.to("meta"), gain.to("meta"), 1e-5).is_meta
    graph = make_fx(lambda x: kernels.silu_and_mul(kernels.rms_norm(x, gain, 1e-5)))(x)
    torch.testing.assert_close(graph(2 * x), kernels.silu_and_mul(kernels.rms_norm(2 * x, gain, 1e-5)))
    each = torch.vmap(lambda row: kernels.rms_norm(row, gain, 1e-5))(x)
    torch.testing.assert_close(each, kernels.rms_norm(x, gain, 1e-5))
    slope = torch.func.grad(lambda x: kernels.linear(x, prepared, None).sum())(x)
    torch.testing.assert_close(slope, prepared.dense.sum(0).expand(3, 8))
    assert kernels.add_rms_norm(x.clone().requires_grad_(), x, gain, 1e-5)[0].requires_grad
    torch.testing.assert_close(kernels.silu_and_mul(torch._neg_view(x)), kernels.silu_and_mul(-x))
    with pytest.raises(RuntimeError):
        kernels.norm_gate_up(kernels, x[:, :4].contiguous(), None, gain[:4], 1e-5, prepared)
    with pytest.raises(RuntimeError):
        kernels.silu_and_mul(x[:, :7].contiguous())


def test_weights_and_rows_in_another_order_have_the_same_bits(variant: str) -> None:
    """What does not follow each other in memory is brought into order first."""
    kernels = kernels_of(variant)
    weight, x = normal(40, 64, seed=0), normal(20, 64, seed=1)
    want = kernels.linear(x, kernels.prepare(weight), None)
    turned = weight.T.contiguous().T
    assert equal(kernels.linear(x.T.contiguous().T, kernels.prepare(turned), None), want)
    assert equal(kernels.linear(x, kernels.prepare(Parameter(weight)), None), want)


def test_a_prepared_weight_keeps_the_weight_and_a_copy(variant: str) -> None:
    """The weight itself is kept, not copied; panels hold the values of the moment."""
    kernels = kernels_of(variant)
    weight = torch.ones(4, 4)
    prepared = kernels.prepare(weight)
    assert prepared.dense is weight
    weight.zero_()
    assert kernels.linear(torch.ones(1, 4), prepared, None).tolist() == [[4.0] * 4]


@pytest.mark.parametrize("kind", [BFLOAT16, EIGHT_BITS, FOUR_BITS])
@given(place=st.tuples(st.integers(0, 39), st.integers(0, 63)), seed=SEEDS)
@examples(0.1)
def test_one_number_of_another_kind_is_enough(
    variant: str, kind: int, place: tuple[int, int], seed: int
) -> None:
    """A weight of codes but for one number in one place is not read as codes."""
    kernels = kernels_of(variant)
    weight = weight_of(kind, 40, 64, seed)
    weight[place] = torch.nextafter(weight[place], torch.tensor(10.0))
    prepared = kernels.prepare(weight)
    assert prepared.kind == FLOAT32
    assert torch.equal(kernels.linear(torch.eye(64), prepared, None).T, weight)
