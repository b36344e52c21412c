"""Caches of eight bits: what is stored of a number, and attention over what is read."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purestep.kernels.reference import reference
from purestep.kernels.reference.scales import FP8, LARGEST, scales_of, stored
from tests.kernels.attention_cases import Case, cases
from tests.laws import assert_pure, equal
from tests.profiles import examples

SCALES = st.floats(2**-12, 2**6, width=32)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def step_at(x: float) -> float:
    """The distance of the e4m3 numbers around x: three bits behind the leading one, and none finer than 2**-9."""
    return 2.0 ** max(math.frexp(x)[1] - 4, -9)


@given(st.floats(-LARGEST, LARGEST, width=32), SCALES)
def test_what_is_read_lies_within_half_a_step(ratio: float, scale: float) -> None:
    x, own = torch.tensor([ratio * scale]), torch.tensor(scale)
    (code,) = stored(x, own, FP8).float().tolist()
    exact = float(x) / scale
    assert abs(code - exact) <= step_at(exact) / 2 * (1 + 1e-6)
    assert code * scale == pytest.approx(float(x), abs=scale * step_at(exact) / 2 * (1 + 1e-5))


@given(NUMBERS, SCALES, st.sampled_from(DTYPES))
def test_what_is_too_large_becomes_the_largest_and_never_nan(
    x: float, scale: float, dtype: torch.dtype
) -> None:
    """Of the same sign; numbers beyond the type are infinities by then."""
    value = torch.tensor([x]).to(dtype)
    (code,) = stored(value, torch.tensor(scale), FP8).float().tolist()
    ratio = float(value.double()) / scale
    assert not math.isnan(code)
    if abs(ratio) >= LARGEST:
        assert code == math.copysign(LARGEST, ratio)


def test_infinities_are_cut_off_and_nan_is_kept() -> None:
    codes = stored(torch.tensor([math.inf, -math.inf, math.nan]), torch.tensor(2.0), FP8).float()
    assert codes[:2].tolist() == [LARGEST, -LARGEST] and codes[2].isnan()


def test_every_number_of_eight_bits_is_stored_as_itself() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = codes.view(torch.uint8)[codes.float().isfinite()].view(FP8)
    assert len(finite) == 254
    for scale in (1.0, 0.25):
        assert equal(stored(finite.float() * scale, torch.tensor(scale), FP8), finite)


@given(
    st.lists(
        st.lists(
            st.floats(-1e6, 1e6, width=32) | st.just(math.nan) | st.just(math.inf), min_size=4, max_size=4
        ),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_scales_are_those_of_the_largest_numbers_that_exist(
    rows: list[list[float]], data: st.DataObject
) -> None:
    """By hand: |k| and |v| of tokens that exist, over 448; what is not finite does not count, and a scale of 0 is 1."""
    exists = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    x = torch.tensor(rows)
    k, v = x[:, :2, None], x[:, 2:, None]
    found = assert_pure(scales_of, k, v, torch.tensor(exists))
    for plane, own in zip(found.tolist(), (slice(0, 2), slice(2, 4)), strict=True):
        seen = [abs(n) for row, there in zip(rows, exists, strict=True) if there for n in row[own]]
        largest = max((n for n in seen if math.isfinite(n)), default=0.0)
        (wanted,) = torch.tensor([largest / 448]).tolist()  # 0 if it is below what float32 has
        assert plane == pytest.approx(wanted or 1.0, rel=1e-6)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("largest", [1e36, 1e39, 1e300])
def test_scales_are_finite_whatever_is_stored(largest: float) -> None:
    """Of float64, whose numbers may lie beyond those of scales: they are stored as the largest that can be."""
    x = torch.tensor([[[largest, 1.0]]], dtype=torch.float64)
    scales = scales_of(x, x, torch.tensor([True]))
    assert scales.isfinite().all()
    assert (stored(x, scales[0], FP8).double() * scales[0].double()).isfinite().all()


def test_the_largest_number_is_stored_as_448() -> None:
    k, v = torch.randn(5, 2, 4), 7 * torch.randn(5, 2, 4)
    scales = scales_of(k, v, torch.ones(5, dtype=torch.bool))
    for x, scale in zip((k, v), scales, strict=True):
        assert stored(x, scale, FP8).float().abs().max() == LARGEST


def in_fp8(case: Case, scales: Tensor) -> dict[str, Any]:
    """The case's cache of eight bits, and the scales."""
    kv = stored(case.tensors["kv"], scales[:, None, None, None], FP8)
    return {"kv": kv, "kv_scales": scales}


def read(kv: Tensor, scales: Tensor) -> Tensor:
    """A cache's numbers."""
    return kv.double() * scales.double()[:, None, None, None]


@examples(2)
@given(case=cases(), scales=st.tuples(SCALES, SCALES))
def test_attention_is_that_over_the_numbers_that_are_read(case: Case, scales: tuple[float, float]) -> None:
    """Float64 attention over a plain cache of what keys and values become by being stored, this step's among them."""
    own = torch.tensor(scales)
    changes = in_fp8(case, own)
    out, kv = assert_pure(case.run, **changes)
    t = case.tensors
    k, v = (stored(t[name], own[i], FP8).double() * own[i].double() for i, name in enumerate("kv"))
    expected, cache = case.run(k=k, v=v, kv=read(changes["kv"], own))
    assert kv.dtype == FP8 and equal(read(kv, own), cache)
    assert out.dtype == torch.float64
    assert (out - expected).abs().max() <= 1e-12 * max(1.0, float(cache.abs().max()))


@given(case=cases())
def test_slots_that_nobody_reads_may_hold_nan(case: Case) -> None:
    """The null block, and slots past a length."""
    changes, t = in_fp8(case, torch.tensor([0.01, 0.02])), case.tensors
    spoiled = torch.full(t["kv"].shape, math.nan).to(FP8).view(torch.uint8)
    size = spoiled.shape[2]
    for r, length in enumerate(t["seq_lens"].tolist()):
        for p in range(length):
            place = int(t["block_table"][r, p // size]), slice(None), p % size
            spoiled[place] = changes["kv"].view(torch.uint8)[place]
    clean, _ = case.run(**changes)
    dirty, _ = case.run(**(changes | {"kv": spoiled.view(FP8)}))
    assert equal(clean, dirty) and not clean.isnan().any()


@given(case=cases())
def test_a_cache_and_scales_that_do_not_belong_together_are_refused(case: Case) -> None:
    changes = in_fp8(case, torch.ones(2))
    with pytest.raises(TypeError, match=r"float8_e4m3fn without kv_scales: give float32 scales \[2\]"):
        case.run(kv=changes["kv"])
    with pytest.raises(TypeError, match=r"float64 with kv_scales: give .* None with any other"):
        case.run(kv_scales=changes["kv_scales"])


@pytest.mark.usefixtures("unchecked_records")
@examples(0.04)
@given(case=cases())
def test_same_in_every_world(case: Case) -> None:
    """vmap over everything, scales too, and a trace give what a plain call gives."""
    tensors = case.tensors | in_fp8(case, torch.tensor([0.01, 0.02]))

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        return case.run(**dict(zip(tensors, values, strict=True)))

    arguments = tuple(tensors.values())
    out, kv = call(*arguments)
    twice = torch.func.vmap(call)(*(torch.stack((x, x)) for x in arguments))
    traced = make_fx(call)(*arguments)(*arguments)
    for got in ((twice[0][1], twice[1][1]), traced):
        assert (got[0] - out).abs().max() < 1e-12
        assert equal(got[1], kv)


def test_copies_and_zeros_of_eight_bits() -> None:
    """Out of place; every bit of the other blocks is kept."""
    kv = torch.arange(6 * 8, dtype=torch.uint8).view(6, 2, 2, 2, 1).view(FP8)
    copied = assert_pure(reference.copy_blocks, kv, torch.tensor([1, 2]), torch.tensor([2, 5]))
    zeroed = assert_pure(reference.zero_blocks, copied, torch.tensor([3, 0]))
    bits = kv.view(torch.uint8)
    expected = [torch.zeros_like(bits[0]), bits[1], bits[1], torch.zeros_like(bits[0]), bits[4], bits[2]]
    assert torch.equal(zeroed.view(torch.uint8), torch.stack(expected))
