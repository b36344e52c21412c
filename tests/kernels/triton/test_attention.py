"""Paged attention: float64's values within the type's rounding, and exactly nothing where nothing is to be seen."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from tests.kernels.triton.cases import PADDING, AttentionCase, attention_case, far_apart, relative_error
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

import purestep.kernels.triton.attention  # isort: skip
import purestep.kernels.triton.decode  # isort: skip
import purestep.kernels.triton.short  # isort: skip
from purestep.kernels.triton import cuda_donating  # isort: skip
from purestep.kernels.triton.attention import attend  # isort: skip
from purestep.kernels.triton.decode import decode_tile  # isort: skip
from purestep.kernels.triton.softmax import Tile  # isort: skip

pytestmark = [quiet, pytest.mark.usefixtures("few_programs")]

# Norm-wise. Narrow types round q, k, v before (not counted here), the weights and the result.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = tuple(ERROR)
FORM = st.fixed_dictionaries(
    {"sliding_window": st.sampled_from([None, 1, 20]), "soft_cap": st.sampled_from([None, 4.0])}
)
SHAPE = st.sampled_from(
    [
        dict(heads=4, kv_heads=2, dim=32),
        dict(heads=3, kv_heads=1, dim=64),
        dict(heads=2, kv_heads=2, dim=96),
        dict(heads=5, kv_heads=1, dim=32, block_size=48),
        dict(heads=8, kv_heads=1, dim=128, block_size=64),
    ]
)
DECODES = st.lists(
    st.sampled_from([(0, 1), (0, 0), (1, 1), (16, 1), (70, 1), (40, 0)]), min_size=1, max_size=3
)
MIXES = st.lists(
    st.sampled_from([(0, 2), (0, 0), (1, 1), (3, 3), (40, 9), (70, 1), (70, 34)]), min_size=1, max_size=3
)

SHORTS = st.lists(
    st.sampled_from([(0, 2), (0, 0), (1, 1), (3, 3), (40, 5), (70, 1), (130, 4)]), min_size=1, max_size=3
)


def check(
    case: AttentionCase, dtype: torch.dtype, *, function: Any = attend, exact: bool = True, **changes: Any
) -> None:
    """Values, exact zeros, and the cache: this step's entries written, all else bit for bit as before.

    If not `exact`, keys and queries may lie a rounding beside those of the case.
    """
    t = case.tensors
    out, kv = case.run(function, **changes)
    expected = case.expected()
    assert out.dtype == dtype
    if expected.any():
        assert relative_error(out, expected) < (1 if exact else 4) * ERROR[dtype]
    blind = expected.flatten(1).abs().sum(1) == 0
    assert blind[len(blind) - PADDING :].all() and not out[blind].any()
    wanted, block_size = t["kv"].clone(), t["kv"].shape[2]
    slots = t["slot_mapping"]
    wanted[slots // block_size, :, slots % block_size] = torch.stack((t["k"], t["v"]), 1)
    if not exact:
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(kv[1:], wanted[1:], rtol=4 * step, atol=4 * step, equal_nan=True)
        wanted[slots // block_size, 0, slots % block_size] = kv[slots // block_size, 0, slots % block_size]
    assert equal(kv[1:], wanted[1:])


@few(16)
@given(DECODES, SHAPE, FORM, st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_decoding(
    requests: list[Any], shape: dict[str, int], form: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    """One query a request, or none; idle requests and padding give exactly 0, unused slots hold NaN."""
    check(attention_case(requests, **shape, **form, dtype=dtype, device=DEVICE, seed=seed), dtype)


@few(16)
@given(MIXES, SHAPE, FORM, st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_mixed_batches(
    requests: list[Any], shape: dict[str, int], form: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    """Whole prompts, chunks and decodes, of lengths that tiles do not divide."""
    case = attention_case(requests, **shape, **form, dtype=dtype, device=DEVICE, seed=seed)
    check(case, dtype, max_query_len=max(2, case.static["max_query_len"]))


@few(16)
@given(
    SHORTS,
    SHAPE,
    FORM,
    st.sampled_from(DTYPES),
    st.sampled_from([None, 20]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_few_queries_each(
    requests: list[Any],
    shape: dict[str, int],
    form: dict[str, Any],
    dtype: torch.dtype,
    bound: int | None,
    split: bool,
    seed: int,
) -> None:
    """As verification has them: keys are split among programs, some of which have nothing to see, or, as in large
    batches, they are not.

    With a larger bound there may be requests with many queries among them.
    """
    case = attention_case(requests, **shape, **form, dtype=dtype, device=DEVICE, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        if not split:
            patch.setattr(purestep.kernels.triton.decode, "PROGRAMS", 1)
        check(case, dtype, max_query_len=bound or max(2, case.static["max_query_len"]), max_seq_len=200)


def test_many_queries_among_requests_with_few() -> None:
    """In one batch, each by its own kernel."""
    requests = [(150, 3), (20, 20), *[(70, 2)] * 6, (0, 1), (9, 1)]
    case = attention_case(requests, heads=2, kv_heads=1, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(purestep.kernels.triton.decode, "PROGRAMS", 64)
        check(case, torch.float32)


def turned(case: AttentionCase, has_norm: bool, seed: int) -> tuple[Any, dict[str, Any]]:
    """What a projection gave, and how it is turned; the case then has the reference's turned queries and keys."""
    generator, t = torch.Generator(DEVICE).manual_seed(seed), case.tensors
    qkv, dtype = torch.cat((t["q"], t["k"], t["v"]), 1).flatten(1), t["q"].dtype
    tokens, _, dim = t["q"].shape
    angle = torch.rand(tokens, dim // 2, generator=generator, device=DEVICE) * 100
    how: dict[str, Any] = {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
    q, k = t["q"], t["k"]
    if has_norm:
        gains = (1 + torch.rand(2, dim, generator=generator, device=DEVICE)).to(dtype)
        how |= {"q_gain": gains[0], "k_gain": gains[1], "eps": 1e-5}
        q, k = reference.rms_norm(q, gains[0], 1e-5), reference.rms_norm(k, gains[1], 1e-5)
    t["q"], t["k"] = reference.rotate(q, k, how["cos"], how["sin"])
    return qkv, how


@few(16)
@given(st.one_of(DECODES, MIXES), SHAPE, FORM, st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_heads_are_normed_and_turned_on_the_way(
    requests: list[Any],
    shape: dict[str, int],
    form: dict[str, Any],
    has_norm: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Of what a projection gave. Keys go into the cache with the reference's bits, if no norm sums in another order."""
    case = attention_case(requests, **shape, **form, dtype=dtype, device=DEVICE, seed=seed)
    qkv, how = turned(case, has_norm, seed)
    kernels = cuda_donating()

    def function(q: Any, k: Any, v: Any, kv: Any, **others: Any) -> Any:
        return kernels.attend_qkv(kernels, qkv, kv, **others, **how)

    check(case, dtype, function=function, exact=not has_norm)


@pytest.mark.parametrize("max_query_len", [1, 2])
def test_a_part_that_was_replaced_is_used(max_query_len: int) -> None:
    """A set with another `attend`, rotation or norm is composed of its parts."""
    case = attention_case([(5, 1), (20, 1)], device=DEVICE)
    qkv, how = turned(case, True, 0)
    own = cuda_donating()
    t = {name: x for name, x in case.tensors.items() if name not in ("q", "k", "v")}
    arguments = case.static | {"max_query_len": max_query_len} | how
    for name in ("attend", "rotate", "rms_norm"):
        used = []

        def spy(*args: Any, name: str = name, used: list[str] = used, **kwargs: Any) -> Any:
            used.append(name)
            return getattr(own, name)(*args, **kwargs)

        kernels = replace(own, **{name: spy})
        out, _ = kernels.attend_qkv(kernels, qkv, **(t | {"kv": t["kv"].clone()}), **arguments)
        expected, _ = own.attend_qkv(own, qkv, **(t | {"kv": t["kv"].clone()}), **arguments)
        assert used
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("fetch_first", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("settled", [False, True])
def test_the_first_keys_before_the_query_or_after(
    fetch_first: bool, window: int | None, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which things are read changes nothing."""
    tile = Tile(16, 16, 4, 3, fetch_first)
    monkeypatch.setattr(purestep.kernels.triton.attention, "decode_tile", lambda *_, **__: tile)
    requests = [(0, 1), (1, 1), (0, 0), (17, 1), (150, 1)]
    case = attention_case(requests, sliding_window=window, device=DEVICE)
    qkv, how = turned(case, False, 0)
    kernels = cuda_donating()

    def function(q: Any, k: Any, v: Any, kv: Any, **others: Any) -> Any:
        return kernels.attend_qkv(kernels, qkv, kv, **others, **how, settled=settled)

    check(case, torch.float32, function=function)


def test_only_a_set_with_its_own_angles_reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may begin before what was written for them has been."""
    case, own, seen = attention_case([(5, 1)], device=DEVICE), cuda_donating(), []
    qkv, how = turned(case, False, 0)
    t = {name: x for name, x in case.tensors.items() if name not in ("q", "k", "v")}
    decode = purestep.kernels.triton.attention.decode

    def spy(*tensors: Any, settled: bool, **others: Any) -> Any:
        seen.append(settled)
        return decode(*tensors, settled=settled, **others)

    monkeypatch.setattr(purestep.kernels.triton.attention, "decode", spy)
    for kernels in (own, replace(own, angles=reference.angles)):
        for settled in (False, True):
            kernels.attend_qkv(kernels, qkv, **t, **case.static, **how, settled=settled)
    assert seen == [False, True, False, False]


def test_cos_of_another_type_is_refused() -> None:
    case = attention_case([(5, 1)], dtype=torch.bfloat16, device=DEVICE)
    qkv, how = turned(case, False, 0)
    own = cuda_donating()
    t = {name: x for name, x in case.tensors.items() if name not in ("q", "k", "v")}
    with pytest.raises(TypeError, match="of one type"):
        own.attend_qkv(own, qkv, **t, **case.static, **(how | {"cos": how["cos"].float()}))


@few(6)
@given(st.sampled_from([1, 63, 200, 5000]), st.sampled_from([(1, 1), (70, 1), (70, 5)]))
def test_bounds_change_no_bit(extra: int, request: tuple[int, int]) -> None:
    """Neither a larger max_seq_len nor, among batches that are not all decoding, a larger max_query_len."""
    case = attention_case([request, (20, 1)], device=DEVICE)
    bounds = {"max_seq_len": case.static["max_seq_len"] + extra}
    if request[1] > 1:
        bounds["max_query_len"] = request[1] + extra
    assert equal(case.run(attend)[0], case.run(attend, **bounds)[0])


@pytest.mark.parametrize("programs", [1, 1000])
def test_keys_in_one_part_and_in_many(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to nineteen of them: more than are joined at a time."""
    monkeypatch.setattr(purestep.kernels.triton.decode, "PROGRAMS", programs)
    requests = [(0, 1), (1, 1), (0, 0), (600, 1)]
    check(attention_case(requests, heads=2, kv_heads=1, device=DEVICE), torch.float32)


def test_nan_is_passed_on() -> None:
    """A request that reads NaN gives NaN, which is how it is found out; its neighbours do not."""
    case = attention_case([(5, 1), (20, 1), (7, 3)], device=DEVICE)
    case.tensors["k"][1] = math.nan
    for max_query_len in (1, 3):
        out, _ = case.run(attend, max_query_len=max_query_len)
        assert out[1].isnan().all() and not out[0].isnan().any()


def test_nothing_to_do() -> None:
    case = attention_case([(5, 1)], device=DEVICE)
    nothing = {name: case.tensors[name][:0] for name in ("q", "k", "v", "slot_mapping")}
    assert case.run(attend, **nothing)[0].shape == (0, 4, 32)


def test_float64_is_refused() -> None:
    case = attention_case([(5, 1)], device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        case.run(attend, q=case.tensors["q"].double())


@pytest.mark.parametrize(
    ("group", "dim", "eight_bits", "tiles"),
    [
        (4, 64, False, {16: (64, 4, 3, True), 64: (64, 4, 2, True), 512: (32, 1, 5), 2048: (64, 4, 2)}),
        (4, 128, False, {8: (64, 8, 3, True), 127: (64, 8, 3, True), 128: (64, 2, 3), 1025: (32, 1, 3)}),
        (17, 64, False, {8: (64, 4, 3, True), 64: (64, 4, 2, True), 512: (64, 2, 5), 2048: (32, 1, 5)}),
        (17, 128, False, {8: (64, 4, 3), 64: (64, 2, 3), 1024: (64, 2, 3), 2048: (32, 1, 3)}),
        (4, 64, True, {8: (64, 4, 3, True), 64: (64, 4, 3), 512: (128, 4, 2), 2048: (32, 1, 5)}),
        (4, 128, True, {8: (64, 4, 2), 64: (64, 2, 5), 512: (64, 2, 5), 2048: (32, 1, 5)}),
        (40, 64, False, {8: (64, 8, 3, True), 2048: (32, 2, 5)}),
        (40, 64, True, {8: (64, 8, 3, True), 2048: (32, 2, 5)}),
        (4, 256, False, {8: (32, 4, 5), 2048: (32, 4, 5)}),
    ],
)
def test_the_tile_of_decodes_by_how_many_there_are(
    group: int, dim: int, eight_bits: bool, tiles: dict[int, tuple[Any, ...]]
) -> None:
    """Keys, warps, stages, and whether the first tile is fetched first."""
    for num_pairs, expected in tiles.items():
        tile = decode_tile(torch.bfloat16, dim, group, num_pairs, eight_bits=eight_bits)
        assert tile == Tile({4: 16, 17: 32, 40: 64}[group], *expected)


def random_requests(count: int, longest: int, most_queries: int, seed: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (count,), generator=generator).tolist()
    queries = torch.randint(1, most_queries + 1, (count,), generator=generator).tolist()
    return [(length, min(length, query) or 1) for length, query in zip(lengths, queries, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"),
    [
        *(
            (torch.bfloat16, *shape)
            for shape in [(32, 8, 64), (32, 8, 128), (16, 8, 128), (6, 2, 96), (8, 4, 256)]
        ),
        *((torch.float32, *shape) for shape in [(32, 8, 64), (6, 2, 96), (8, 4, 256)]),
        (torch.float16, 32, 8, 128),
    ],
)
def test_large_batches(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    shape: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "dtype": dtype,
        "device": DEVICE,
    }
    forms: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (9, {"sliding_window": 300}),
        (100, {"soft_cap": 5.0}),
    ]
    for count, form in forms:
        longest = 3000 if count < 100 else 700
        decodes, shorts, chunks = (
            random_requests(count, longest, most_queries, count) for most_queries in (1, 5, 200)
        )
        check(attention_case(decodes, **shape, **form), dtype)
        check(attention_case(shorts, **shape, **form), dtype)
        check(attention_case([(longest, longest), *chunks], **shape, **form), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [[(40000, 1)], [(40000, 5), (3, 1)]])
def test_long_requests(requests: list[tuple[int, int]]) -> None:
    check(attention_case(requests, heads=8, dim=64, dtype=torch.bfloat16, device=DEVICE), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 40])
def test_offsets_of_64_bits(queries: int) -> None:
    """Blocks whose first element lies beyond 2**31."""
    case = attention_case([(100, queries)], dim=64, dtype=torch.bfloat16, device=DEVICE)
    assert int(case.tensors["block_table"].max()) > 4

    def function(*, kv: Any, **others: Any) -> Any:
        return attend(kv=far_apart(kv), **others)

    check(case, torch.bfloat16, function=function)


@pytest.mark.gpu
def test_same_bits_every_time() -> None:
    """Fifty runs of a batch whose keys are split among programs."""
    case = attention_case(
        random_requests(5, 4000, 1, 3), heads=32, kv_heads=8, dim=64, dtype=torch.bfloat16, device=DEVICE
    )
    first = case.run(attend)[0]
    assert all(torch.equal(first, case.run(attend)[0]) for _ in range(50))
