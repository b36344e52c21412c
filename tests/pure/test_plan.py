"""`plan_step`: the difference of any two batches, right, composable, and empty when nothing changed."""

from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.layout import Layout
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.update import update_states
from tests.laws import assert_pure, equal
from tests.leaves import (
    EMPTY,
    absorbed,
    assert_admitted,
    assert_layout,
    assert_shared_leaves,
    initial,
    reflecting,
    requests,
)
from tests.profiles import examples
from tests.schedules import LIMITS, Schedule, drive, seeds
from tests.tiny import cached_requests, column, decode, new_request, scheduled, settled


def reached(rng: Random, num_steps: int, max_unsettled: int) -> list[InputBatch]:
    """The batches of a run, before and after each update."""
    batches = [EMPTY]
    for moment in drive(Schedule(rng), num_steps, max_unsettled=max_unsettled):
        batches += [moment.before, moment.after]
    return batches


@examples(0.3)
@given(seeds, st.integers(0, 2))
def test_it_is_legal_between_any_two_batches(rng: Random, lag: int) -> None:
    """Forwards, backwards, with gaps: a state that reflects a, given the plan from a to b, reflects b.

    Rows that hold the same admission in both keep what the device decided.
    """
    batches = reached(rng, 12, lag)
    a, b = rng.choice(batches), rng.choice(batches)
    before = reflecting(a)
    assert_shared_leaves(before, a)
    assert_admitted(before, a, requests(a))
    after = absorbed(before, b, a)
    assert_shared_leaves(after, b)
    new = {row for row, request in requests(b).items() if request is not a.rows.requests[row]}
    assert_admitted(after, b, new)
    kept = sorted(requests(b).keys() - new)
    assert torch.equal(after.ledger.table[:, kept], before.ledger.table[:, kept])
    assert torch.equal(after.token_ids[kept], before.token_ids[kept])
    assert all(x is y for x, y in zip(after.kv, before.kv, strict=True))


@examples(0.2)
@given(seeds, st.integers(0, 2))
def test_plans_compose(rng: Random, lag: int) -> None:
    """The plan from a to c does what those from a to b and from b to c do, for any three batches."""
    batches = reached(rng, 12, lag)
    a, b, c = (rng.choice(batches) for _ in range(3))
    start = reflecting(a)
    for state in (absorbed(start, c, a), absorbed(absorbed(start, b, a), c, b)):
        assert_shared_leaves(state, c)


@examples(0.2)
@given(seeds)
def test_plans_between_steps_in_flight_compose_to_the_last_ledger_entry(rng: Random) -> None:
    """Where nothing was settled in between, ledger rows and tokens agree as well."""
    batches = [moment.after for moment in drive(Schedule(rng), 12, max_unsettled=4)]
    a = rng.choice(batches)
    later = [x for x in batches[batches.index(a) :] if x.clock.num_settled == a.clock.num_settled]
    b, c = later[len(later) // 2], later[-1]
    start = reflecting(a)
    at_once, in_turn = absorbed(start, c, a), absorbed(absorbed(start, b, a), c, b)
    rows = sorted(requests(c))
    assert torch.equal(at_once.ledger.table[:, rows], in_turn.ledger.table[:, rows])
    for row in rows:
        known = len(c.rows.tokens[row])  # type: ignore[arg-type]
        assert torch.equal(at_once.token_ids[row, :known], in_turn.token_ids[row, :known])


@examples(0.1)
@given(seeds, st.integers(0, 2))
def test_it_is_pure(rng: Random, lag: int) -> None:
    """Neither batch changes, and a second call gives the same."""
    batches = reached(rng, 6, lag)
    assert_pure(plan_step, rng.choice(batches), rng.choice(batches))


@examples(0.3)
@given(seeds, st.integers(0, 2))
def test_a_batch_and_itself_differ_by_nothing(rng: Random, lag: int) -> None:
    """Its own block copies are not done a second time either."""
    batch = replace(rng.choice(reached(rng, 6, lag)), block_copies=(((1, 2),), ()), blocks_to_zero=((3,), ()))
    inbox = plan_step(batch, batch).inbox
    assert inbox.is_empty and not len(inbox.data)


def steady(num_steps: int = 3) -> list[InputBatch]:
    """Batches of two requests that decode, blocks enough, each settled before the next step."""
    blocks = [(tuple(range(1 + 6 * i, 7 + 6 * i)), tuple(range(1 + 12 * i, 12 + 12 * i))) for i in range(2)]
    new = [new_request(name, (1, 2, 3), blocks[i]) for i, name in enumerate("ab")]
    batches = [update_states(EMPTY, scheduled(*new, counts={"a": 3, "b": 3}))]
    for _ in range(num_steps):
        batches.append(decode(settled(batches[-1]), "a", "b"))
    return batches


def test_steady_decode_uploads_nothing() -> None:
    """While requests decode in the rows and blocks they have, the plan is empty."""
    first, layout_changed, *rest = steady()
    inbox = plan_step(layout_changed, first).inbox
    assert (inbox.shape.layout, inbox.shape.ledger, len(inbox.data)) == (2, 0, 5)
    for base, batch in zip([layout_changed, *rest], rest, strict=False):
        assert plan_step(batch, base).inbox.is_empty


def test_a_grown_table_is_all_that_is_sent() -> None:
    """One row got a block in one group: one entry goes out, and what the row has room for now."""
    base = steady()[-1]
    batch = decode(settled(base), "a", "b", new_block_ids={"b": ((), (40,))})
    inbox = plan_step(batch, base).inbox
    assert (inbox.shape.rooms, inbox.shape.blocks) == (1, (0, 1))
    assert inbox.data.tolist() == [batch.row_of["b"], 24, batch.row_of["b"], 11, 40]
    assert inbox.bounds is None


def test_blocks_beyond_the_longest_request_are_not_sent() -> None:
    """They have no place in the device's tables, and no token could use them."""
    base = steady()[-1]
    batch = decode(settled(base), "a", "b", new_block_ids={"b": ((), (40, 41, 42))})
    inbox = plan_step(batch, base).inbox
    assert inbox.data.tolist() == [batch.row_of["b"], 24, batch.row_of["b"], 11, 40]


def test_a_bound_that_grew_is_structure_and_no_words() -> None:
    """Crossing a bucket changes the shapes that kernels may use, and uploads nothing."""
    limits = replace(LIMITS, max_model_len=128, block_sizes=(4,), num_blocks=(64,))
    blocks = (tuple(range(1, 33)),)
    new = new_request("a", (1,) * 64, blocks, SamplingParams(temperature=0, max_tokens=None))
    batches = [update_states(InputBatch.make_empty(limits), scheduled(new, counts={"a": 64}))]
    inboxes = []
    for _ in range(10):
        batches.append(decode(settled(batches[-1]), "a"))
        inboxes.append(plan_step(batches[-1], batches[-2]).inbox)
    assert [len(inbox.data) for inbox in inboxes] == [3] + [0] * 9
    assert [inbox.is_empty for inbox in inboxes] == [False] + [True] * 7 + [False, True]
    assert inboxes[8].bounds == replace(batches[1].layout.bounds, max_seq_len=80)


def test_the_plan_to_an_empty_batch_empties_the_layout() -> None:
    """When everybody left, nothing runs; and from there to somebody again."""
    first = steady(0)[0]
    nobody = update_states(first, SchedulerOutput.make_empty(frozenset({"a", "b"})))
    state = absorbed(reflecting(first), nobody, first)
    assert_layout(state, nobody)
    assert_shared_leaves(absorbed(state, first, nobody), first)
    assert_layout(absorbed(initial(), EMPTY, EMPTY), EMPTY)


def test_a_request_without_room_is_not_active() -> None:
    """Tokens up to the limit and beyond leave nothing to do: a row admitted with them runs idle."""
    params = SamplingParams(temperature=0, max_tokens=2)
    new = new_request("a", (1, 2, 3), ((1,), (1, 2)), params)
    second = decode(settled(update_states(EMPTY, scheduled(new, counts={"a": 3}))), "a")
    known = settled(second)
    parked = update_states(known, SchedulerOutput.make_empty())
    entry = replace(
        cached_requests(known, "a"),
        resumed_req_ids=frozenset({"a"}),
        num_computed_tokens=column(0),
        new_block_ids={"a": ((1, 2), (1, 2, 3))},
    )
    back = update_states(parked, scheduled(cached=entry, counts={"a": 5}))
    assert not reflecting(back).ledger.active[back.row_of["a"]]
    assert reflecting(second).ledger.active[second.row_of["a"]]


def test_block_copies_and_zeroings_are_the_steps_own() -> None:
    """They go out with the batch that they came with, and not with the next one."""
    base = steady()[-1]
    known = settled(base)
    output = scheduled(cached=cached_requests(known, "a", "b"), counts={"a": 1, "b": 1})
    copies, zeros = (((1, 30), (2, 31)), ()), ((), (50,))
    for own, sizes in (
        ({"block_copies": copies}, ((2, 0), ())),
        ({"new_block_ids_to_zero": zeros}, ((), (0, 1))),
    ):
        batch = update_states(known, replace(output, **own))
        shape = plan_step(batch, base).inbox.shape
        assert (shape.copies, shape.zeros) == sizes
        plan = plan_step(decode(settled(batch), "a", "b"), batch)
        assert plan.inbox.is_empty
        assert plan.base is batch


def test_sampling_rows_are_sent_only_when_they_change() -> None:
    """A roll-back rewrites the ledger row and leaves the sampling row alone."""
    known = settled(steady(1)[1])
    counts = {"num_computed_tokens": column(2, 4), "num_output_tokens": column(0, 2)}
    shape = plan_step(decode(known, "a", "b", **counts), known).inbox.shape
    assert (shape.ledger, shape.sampling, shape.tokens) == (1, 0, 0)


def test_padded_layouts_are_planned_like_any_other() -> None:
    """A batch whose layout was padded with the null row reaches the device as it is."""
    first = steady(0)[0]
    layout = first.layout
    padded = Layout(
        np.append(layout.row_of_index, np.int32(LIMITS.null_row)),
        np.append(layout.query_start_loc, layout.query_start_loc[-1]),
        replace(layout.bounds, num_reqs=3, num_tokens=8),
    )
    batch = replace(first, layout=padded)
    assert_layout(reflecting(batch), batch)
    assert equal(reflecting(batch).block_tables, reflecting(first).block_tables)


def test_limits_of_another_seed_reach_the_sampling_row() -> None:
    """Requests without a seed use the engine's."""
    limits = BatchLimits(2, 16, 16, (4,), (9,))
    new = scheduled(new_request("a", (1,), ((1,),), SamplingParams(temperature=1)), counts={"a": 1})
    empty = [InputBatch.make_empty(replace(limits, seed=seed)) for seed in (77, 78)]
    words = [plan_step(update_states(batch, new), batch).inbox.data for batch in empty]
    assert (words[0] != words[1]).sum() == 1
