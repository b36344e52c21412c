"""Attention of the CPU kernels against the reference, whose tests say what attention is."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.cpu import attention, decodes
from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.reference.scales import FP8, stored
from tests.kernels.attention_cases import DIM, Case, cases
from tests.laws import equal
from tests.profiles import examples

FLOATS = ("q", "k", "v", "kv")


def attend(case: Case, **changes: Any) -> tuple[Tensor, Tensor]:
    """The kernel's result, on a cache of its own: it writes into it."""
    kv = changes.pop("kv", case.tensors["kv"]).clone()
    return case.run(attend=attention.attend, kv=kv, **changes)


def in_dtype(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: case.tensors[name].to(dtype) for name in FLOATS}


@st.composite
def cuts(draw: st.DrawFn) -> Any:
    """How work is cut: by small numbers, so that small cases are cut too."""
    short, gathered_bytes = draw(st.sampled_from([1, 2, 512])), draw(st.sampled_from([1, 1000, 2**20]))
    query_tile = draw(st.sampled_from([1, 2, 3, 512]))

    @contextmanager
    def cut() -> Iterator[None]:
        decodes.of_step.cache_clear()
        with (
            mock.patch.multiple(decodes, SHORT=short, GATHERED_BYTES=gathered_bytes),
            mock.patch.object(attention, "QUERY_TILE", query_tile),
        ):
            yield
        decodes.of_step.cache_clear()

    return cut


@examples(2)  # many ways lead through the kernel
@given(case=cases(), cut=cuts())
def test_equals_the_reference(case: Case, cut: Any) -> None:
    """In float64 to 1e-12, in float32 to 1e-5; what it wrote is the same to the last bit."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        floats = in_dtype(case, dtype)
        want, written = case.run(**floats)
        with cut():
            got, kv = attend(case, **floats)
        assert got.dtype == want.dtype
        assert (got - want).abs().max() < tolerance
        assert equal(kv[1:], written[1:])


@examples(0.3)
@given(case=cases())
def test_writes_where_the_cache_lies(case: Case) -> None:
    """The cache that comes back is the one that was given, and no other argument is written."""
    given = {name: tensor.clone() for name, tensor in case.tensors.items()}
    _, kv = attention.attend(**given, **case.static)
    assert kv is given["kv"]
    assert all(equal(given[name], case.tensors[name]) for name in given if name != "kv")


@examples(0.3)
@given(case=cases(), cut=cuts())
def test_touches_no_slot_that_is_not_named(case: Case, cut: Any) -> None:
    """In a cache full of canaries, blocks from 1 on keep every bit outside the slots of this step."""
    t = case.tensors
    canaries = torch.randint(2**62, t["kv"].shape).view(torch.float64)
    with cut():
        _, kv = attend(case, kv=canaries)
    expected, block_size = canaries.clone(), canaries.shape[2]
    for i, slot in enumerate(t["slot_mapping"].tolist()):
        expected[slot // block_size, :, slot % block_size] = torch.stack((t["k"][i], t["v"][i]))
    assert equal(kv[1:].view(torch.int64), expected[1:].view(torch.int64))


@examples(2)
@given(case=cases(), cut=cuts(), garbage=st.sampled_from([math.nan, math.inf, 1e300]))
def test_unused_memory_is_never_seen(case: Case, cut: Any, garbage: float) -> None:
    """Whatever lies in the null block, past a length, in stale table entries, before every query's window, and in
    padding tokens, the result stays the same to the last bit."""
    t, window = case.tensors, case.static["sliding_window"]
    spoiled, block_size, starts = torch.full_like(t["kv"], garbage), t["kv"].shape[2], t["query_start_loc"]
    table = t["block_table"].clone()
    for r, length in enumerate(t["seq_lens"].tolist()):
        first_query = length - int(starts[r + 1] - starts[r])
        for p in range(0 if window is None else max(0, first_query - window + 1), length):
            place = int(table[r, p // block_size]), slice(None), p % block_size
            spoiled[place] = t["kv"][place]
        table[r, -(-length // block_size) :] = 10**6
    fouled = {name: t[name].clone() for name in "qkv"}
    for tensor in fouled.values():
        tensor[int(starts[-1]) :] = garbage
    with cut():
        clean, _ = attend(case)
        dirty, _ = attend(case, **fouled, kv=spoiled, block_table=table)
    assert equal(dirty, clean)


@examples(0.3)
@given(case=cases(), extra=st.integers(0, 9))
def test_bounds_never_change_results(case: Case, extra: int) -> None:
    """Lengths are known exactly, so larger static bounds change nothing at all."""
    bounds = {key: case.static[key] + extra for key in ("max_query_len", "max_seq_len")}
    assert equal(attend(case, **bounds)[0], attend(case)[0])


@given(case=cases(), cut=cuts())
def test_what_sees_nothing_gives_zero(case: Case, cut: Any) -> None:
    """A request of length 0 (its row is frozen, its tokens run along) gives exactly 0."""
    with cut():
        out, _ = attend(case, seq_lens=torch.zeros_like(case.tensors["seq_lens"]))
    assert not out.any()


@examples(0.3)
@given(case=cases(), cut=cuts(), data=st.data())
def test_company_does_not_matter(case: Case, cut: Any, data: st.DataObject) -> None:
    """A request among others, in any place, gets what it gets alone."""
    t = case.tensors
    starts = t["query_start_loc"].tolist()
    r = data.draw(st.integers(0, len(starts) - 2))
    own = slice(starts[r], starts[r + 1])
    if starts[r] == starts[r + 1]:
        return
    alone = {name: t[name][own] for name in ("q", "k", "v", "slot_mapping")}
    alone |= {name: t[name][r : r + 1] for name in ("seq_lens", "block_table")}
    with cut():
        together, _ = attend(case)
        out, _ = attend(case, **alone, query_start_loc=torch.tensor([0, len(alone["q"])], dtype=torch.int32))
    assert (out - together[own]).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(0.3)
@given(case=cases())
def test_narrow_types_lose_only_their_own_rounding(dtype: torch.dtype, case: Case) -> None:
    """The result is the float64 result of the same narrow inputs, up to a few units of the narrow type."""
    floats = in_dtype(case, dtype)
    exact, _ = case.run(**{name: tensor.double() for name, tensor in floats.items()})
    got, kv = attend(case, **floats)
    assert got.dtype == kv.dtype == dtype
    scale = max(1.0, float(floats["kv"].abs().max()), float(floats["v"].abs().max()))
    assert (got.double() - exact).abs().max() < 2 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("before", [0, 3, 700])
@pytest.mark.parametrize("num_queries", [1, 7, 600])
@pytest.mark.parametrize("window", [None, 600])
def test_long_requests(before: int, num_queries: int, window: int | None) -> None:
    """Prompts, chunks and decodes of more than a thousand keys among short ones equal the reference."""
    generator = torch.Generator().manual_seed(before + num_queries)
    counts, block_size = [num_queries, 1, 2], 16
    lens = [before + num_queries, 2100, 5]
    width = -(-max(lens) // block_size)
    table = 1 + torch.randperm(len(lens) * width, generator=generator).view(len(lens), width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    slots = [
        int(table[r, p // block_size]) * block_size + p % block_size
        for r, n in enumerate(counts)
        for p in range(lens[r] - n, lens[r])
    ]
    num_tokens = sum(counts)
    case = Case(
        {
            "q": normal(num_tokens, 3, DIM),
            "k": normal(num_tokens, 1, DIM),
            "v": normal(num_tokens, 1, DIM),
            "kv": normal(1 + len(lens) * width, 2, block_size, 1, DIM),
            "query_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            "seq_lens": torch.tensor(lens, dtype=torch.int32),
            "block_table": table.to(torch.int32),
            "slot_mapping": torch.tensor(slots),
        },
        {"max_query_len": max(counts), "max_seq_len": max(lens), "scale": 0.5, "sliding_window": window},
    )
    got, kv = attend(case)
    want, written = case.run(attend=reference.attend)
    assert (got - want).abs().max() < 1e-12
    assert equal(kv, written)


def in_fp8(case: Case, scales: tuple[float, float]) -> dict[str, Tensor]:
    """The case's cache of eight bits, and its scales."""
    own = torch.tensor(scales)
    return {"kv": stored(case.tensors["kv"], own[:, None, None, None], FP8), "kv_scales": own}


@examples(1)
@given(case=cases(), cut=cuts(), scales=st.tuples(*[st.sampled_from([1.0, 0.01, 3.7])] * 2))
def test_a_cache_of_eight_bits_equals_the_reference(
    case: Case, cut: Any, scales: tuple[float, float]
) -> None:
    """By every way through the kernel; what it wrote is the same to the last bit."""
    eight = in_fp8(case, scales)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        heads = {name: case.tensors[name].to(dtype) for name in ("q", "k", "v")}
        want, written = case.run(**heads, **eight)
        with cut():
            got, kv = attend(case, **heads, **eight)
        assert got.dtype == dtype and kv.dtype == FP8
        assert (got - want).abs().max() <= tolerance * max(1.0, 448 * scales[1])
        assert equal(kv[1:], written[1:])


@examples(0.3)
@given(case=cases(), cut=cuts())
def test_eight_bits_that_nobody_reads_are_never_seen(case: Case, cut: Any) -> None:
    """NaN in the null block, past a length and before every query's window."""
    t, window, starts = case.tensors, case.static["sliding_window"], case.tensors["query_start_loc"]
    eight = in_fp8(case, (0.01, 0.02))
    spoiled, block_size = torch.full(t["kv"].shape, 0x7F, dtype=torch.uint8), t["kv"].shape[2]
    for r, length in enumerate(t["seq_lens"].tolist()):
        first_query = length - int(starts[r + 1] - starts[r])
        for p in range(0 if window is None else max(0, first_query - window + 1), length):
            place = int(t["block_table"][r, p // block_size]), slice(None), p % block_size
            spoiled[place] = eight["kv"].view(torch.uint8)[place]
    with cut():
        clean, _ = attend(case, **eight)
        dirty, _ = attend(case, **(eight | {"kv": spoiled.view(FP8)}))
    assert equal(dirty, clean) and not clean.isnan().any()


@given(case=cases())
def test_a_cache_of_eight_bits_without_scales_is_refused(case: Case) -> None:
    """And nothing is written."""
    kv = in_fp8(case, (1.0, 1.0))["kv"]
    before = kv.clone()
    with pytest.raises(TypeError, match="float8_e4m3fn without kv_scales"):
        case.run(attend=attention.attend, kv=kv)
    assert equal(kv, before)


@given(case=cases(), is_normed=st.booleans())
def test_heads_of_one_projection_are_turned_and_attend(case: Case, is_normed: bool) -> None:
    """`attend_qkv` is the reference's, whether or not queries and keys have norms."""
    tensors = dict(case.tensors)
    qkv = torch.cat([tensors.pop(name) for name in ("q", "k", "v")], 1).flatten(1)
    angle = torch.arange(len(qkv) * DIM // 2).view(len(qkv), -1) * 0.3
    gain = torch.linspace(0.5, 2, DIM, dtype=torch.float64)
    how = {"cos": angle.double().cos(), "sin": angle.double().sin()}
    if is_normed:
        how |= {"q_gain": gain, "k_gain": gain.flip(0), "eps": 1e-5}
    want, written = reference.attend_qkv(reference, qkv, **tensors, **case.static, **how)
    kv = tensors.pop("kv").clone()
    batch = (tensors[name] for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"))
    got, own = donating.attend_qkv(donating, qkv, kv, *batch, **case.static, **how)
    assert own is kv and (kv[1:] - written[1:]).abs().max() < 1e-12
    assert (got - want).abs().max() < 1e-12


def test_no_tokens() -> None:
    kv, none = torch.zeros(3, 2, 4, 1, 4), torch.zeros(0, dtype=torch.int32)
    batch = (torch.zeros(1, dtype=torch.int32), none, none.view(0, 1), none.long())
    angles = {"cos": torch.zeros(0, 2), "sin": torch.zeros(0, 2)}
    out, _ = donating.attend_qkv(
        donating, torch.zeros(0, 16), kv, *batch, **angles, max_query_len=1, max_seq_len=1, scale=1.0
    )
    assert out.shape == (0, 2, 4)


def test_masks_of_long_prompts_are_not_kept() -> None:
    """They are many and large, and each is wanted once in a layer."""
    length = 3 * attention.KEPT_KEYS // 2
    kv = torch.zeros(length // 16 + 1, 2, 16, 1, 4)
    q, table = torch.zeros(length, 1, 4), torch.arange(1, length // 16 + 1, dtype=torch.int32)[None]
    attention._hidden.cache_clear()
    attention.attend(
        q, q, q, kv, torch.tensor([0, length]), torch.tensor([length]), table, torch.arange(16, 16 + length),
        max_query_len=length, max_seq_len=length, scale=1.0,
    )  # fmt: skip
    assert attention._hidden.cache_info().misses == attention.KEPT_KEYS // attention.QUERY_TILE - 1
