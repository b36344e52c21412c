"""Caches of eight bits: the reference's bits are written, and attention is that over what is read, in float64."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.reference.scales import FP8, scales_of, stored
from tests.kernels.triton.cases import PADDING, AttentionCase, attention_case, far_apart, relative_error
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.kernels.triton.test_attention import (
    DECODES,
    DTYPES,
    ERROR,
    FORM,
    MIXES,
    SHAPE,
    SHORTS,
    random_requests,
    turned,
)
from tests.laws import equal

import purestep.kernels.triton.attention  # isort: skip
import purestep.kernels.triton.decode  # isort: skip
from purestep.kernels.triton import cuda_donating, cuda_invariant  # isort: skip
from purestep.kernels.triton.shared import LARGEST_FP8  # isort: skip
from purestep.kernels.triton.writes import write_kv  # isort: skip

pytestmark = [quiet, pytest.mark.usefixtures("few_programs")]

SCALES = st.tuples(*[st.sampled_from([1.0, 0.009, 2**-7])] * 2)
Scales = tuple[float, float]


def case_of(
    requests: list[Any], shape: dict[str, int], form: dict[str, Any], dtype: torch.dtype, seed: int
) -> AttentionCase:
    return attention_case(requests, **shape, **form, dtype=dtype, device=DEVICE, seed=seed)


def cases(requests: Any) -> Any:
    """Batches of such requests, of any shape, form and type."""
    return st.builds(case_of, requests, SHAPE, FORM, st.sampled_from(DTYPES), st.integers(0, 2**31))


def planes(scales: Tensor) -> Tensor:
    """Scales of keys and values, against a cache."""
    return scales[:, None, None, None]


def check(
    case: AttentionCase, scales: Scales, *, attend: Any = None, exact: bool = True, **changes: Any
) -> None:
    """Values against float64, exact zeros, and every bit of the cache: the reference's, or what lay there.

    If not `exact`, keys may lie a rounding beside those of the case, and so be stored as the next number.
    """
    t, own = case.tensors, torch.tensor(scales, device=DEVICE)
    kv = stored(t["kv"], planes(own), FP8)
    attend = cuda_donating().attend if attend is None else attend
    out, written = attend(**(t | {"kv": kv.clone(), "kv_scales": own} | case.static | changes))
    wanted, slots, size = kv.view(torch.uint8).clone(), t["slot_mapping"], kv.shape[2]
    pair = stored(torch.stack((t["k"], t["v"]), 1), own[:, None, None], FP8)
    wanted[slots // size, :, slots % size] = pair.view(torch.uint8)
    bits = written.view(torch.uint8)
    if exact:
        assert equal(bits[1:], wanted[1:])
    else:
        real = slots >= size  # the null block has several writers
        keys = written.float()[slots // size, 0, slots % size]
        torch.testing.assert_close(keys[real], pair[real, 0].float(), rtol=1 / 8, atol=2**-9)
        wanted[slots // size, 0, slots % size] = bits[slots // size, 0, slots % size]
        assert equal(bits[1:], wanted[1:])
        pair = bits[slots // size, :, slots % size].view(FP8)
    k, v = (pair.double() * own.double()[:, None, None]).unbind(1)
    seen = attrs.evolve(case, tensors=t | {"k": k, "v": v, "kv": kv.double() * planes(own.double())})
    expected = seen.expected()
    if expected.any():
        assert relative_error(out, expected) < (1 if exact else 4) * ERROR[out.dtype]
    blind = expected.flatten(1).abs().sum(1) == 0
    assert blind[len(blind) - PADDING :].all() and not out[blind].any()


@few(6)
@given(cases(DECODES), SCALES)
def test_decoding(case: AttentionCase, scales: Scales) -> None:
    check(case, scales)


@few(6)
@given(cases(MIXES), SCALES)
def test_mixed_batches(case: AttentionCase, scales: Scales) -> None:
    """The invariant set too."""
    bound = max(2, case.static["max_query_len"])
    check(case, scales, max_query_len=bound)
    check(case, scales, attend=cuda_invariant().attend, max_query_len=bound)


@few(6)
@given(cases(SHORTS), SCALES, st.booleans())
def test_a_few_queries_each(case: AttentionCase, scales: Scales, split: bool) -> None:
    """Keys are split among programs, or, as in large batches, they are not."""
    with pytest.MonkeyPatch.context() as patch:
        if not split:
            patch.setattr(purestep.kernels.triton.decode, "PROGRAMS", 1)
        check(case, scales, max_query_len=max(2, case.static["max_query_len"]), max_seq_len=200)


@pytest.mark.parametrize("requests", [[(50, 1), (7, 1)], [(50, 5), (7, 2)], [(50, 20), (7, 7)]])
@pytest.mark.parametrize("power", [-120, -40, 20, 100])
def test_queries_of_any_size(requests: list[tuple[int, int]], power: int) -> None:
    """Those of bfloat16 are far beyond what the type that eight bits are widened to can hold; scores are not."""
    case = attention_case(requests, dtype=torch.bfloat16, device=DEVICE)
    sizes = torch.tensor([2.0**power, 1.0, 2.0 ** (power / 2), 0.0], device=DEVICE)[:, None]
    case.tensors["q"] = (case.tensors["q"] * sizes).bfloat16()
    check(attrs.evolve(case, static=case.static | {"scale": 2.0 ** -max(power, 0)}), (1.0, 1.0))


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize(("outlier", "scale"), [(2.0**27, 1.0), (2.0**120, 1e4)])
def test_a_large_number_of_a_query_hides_no_small_one(queries: int, outlier: float, scale: float) -> None:
    """Where it meets keys that are 0, the others say which keys count; and no scale of scores is infinite."""
    case = attention_case([(40, queries)], dtype=torch.bfloat16, device=DEVICE)
    t = case.tensors
    t["q"][..., 0], t["k"][..., 0] = outlier, 0.0
    t["kv"][:, 0, :, :, 0] = 0.0
    if outlier > 2.0**28:
        t["k"][:], t["kv"][:, 0] = 0.0, 0.0
    check(case, (scale, 1.0))


@few(6)
@given(
    st.one_of(DECODES, MIXES), SHAPE, st.booleans(), st.sampled_from(DTYPES), SCALES, st.integers(0, 2**31)
)
def test_heads_are_normed_and_turned_on_the_way(
    requests: list[Any], shape: dict[str, int], has_norm: bool, dtype: torch.dtype, scales: Scales, seed: int
) -> None:
    """By both sets; keys are stored after their rounding to the model's type, as the reference's are."""
    case = attention_case(requests, **shape, dtype=dtype, device=DEVICE, seed=seed)
    qkv, how = turned(case, has_norm, seed)
    for kernels in (cuda_donating(), cuda_invariant()):

        def attend(q: Any, k: Any, v: Any, kv: Any, *, kernels: Any = kernels, **others: Any) -> Any:
            return kernels.attend_qkv(kernels, qkv, kv, **others, **how)

        check(case, scales, attend=attend, exact=not has_norm)


@few(6)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.sampled_from([1.0, 0.37, 2.0**-9]))
def test_what_is_written_are_the_references_bits(seed: int, dtype: torch.dtype, scale: float) -> None:
    """Every number of eight bits, those half-way between two, those beyond the largest, infinities and NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8).float()
    finite = codes[codes.isfinite()].unique()
    generator = torch.Generator(DEVICE).manual_seed(seed)
    spread = torch.randn(1024, generator=generator, device=DEVICE).exp() * 8
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 464.0, 480.0, -1e30, 1e-30], device=DEVICE)
    x = torch.cat([codes, (finite[1:] + finite[:-1]) / 2, spread, -spread, odd])
    x = (x * scale).to(dtype)[: len(x) // 32 * 32].view(-1, 2, 16)
    own = torch.tensor([scale, 3 * scale], device=DEVICE)
    kv = torch.zeros(len(x) // 16 + 2, 2, 16, 2, 16, device=DEVICE).to(FP8)
    write_kv(kv, x, x, torch.arange(len(x), device=DEVICE) + 16, own)
    found = kv.view(torch.uint8)[1:].transpose(1, 2).flatten(0, 1)[: len(x)]
    wanted = stored(torch.stack((x, x), 1), own[:, None, None], FP8).view(torch.uint8)
    nan = wanted & 0x7F == 0x7F  # its sign may be lost
    assert equal(found & 0x7F == 0x7F, nan)
    assert equal(found[~nan], wanted[~nan])
    assert LARGEST_FP8.value == torch.finfo(FP8).max


@few(8)
@given(st.permutations(range(6)))
def test_blocks_are_copied_and_zeroed(blocks: list[int]) -> None:
    source, target, zeroed = (
        torch.tensor(part, device=DEVICE) for part in (blocks[:3], blocks[1:4], blocks[4:])
    )
    kv = torch.arange(6 * 64, dtype=torch.int32, device=DEVICE).to(torch.uint8).view(6, 2, 4, 2, 4).view(FP8)
    on_host = [x.cpu() for x in (source, target, zeroed)]
    want = reference.zero_blocks(reference.copy_blocks(kv.cpu(), *on_host[:2]), on_host[2])
    kernels = cuda_donating()
    assert kernels.copy_blocks(kv, source, target) is kv
    assert kernels.zero_blocks(kv, zeroed) is kv
    assert equal(kv.cpu(), want)


def test_caches_and_scales_that_do_not_belong_together_are_refused() -> None:
    case = attention_case([(5, 1)], device=DEVICE)
    scales = torch.ones(2, device=DEVICE)
    for kernels in (cuda_donating(), cuda_invariant()):
        with pytest.raises(TypeError, match="without kv_scales"):
            case.run(kernels.attend, kv=case.tensors["kv"].to(FP8))
        with pytest.raises(TypeError, match="with kv_scales"):
            case.run(kernels.attend, kv_scales=scales)
        with pytest.raises(TypeError, match=r"kv_scales of torch.float64"):
            case.run(kernels.attend, kv=case.tensors["kv"].to(FP8), kv_scales=scales.double())


@pytest.mark.parametrize(
    ("name", "requests"),
    [("decode_tile", [(9, 1)]), ("mixed_tile", [(90, 80)]), ("short_tile", [(9, 2)])],
)
def test_the_tile_is_that_of_a_cache_of_eight_bits(
    name: str, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a cache of the queries' type it is not."""
    case, asked = attention_case(requests, device=DEVICE), list[bool]()
    own = getattr(purestep.kernels.triton.attention, name)

    def tile(*arguments: Any, eight_bits: bool) -> Any:
        asked.append(eight_bits)
        return own(*arguments, eight_bits=eight_bits)

    monkeypatch.setattr(purestep.kernels.triton.attention, name, tile)
    check(case, (1.0, 1.0))
    case.run(cuda_donating().attend)
    assert asked == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"),
    [
        *((torch.bfloat16, *shape) for shape in [(32, 8, 64), (32, 8, 128), (6, 2, 96), (8, 4, 256)]),
        (torch.float16, 32, 8, 128),
        (torch.float32, 32, 8, 64),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_large_batches(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, seed: int) -> None:
    """Decodes, prompts with chunks, a few queries each, of random lengths, by scales of the keys and values."""
    shape: dict[str, Any] = dict(
        heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device=DEVICE, seed=seed
    )
    forms: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (9, {"sliding_window": 300}),
        (100, {"soft_cap": 5.0}),
    ]
    for count, form in forms:
        longest = 3000 if count < 100 else 700
        batches = [random_requests(count, longest, most, count + seed) for most in (1, 6, 200)]
        batches.append([(longest, longest), *batches[-1]])
        for requests in batches:
            case = attention_case(requests, **shape, **form)
            t = case.tensors
            scales = scales_of(t["k"], t["v"], torch.ones(len(t["k"]), dtype=torch.bool, device=DEVICE))
            check(case, tuple(scales.tolist()))
            qkv, how = turned(case, False, seed)
            for kernels in (cuda_donating(), cuda_invariant()):

                def attend(q: Any, k: Any, v: Any, kv: Any, *, kernels: Any = kernels, **others: Any) -> Any:
                    return kernels.attend_qkv(kernels, qkv, kv, **others, **how)  # noqa: B023

                check(case, tuple(scales.tolist()), attend=attend)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [[(40000, 1)], [(40000, 5), (3, 1)]])
def test_long_requests(requests: list[tuple[int, int]]) -> None:
    case = attention_case(requests, heads=8, dim=64, dtype=torch.bfloat16, device=DEVICE)
    check(case, (0.009, 0.011))


@pytest.mark.gpu
def test_offsets_of_64_bits() -> None:
    """Blocks whose first element lies beyond 2**31."""
    attend = cuda_donating().attend

    def function(*, kv: Any, **others: Any) -> Any:
        return attend(kv=far_apart(kv), **others)

    for queries in (1, 40):
        case = attention_case([(100, queries)], dim=64, dtype=torch.bfloat16, device=DEVICE)
        check(case, (0.009, 0.011), attend=function)


@pytest.mark.gpu
def test_replays_read_the_scales_that_lie_there_then() -> None:
    """A graph is bound to the address of the scales, not to their values."""
    own = torch.ones(2, device=DEVICE)
    case = attention_case([(300, 1), (77, 1)], dim=64, dtype=torch.bfloat16, device=DEVICE)
    kv = torch.zeros_like(case.tensors["kv"]).to(FP8)
    arguments = case.tensors | {"kv": kv, "kv_scales": own} | case.static
    attend = cuda_donating().attend
    attend(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(**arguments)
    for scales in ((0.01, 0.02), (0.5, 0.25)):
        own.copy_(torch.tensor(scales))
        graph.replay()
        torch.cuda.synchronize()
        replayed, written = out.clone(), kv.clone()
        expected, _ = attend(**arguments)
        assert equal(replayed, expected) and equal(written, kv)
