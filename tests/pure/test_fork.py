"""`fork_request`: a second request with another's history; `keep_blocks`: what is given up before it is shared."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.fork import fork_request, keep_blocks
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.rows import free_rows
from purestep.pure.settle import give_up, settle
from purestep.pure.step import step
from purestep.pure.update import update_states
from tests.laws import assert_forked, assert_pure, assert_rows_are_a_partition
from tests.leaves import EMPTY, MODEL, initial
from tests.profiles import examples
from tests.schedules import LIMITS, Schedule, drive, seeds
from tests.tiny import (
    cached_requests,
    decode,
    host_output,
    new_request,
    scheduled,
    settled,
    tiny_llama,
)

BLOCKS = ((1, 2), (1, 2, 3, 4))


def prefilled(*names: str) -> InputBatch:
    """Requests of five tokens, whose prompts are computed and whose first outputs are known."""
    new = [
        new_request(name, (1, 2, 3, 4, 5), tuple(tuple(b + 10 * i for b in ids) for ids in BLOCKS), stream=i)
        for i, name in enumerate(names)
    ]
    return settled(update_states(EMPTY, scheduled(*new, counts=dict.fromkeys(names, 5))), token=7)


@examples(0.5)
@given(seeds, st.integers(0, 2), st.booleans())
def test_a_fork_is_its_parent_under_another_id(rng: Random, lag: int, goes_on: bool) -> None:
    """In any batch, of any request, with steps on their way; it is pure."""
    *_, moment = drive(Schedule(rng), 8, max_unsettled=lag)
    batch = moment.after
    known = [*batch.row_of, *batch.parked]
    if not known or not free_rows(batch):
        return
    parent = rng.choice(known)
    forked = assert_pure(fork_request, batch, parent, "fork", stream=9, goes_on=goes_on)
    assert_rows_are_a_partition(replace(forked, req_ids=batch.req_ids))
    row, own = batch.row_of.get(parent), forked.row_of.get("fork")
    assert (own is not None) == (row is not None and goes_on)
    if row is None or own is None:
        entry = forked.parked["fork"]
        assert (entry.request.req_id, entry.request.stream) == ("fork", 9)
        return
    assert forked.rows.tokens[own] is batch.rows.tokens[row]
    assert all(group[own] is group[row] for group in forked.rows.block_ids)
    for name in ("num_tokens", "num_computed_tokens_bound", "num_computed_tokens_settled", "room"):
        column = getattr(forked.columns, name)
        assert column[own] == column[row], name


def test_its_row_on_the_device_is_copied_and_nothing_of_its_history_is_sent() -> None:
    """Ledger and tokens come from the parent's row, the last token too, which the host does not know."""
    ahead = decode(prefilled("a"), "a")  # its token is not known yet
    forked = fork_request(keep_blocks(ahead, {"a": (1, 3)}), "a", "b", stream=4, goes_on=True)
    cached = replace(
        cached_requests(forked, "a", "b"),
        num_computed_tokens=forked.columns.num_computed_tokens_bound[[0, 1]],
        num_output_tokens=forked.columns.num_tokens[[0, 1]] - 4,
        new_block_ids={"a": ((5,), (6,)), "b": ((7,), (8,))},
    )
    output = replace(scheduled(cached=cached, counts={"a": 1, "b": 1}), block_copies=(((2, 5), (2, 7)), ()))
    batch = update_states(forked, output)
    inbox = plan_step(batch, ahead).inbox
    shape = inbox.shape
    assert (shape.ledger, shape.sampling, shape.tokens, shape.forks) == (0, 1, 0, 1)

    _, params = tiny_llama(groups=(0, 1))
    state = replace(initial(), inbox=plan_step(ahead, EMPTY).inbox.to("cpu"))
    state, told = step(MODEL, params, state, kernels=reference)
    after = assert_pure(absorb, replace(state, inbox=inbox.to("cpu")), kernels=reference)
    assert_forked(after, 0, 1)
    assert after.token_ids[1, 6] == told.sampled_token_ids[0, 0]
    assert not plan_step(batch, batch).inbox.shape.forks

    later = settle(batch, ahead, host_output([11], [6]))
    assert [tape.tolist() for tape in later.rows.tokens[:2]] == [[1, 2, 3, 4, 5, 7, 11]] * 2  # type: ignore[union-attr]
    assert later.columns.num_computed_tokens_settled[:2].tolist() == [6, 6]


def test_a_parked_fork_learns_from_the_steps_of_its_parent_too() -> None:
    ahead = decode(prefilled("a"), "a")
    forked = fork_request(ahead, "a", "b", stream=4, goes_on=False)
    twice = fork_request(forked, "b", "c", stream=5, goes_on=False)
    later = settle(twice, ahead, host_output([11], [6]))
    for name in "bc":
        assert later.parked[name].tokens.tolist() == [1, 2, 3, 4, 5, 7, 11]
        assert later.parked[name].num_computed_tokens == 6
    assert twice.parked["b"].tokens.tolist() == [1, 2, 3, 4, 5, 7]


def test_steps_that_begin_later_are_no_news_of_the_parent() -> None:
    """Nor are those of a device that failed."""
    forked = fork_request(prefilled("a"), "a", "b", stream=4, goes_on=False)
    batch = decode(forked, "a")
    assert settle(batch, batch, host_output([11], [6])).parked["b"].tokens.tolist() == [1, 2, 3, 4, 5, 7]
    assert decode(settle(batch, batch, host_output([11], [6])), "a").forks == ()
    assert forked.forks and not give_up(forked).forks


def test_a_fork_takes_an_id_that_has_ended() -> None:
    batch = prefilled("a", "b")
    forked = fork_request(batch, "a", "b", stream=4, goes_on=True)
    row = forked.row_of["b"]
    request = forked.rows.requests[row]
    assert request is not None and request.stream == 4
    assert forked.rows.tokens[row] is batch.rows.tokens[batch.row_of["a"]]
    assert len(forked.row_of) == 2


def test_a_parent_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(SchedulerOutputError, match="fork of 'x' as 'b': the batch knows 1 requests in rows"):
        fork_request(prefilled("a"), "x", "b", stream=0, goes_on=True)


def test_a_fork_that_goes_on_needs_a_row() -> None:
    batch = prefilled(*"abcd"[: LIMITS.max_num_reqs])
    assert not batch.parked
    with pytest.raises(
        SchedulerOutputError, match="'new' is to go on beside another one, and none of 4 rows is free"
    ):
        fork_request(batch, "a", "new", stream=0, goes_on=True)
    assert "new" in fork_request(batch, "a", "new", stream=0, goes_on=False).parked


def test_blocks_that_are_given_up_are_gone_from_the_end_of_the_lists() -> None:
    batch = prefilled("a", "b")
    parked = update_states(batch, scheduled(cached=cached_requests(batch, "a"), counts={"a": 1}))
    kept = assert_pure(keep_blocks, parked, {"a": (1, 2), "b": (0, 1), "unknown": (1, 1)})
    row = kept.row_of["a"]
    assert [group[row].tolist() for group in kept.rows.block_ids] == [[1], [1, 2]]  # type: ignore[union-attr]
    assert [tape.tolist() for tape in kept.parked["b"].block_ids] == [[], [11]]
    assert kept.columns.room[row] == min(1 * LIMITS.block_sizes[0], 2 * LIMITS.block_sizes[1])
    assert keep_blocks(parked, {}) is parked


def test_a_fork_under_the_id_of_a_request_that_just_ended_runs_in_its_own_row() -> None:
    """The next step is of the same ids in the same order as the last one, and not of the same requests."""
    ahead = decode(prefilled("a", "b"), "a", "b")  # so the row of the one that ended is not free yet
    forked = fork_request(keep_blocks(ahead, {"a": (1, 3)}), "a", "b", stream=4, goes_on=True)
    rows = [forked.row_of["a"], forked.row_of["b"]]
    assert rows == [0, 2]
    cached = cached_requests(
        forked,
        "a",
        "b",
        num_computed_tokens=forked.columns.num_computed_tokens_bound[rows],
        num_output_tokens=forked.columns.num_tokens[rows] - 4,
        new_block_ids={"a": ((5,), (6,)), "b": ((7,), (8,))},
    )
    now = update_states(forked, scheduled(cached=cached, counts={"a": 1, "b": 1}))
    assert now.layout.row_of_index.tolist() == rows
    assert_rows_are_a_partition(replace(now, forks=()))
