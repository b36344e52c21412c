"""Attention in C against the reference, on the cases that every implementation is tried on and on wider heads."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from tests.kernels.attention_cases import Case, cases
from tests.kernels.native.variants import VARIANTS, kernels_of
from tests.laws import equal
from tests.profiles import examples

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def arguments(case: Case, dim: int, seed: int, *, gains: bool) -> dict[str, Any]:
    """Those of `attend_qkv`, with the requests of a case and heads of `dim` numbers, in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens, heads, _ = case.tensors["q"].shape
    *blocks, kv_heads, _ = case.tensors["kv"].shape
    angle = normal(num_tokens, dim // 2)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return {
        "qkv": normal(num_tokens, (heads + 2 * kv_heads) * dim),
        "kv": normal(*blocks, kv_heads, dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "q_gain": normal(dim) if gains else None,
        "k_gain": normal(dim) if gains else None,
        "eps": 1e-5,
        **{name: case.tensors[name] for name in names},
        **case.static,
    }


def run(kernels: Kernels, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of a cache of its own: it is written."""
    return kernels.attend_qkv(kernels, **given | {"kv": given["kv"].clone()})  # type: ignore[no-any-return]


@given(
    case=cases(),
    dim=st.sampled_from([32, 64, 96, 128]),
    seed=st.integers(0, 2**32),
    gains=st.booleans(),
)
def test_equals_the_reference(variant: str, case: Case, dim: int, seed: int, gains: bool) -> None:
    """To 2e-5, and what is written to 1e-6; with soft caps torch's kernels run."""
    given = arguments(case, dim, seed, gains=gains)
    want, written = run(reference, given)
    got, kv = run(kernels_of(variant), given)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(kv[1:], written[1:], rtol=1e-6, atol=2e-6)


@examples(0.1)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 130), st.integers(1, 130)), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 31, 32, 33, 100]),
    seed=st.integers(0, 2**32),
)
def test_long_requests(variant: str, lengths: list[tuple[int, int]], window: int | None, seed: int) -> None:
    """Of several tiles of queries and panels of keys, prompts and single tokens beside each other."""
    given = long_case(lengths, window, seed)
    want, _ = run(reference, given)
    got, _ = run(kernels_of(variant), given)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def long_case(lengths: list[tuple[int, int]], window: int | None, seed: int) -> dict[str, Any]:
    """Requests with (tokens before, queries), blocks of 16, three queries' heads to a head of keys."""
    lens = torch.tensor([before + queries for before, queries in lengths])
    starts = torch.tensor([0, *(queries for _, queries in lengths)]).cumsum(0)
    width = int(-(-lens.max() // 16))
    table = torch.randperm(width * len(lens), generator=torch.Generator().manual_seed(seed)) + 1
    table = table.view(len(lens), width)
    slots = torch.cat(
        [
            table[r, torch.arange(before, before + queries) // 16] * 16
            + torch.arange(before, before + queries) % 16
            for r, (before, queries) in enumerate(lengths)
        ]
    )
    tensors = {
        "q": torch.empty(int(starts[-1]), 6, 0),
        "kv": torch.empty(1 + table.numel(), 2, 16, 2, 0),
        "query_start_loc": starts.to(torch.int32),
        "seq_lens": lens.to(torch.int32),
        "block_table": table.to(torch.int32),
        "slot_mapping": slots,
    }
    static = {
        "max_query_len": int((starts[1:] - starts[:-1]).max()),
        "max_seq_len": int(lens.max()),
        "scale": 0.125,
        "sliding_window": window,
    }
    return arguments(Case(tensors, static), 64, seed, gains=False)


@examples(0.3)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_what_no_query_sees_is_never_read(variant: str, case: Case, seed: int) -> None:
    """NaN beyond every length and before every window does not come out."""
    given = arguments(case, 32, seed, gains=False)
    want, _ = run(kernels_of(variant), given)
    block_size, window = given["kv"].shape[2], given["sliding_window"]
    seen = torch.zeros(given["kv"].shape[0] * block_size, dtype=torch.bool)
    starts = given["query_start_loc"].tolist()
    for r, length in enumerate(given["seq_lens"].tolist()):
        queries = starts[r + 1] - starts[r]
        first = 0 if window is None else max(0, length - queries - window + 1)
        for p in range(first, length):
            seen[int(given["block_table"][r, p // block_size]) * block_size + p % block_size] = True
    hidden = ~seen.view(-1, 1, block_size, 1, 1).expand_as(given["kv"])
    got, _ = run(kernels_of(variant), given | {"kv": given["kv"].masked_fill(hidden, torch.nan)})
    assert equal(got, want)


@examples(0.1)
@given(lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=2, max_size=4))
def test_a_request_has_the_same_bits_beside_others(variant: str, lengths: list[tuple[int, int]]) -> None:
    """Alone and in a batch."""
    given = long_case(lengths, None, 0)
    whole, _ = run(kernels_of(variant), given)
    starts = given["query_start_loc"].tolist()
    for r in range(len(lengths)):
        span = slice(starts[r], starts[r + 1])
        own = {name: given[name][span] for name in ("qkv", "cos", "sin", "slot_mapping")}
        own["query_start_loc"] = torch.tensor([0, span.stop - span.start], dtype=torch.int32)
        own |= {name: given[name][r : r + 1] for name in ("seq_lens", "block_table")}
        assert equal(run(kernels_of(variant), given | own)[0], whole[span])


def test_writes_where_the_cache_lies(variant: str) -> None:
    given = long_case([(3, 1), (0, 5)], None, 0)
    kernels = kernels_of(variant)
    _, kv = kernels.attend_qkv(kernels, **given)
    assert kv is given["kv"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot_mapping", torch.tensor([0, 1, 2, 3, 4, 10**6])),
        ("slot_mapping", torch.tensor([0, 1, 2, 3, 4, -1])),
        ("slot_mapping", torch.tensor([0])),
        ("block_table", torch.tensor([[1], [10**6]], dtype=torch.int32)),
        ("block_table", torch.tensor([[1], [-1]], dtype=torch.int32)),
        ("block_table", torch.tensor([[1]], dtype=torch.int32)),
        ("seq_lens", torch.tensor([4, 500], dtype=torch.int32)),
        ("seq_lens", torch.tensor([4], dtype=torch.int32)),
        ("query_start_loc", torch.tensor([0, 1, 7], dtype=torch.int32)),
        ("query_start_loc", torch.tensor([-1, 1, 6], dtype=torch.int32)),
        ("query_start_loc", torch.tensor([0, 6, 5], dtype=torch.int32)),
        ("seq_lens", torch.tensor([4, 3], dtype=torch.int32)),
        ("seq_lens", torch.tensor([-4, 5], dtype=torch.int32)),
        ("cos", torch.zeros(1, 32)),
    ],
)
def test_what_lies_outside_is_refused(variant: str, name: str, value: Tensor) -> None:
    """C would write and read beyond the cache; of a slot that is not in it nothing is written."""
    given = long_case([(3, 1), (0, 5)], None, 0)
    kv = given["kv"].clone()
    with pytest.raises(IndexError):
        run(kernels_of(variant), given | {name: value})
    assert equal(given["kv"], kv)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sliding_window", lambda _: 0),
        ("sliding_window", lambda _: -5),
        ("q_gain", lambda _: torch.ones(1)),
        ("kv", lambda kv: kv[:, :1].contiguous()),
        ("qkv", lambda qkv: qkv[:, :-1].contiguous()),
        ("qkv", lambda qkv: qkv[:, : 9 * 64].contiguous()),
        ("qkv", lambda qkv: qkv[:, : 4 * 64].contiguous()),
    ],
)
def test_other_shapes_are_torchs(variant: str, name: str, change: Any) -> None:
    """They are computed, or refused, as torch's kernels do it."""
    given = long_case([(3, 1), (0, 5)], None, 0)
    given |= {name: change(given[name])}

    def outcome(kernels: Kernels) -> object:
        try:
            return run(kernels, given)
        except Exception as error:
            return type(error)

    assert equal(outcome(kernels_of(variant)), outcome(donating))
