"""Laws of dispatch, then the tables of its specification, then what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.dispatch import (
    capture_descriptors,
    determine_batch_execution_and_padding,
    dispatch,
    dispatch_keys,
    is_uniform_decode,
    pad_table,
)
from purestep.pure.errors import CaptureSizeError, DispatchError
from purestep.pure.records.dispatch import (
    BatchExecution,
    Coordination,
    CUDAGraphMode,
    DispatchConfig,
    DispatchKeys,
    LoRACapture,
)
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import LayoutBounds
from tests.laws import assert_pure
from tests.profiles import examples

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, FULL_AND_PIECEWISE = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
GRAPH_MODES = (PIECEWISE, FULL, DECODE_ONLY, FULL_AND_PIECEWISE)


Setup = tuple[
    Any, ...
]  # plain values: checked records are built outside of strategies, since the checker draws too
Known = dict[str, Any]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any mode; sizes are multiples of the tokens that a uniform decode batch runs of a request."""
    query_len = draw(st.integers(1, 4))
    units = draw(st.sets(st.integers(1, 40), min_size=1, max_size=8))
    lora = draw(st.none() | st.tuples(st.integers(1, 9), st.booleans(), st.booleans()))
    sizes = tuple(query_len * unit for unit in sorted(units))
    return sizes, draw(st.integers(1, 48)), lora, draw(st.sampled_from(GRAPH_MODES)), query_len


@st.composite
def questions(draw: st.DrawFn) -> tuple[Setup, int, Known]:
    """A set-up, a number of tokens within its sizes, and what else is known of the batch."""
    setup = draw(setups())
    sizes, _, lora, _, query_len = setup
    uniform = draw(st.booleans())
    num_tokens = draw(st.integers(1, sizes[-1]))
    if uniform:
        num_tokens = -(-num_tokens // query_len) * query_len
    num_loras = draw(st.integers(0, lora[0] if lora else 0))
    return setup, num_tokens, {"uniform_decode": uniform, "num_active_loras": num_loras}


def _keys(setup: Setup) -> DispatchKeys:
    sizes, max_num_reqs, lora, mode, query_len = setup
    config = DispatchConfig(sizes, max_num_reqs, LoRACapture(*lora) if lora else None)
    return dispatch_keys(config, mode, query_len)


@given(questions())
def test_a_graph_is_the_smallest_captured_one_that_fits_and_none_pads_nothing(
    question: tuple[Setup, int, Known],
) -> None:
    """Padded >= tokens; a non-NONE size is a capture size, minimal, and captured; NONE keeps the count."""
    setup, num_tokens, known = question
    keys = _keys(setup)
    mode, descriptor = assert_pure(dispatch, keys, num_tokens, **known)
    if mode is NONE:
        assert descriptor == BatchDescriptor(num_tokens)
        return
    sizes = keys.config.capture_sizes
    assert descriptor.num_tokens == min(size for size in sizes if size >= num_tokens)
    assert any(m is mode and descriptor in found for m, found in capture_descriptors(keys))
    assert descriptor.has_lora == (descriptor.num_active_loras > 0)
    assert descriptor.num_active_loras >= known["num_active_loras"]


@given(questions())
def test_dispatch_of_what_was_padded_gives_the_same_graph(
    question: tuple[Setup, int, Known],
) -> None:
    """Idempotence: the padded batch, adapters included, runs in the very graph that it was padded for."""
    setup, num_tokens, known = question
    keys = _keys(setup)
    mode, descriptor = dispatch(keys, num_tokens, **known)
    adapters = {"num_active_loras": descriptor.num_active_loras} if mode is not NONE else {}
    assert (mode, descriptor) == dispatch(keys, descriptor.num_tokens, **known | adapters)


@given(questions(), st.integers(1, 200))
def test_more_tokens_are_never_padded_to_fewer(question: tuple[Setup, int, Known], more: int) -> None:
    """Monotone in the tokens, other facts being equal, also beyond the last size."""
    setup, num_tokens, known = question
    keys = _keys(setup)
    more *= keys.uniform_query_len if known["uniform_decode"] else 1
    _, smaller = dispatch(keys, num_tokens, **known)
    _, larger = dispatch(keys, num_tokens + more, **known)
    assert smaller.num_tokens <= larger.num_tokens


@given(questions(), st.sets(st.sampled_from((PIECEWISE, FULL))))
def test_a_mode_that_is_excluded_is_never_chosen(
    question: tuple[Setup, int, Known], excluded: set[CUDAGraphMode]
) -> None:
    """By exclusion or by leaving it out of what is allowed, and the two ways agree; the sets stay as they were."""
    setup, num_tokens, known = question
    keys = _keys(setup)
    allowed = {NONE, PIECEWISE, FULL} - excluded
    mode, descriptor = assert_pure(dispatch, keys, num_tokens, **known, invalid_modes=excluded)
    assert mode not in excluded
    assert (mode, descriptor) == dispatch(keys, num_tokens, **known, valid_modes=allowed)
    both = {"valid_modes": {NONE, PIECEWISE, FULL}, "invalid_modes": excluded}
    assert (mode, descriptor) == assert_pure(dispatch, keys, num_tokens, **known, **both)


@given(setups())
def test_every_captured_graph_is_dispatched_to(setup: Setup) -> None:
    """Nothing is captured in vain: a batch of exactly its shape runs in it."""
    keys = _keys(setup)
    for mode, descriptors in capture_descriptors(keys):
        for d in descriptors:
            known = {"uniform_decode": d.uniform, "num_active_loras": d.num_active_loras}
            assert (mode, d) == dispatch(keys, d.num_tokens, **known, valid_modes={mode})


@given(setups())
def test_capture_goes_from_pieces_to_full_and_from_large_to_small(setup: Setup) -> None:
    """PIECEWISE before FULL, tokens then adapters descending, nothing twice, empty modes left out."""
    order = assert_pure(capture_descriptors, _keys(setup))
    assert [mode for mode, _ in order] == [m for m in (PIECEWISE, FULL) if m in dict(order)]
    for _, found in order:
        sizes = [(d.num_tokens, d.num_active_loras) for d in found]
        assert sizes == sorted(sizes, reverse=True) and len(set(found)) == len(found) > 0


@examples(4)  # whole batches are cheap here, and this is the law that a served batch relies on
@given(setups(), st.lists(st.integers(1, 6), min_size=1, max_size=48), st.booleans())
def test_a_graph_holds_the_requests_and_the_queries_of_its_batch(
    setup: Setup, counts: list[int], make_uniform: bool
) -> None:
    """Any batch within max_num_reqs: enough tokens and requests, and queries of a uniform graph are all alike."""
    keys = _keys(setup)
    counts = counts[: keys.config.max_num_reqs]
    if make_uniform:
        counts = [keys.uniform_query_len] * len(counts)
    chosen = determine_batch_execution_and_padding(keys, _bounds(counts))
    descriptor = chosen.descriptor
    assert descriptor.num_tokens == sum(counts) + chosen.num_paddings and chosen.num_paddings >= 0
    assert chosen.num_reqs >= len(counts)
    assert chosen.num_reqs <= keys.config.max_num_reqs
    if descriptor.uniform:
        assert set(counts) == {keys.uniform_query_len}
        assert descriptor.num_tokens == chosen.num_reqs * keys.uniform_query_len
    if chosen.cudagraph_mode is not FULL:
        assert chosen.num_reqs == len(counts)


@given(st.integers(1, 3), st.sampled_from((FULL, DECODE_ONLY, FULL_AND_PIECEWISE)), st.integers(16, 64))
def test_a_uniform_batch_with_drafts_runs_in_a_graph_if_capture_covers_it(
    num_drafts: int, mode: CUDAGraphMode, max_num_reqs: int
) -> None:
    """Keys say how many requests a graph holds by the rule of look-up: no batch of 1 to 16 falls to NONE unseen."""
    query_len = num_drafts + 1
    sizes = tuple(query_len * n for n in (1, 2, 4, 8, 16))
    keys = dispatch_keys(DispatchConfig(sizes, max_num_reqs), mode, query_len)
    for num_reqs in range(1, 17):
        chosen = determine_batch_execution_and_padding(keys, _bounds([query_len] * num_reqs))
        padded = next(n for n in (1, 2, 4, 8, 16) if n >= num_reqs)
        assert chosen.cudagraph_mode is FULL
        assert chosen.descriptor.num_tokens == padded * query_len
        holds = min(padded * query_len, max_num_reqs) if mode is FULL else padded
        assert chosen.num_reqs == holds


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 30), st.integers(0, 6), st.none() | st.booleans())
def test_uniform_decode_means_that_every_count_is_the_query_length(
    max_query_len: int, query_len: int, num_tokens: int, num_reqs: int, force: bool | None
) -> None:
    """The predicate on counts equals the statement about every request, unless it is forced."""
    answer = is_uniform_decode(
        num_tokens, num_reqs, max_query_len=max_query_len, uniform_query_len=query_len, force=force
    )
    by_counts = max_query_len == query_len and num_tokens == query_len * num_reqs
    assert answer is (by_counts if force is None else force)


@given(st.sets(st.integers(1, 60), max_size=8), st.integers(0, 10))
def test_the_pad_table_names_the_next_size(sizes: set[int], beyond: int) -> None:
    """Every count from 0 on maps to the smallest size that holds it; behind the last, to a size that no graph has."""
    ordered = tuple(sorted(sizes))
    max_size = (ordered[-1] if ordered else 0) + beyond
    table = pad_table(ordered, max_size)
    expected = [min((s for s in ordered if s >= n), default=max_size + 1) for n in range(1, max_size + 1)]
    assert table == (0, *expected)


@given(questions(), st.lists(st.integers(0, 64), min_size=1, max_size=4), st.booleans())
def test_ranks_that_agree_run_the_same_size_in_the_same_mode(
    question: tuple[Setup, int, Known], others: list[int], force_eager: bool
) -> None:
    """Each rank's second dispatch gives exactly the size agreed on; if all agreed on graphs, the same for all."""
    setup, num_tokens, _ = question
    keys = _keys(setup)
    batches = [_bounds([n]) for n in (num_tokens, *others)]
    alone = [determine_batch_execution_and_padding(keys, b, force_eager=force_eager) for b in batches]
    synced = min((c.cudagraph_mode for c in alone), key=lambda mode: mode.value)
    padded = [c.descriptor.num_tokens for c in alone]
    counts = tuple(padded if synced is NONE else [max(padded)] * len(padded))
    for rank, bounds in enumerate(batches):
        seen: list[dict[str, Any]] = []

        def coordinate(seen: list[dict[str, Any]] = seen, rank: int = rank, **asked: Any) -> Coordination:
            seen.append(asked)
            return Coordination(synced, num_tokens_across_dp=counts, rank=rank)

        chosen = determine_batch_execution_and_padding(
            keys, bounds, force_eager=force_eager, coordinate=coordinate
        )
        assert [(a["num_tokens"], a["num_tokens_padded"], a["cudagraph_mode"]) for a in seen] == [
            (bounds.num_tokens, padded[rank], alone[rank].cudagraph_mode)
        ]
        assert chosen.cudagraph_mode is synced
        assert chosen.descriptor.num_tokens == counts[rank]
        assert chosen.num_tokens_across_dp == counts


def _bounds(counts: list[int]) -> LayoutBounds:
    return LayoutBounds(len(counts), sum(counts), max(counts), 64)


def test_an_agreement_that_some_rank_can_not_keep_is_named() -> None:
    """Ranks with other sizes than ours: no graph of that mode, or one of another size."""
    keys = dispatch_keys(DispatchConfig((4, 8), 8), PIECEWISE)

    def agree(mode: CUDAGraphMode, count: int) -> BatchExecution:
        coordination = Coordination(mode, num_tokens_across_dp=(count, count), rank=1)
        return determine_batch_execution_and_padding(keys, _bounds([3]), coordinate=lambda **_: coordination)

    assert agree(PIECEWISE, 8).descriptor.num_tokens == 8
    with pytest.raises(DispatchError, match="agreed on 6 tokens in mode PIECEWISE; rank 1 has a graph of 8"):
        agree(PIECEWISE, 6)
    with pytest.raises(DispatchError, match="no captured graph of FULL"):
        agree(FULL, 8)


def test_ranks_without_a_common_count_keep_their_own_choice() -> None:
    """One rank, or none that must agree: the decision stands, the vote on micro-batches is passed on."""
    keys = dispatch_keys(DispatchConfig((4, 8), 8), PIECEWISE)
    chosen = determine_batch_execution_and_padding(
        keys, _bounds([3]), coordinate=lambda **_: Coordination(NONE, should_ubatch=True)
    )
    assert (chosen.cudagraph_mode, chosen.descriptor.num_tokens) == (PIECEWISE, 4)
    assert chosen.should_ubatch


@pytest.mark.parametrize(
    ("config", "mode", "query_len", "message"),
    [
        (DispatchConfig((4, 2), 8), FULL, 1, "2 follows 4"),
        (DispatchConfig((0, 2), 8), FULL, 1, "0 follows 0"),
        (DispatchConfig((2, 2), 8), FULL, 1, "2 follows 2"),
        (DispatchConfig((4, 8), 8, max_capture_size=6), FULL, 1, "size 8 is beyond max_capture_size=6"),
        (DispatchConfig((4, 8), 8, compile_sizes=(4, 5)), FULL, 1, "size 5 would be padded to 8"),
        (
            DispatchConfig((4, 6), 2),
            DECODE_ONLY,
            3,
            "3 tokens would run as 4, and 4 is not a multiple of its 3",
        ),
        (DispatchConfig((3, 4, 6), 2), DECODE_ONLY, 3, "4 tokens would run as 4, and 4 is not a multiple"),
        (
            DispatchConfig((3, 8), 2),
            DECODE_ONLY,
            3,
            "6 tokens would run as 8, and 8 is not a multiple of its 3",
        ),
    ],
)
def test_sizes_that_can_not_work_are_refused(
    config: DispatchConfig, mode: CUDAGraphMode, query_len: int, message: str
) -> None:
    """Out of order, beyond the limit, changed by padding, or not divisible among the requests of a uniform batch."""
    with pytest.raises(CaptureSizeError, match=message):
        dispatch_keys(config, mode, query_len)


def test_compile_sizes_that_padding_leaves_alone_are_accepted() -> None:
    """A compile size is a capture size, or beyond all graphs."""
    dispatch_keys(DispatchConfig((4, 8), 8, compile_sizes=(4, 100)), FULL)


def test_a_question_without_an_answer_is_refused() -> None:
    """No mode left; tokens that do not divide among uniform requests."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 8), DECODE_ONLY, 4)
    with pytest.raises(DispatchError, match="no mode is left for 3 tokens"):
        dispatch(keys, 3, valid_modes={FULL}, invalid_modes={FULL})
    with pytest.raises(DispatchError, match="uniform decode batch of 1 tokens, where every request runs 4"):
        dispatch(keys, 1, uniform_decode=True)
    odd = dispatch_keys(DispatchConfig((4, 9), 8), FULL)
    with pytest.raises(DispatchError, match="5 tokens would run as 9, which do not divide among 2"):
        determine_batch_execution_and_padding(odd, _bounds([5]), sequence_parallel_size=2)
