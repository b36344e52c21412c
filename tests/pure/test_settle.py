"""`settle`: what the device did, told to the host late, in order, and by request."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.scheduler_output import CachedRequestData
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from tests.laws import assert_pure
from tests.lives import toy_token
from tests.profiles import examples
from tests.schedules import DRAFTED, Schedule, drive, seeds
from tests.schedules import LIMITS as LIMITS_OF_ALL
from tests.tiny import column, decode, host_output, new_request, scheduled

LIMITS = BatchLimits(max_num_reqs=2, max_model_len=16, vocab_size=8, block_sizes=(4,), num_blocks=(20,))


@examples(0.5)
@given(seeds, st.integers(0, 3), st.sampled_from([LIMITS_OF_ALL, DRAFTED]))
def test_laws_of_any_legal_schedule(rng: Random, lag: int, limits: BatchLimits) -> None:
    """The laws below, with 0 to 3 steps begun before the outputs of those before them are known, and drafts or none."""
    schedule, begun = Schedule(rng, limits), list[InputBatch]()
    for moment in drive(schedule, 25, max_unsettled=lag):  # which checks settled <= truth <= bound
        clock = moment.before.clock
        assert_tokens_as_if_alone(schedule, moment.after)
        assert_order_of_counts(moment.after)
        assert_rows_are_not_given_away(moment.after, begun[clock.num_settled : clock.num_begun])
        begun += [moment.after] if moment.output.req_ids else []


def assert_tokens_as_if_alone(schedule: Schedule, batch: InputBatch) -> None:
    """Every request has the tokens that it gets alone, one settled step at a time."""
    held = {r: batch.rows.tokens[row] for r, row in batch.row_of.items()}
    held |= {r: entry.tokens for r, entry in batch.parked.items()}
    for req_id, tape in held.items():
        tokens, alone = tape.tolist(), list(schedule.lives[req_id].prompt)  # type: ignore[union-attr]
        while len(alone) < len(tokens):
            alone.append(toy_token(req_id, alone, schedule.limits.vocab_size))
        assert tokens == alone


def assert_order_of_counts(batch: InputBatch) -> None:
    """settled <= bound <= room, and a token is known before it is settled."""
    columns, rows = batch.columns, list(batch.row_of.values())
    assert (columns.num_computed_tokens_settled[rows] <= columns.num_computed_tokens_bound[rows]).all()
    assert (columns.num_computed_tokens_settled[rows] < columns.num_tokens[rows]).all()
    assert (columns.num_computed_tokens_bound[rows] <= columns.room[rows]).all()


def assert_rows_are_not_given_away(batch: InputBatch, in_flight: list[InputBatch]) -> None:
    """A row that an unsettled step names is free or still that request's."""
    for begun in in_flight:
        for req_id, row in zip(begun.req_ids, begun.layout.row_of_index.tolist(), strict=True):
            now = batch.rows.requests[row]
            assert now is None or now.req_id == req_id


@examples(0.1)
@given(seeds, st.integers(0, 2))
def test_it_is_pure(rng: Random, lag: int) -> None:
    """Neither batch nor output changes, and a second call gives the same."""

    def settle_purely(batch: InputBatch, stepped: InputBatch, output: StepOutput) -> InputBatch:
        return assert_pure(settle, batch, stepped, output)

    for _ in drive(Schedule(rng, DRAFTED), 10, max_unsettled=lag, settle=settle_purely):
        pass


def test_padding_behind_the_batch_is_ignored() -> None:
    """An output padded to the shape of a graph means the same."""
    batch = two()
    padded = host_output([5, 6, 9, -1], [3, 3, 7, 0])
    assert_same(settle(batch, batch, padded), settle(batch, batch, host_output([5, 6], [3, 3])))


def test_who_finished_meanwhile_is_left_alone() -> None:
    """The step of a and b is known after a has finished: b gets its token, a is gone."""
    begun = two()
    cached = CachedRequestData(("b",), column(3), column(1))
    now = update_states(begun, scheduled(cached=cached, counts={"b": 1}, finished=("a",)))
    known = settle(now, begun, host_output([5, 6], [3, 3]))
    assert tokens(known) == {"b": [1, 2, 3, 6]}
    assert known.columns.num_tokens.tolist() == [3, 4]  # a's old row keeps its number until it is used again


def test_who_was_parked_meanwhile_gets_its_token() -> None:
    """The step of a and b is known after a was preempted: its token is kept for its return."""
    begun = two()
    cached = CachedRequestData(("b",), column(3), column(1))
    output = replace(scheduled(cached=cached, counts={"b": 1}), preempted_req_ids=frozenset("a"))
    now = update_states(begun, output)
    assert now.parked["a"].num_computed_tokens == 0
    known = settle(now, begun, host_output([5, 6], [3, 3]))
    assert known.parked["a"].tokens.tolist() == [1, 2, 3, 5]
    assert known.parked["a"].num_computed_tokens == 3
    assert tokens(known) == {"b": [1, 2, 3, 6]}


def test_who_was_admitted_anew_meanwhile_does_not() -> None:
    """The step of a is known after a was finished and submitted again under the same id: the token is not its own."""
    begun = update_states(
        InputBatch.make_empty(LIMITS), scheduled(new_request("a", (1, 2, 3), ((1,),)), counts={"a": 3})
    )
    again = new_request("a", (4, 4), ((2,),))
    now = update_states(begun, scheduled(again, counts={"a": 2}, finished=("a",)))
    assert now.row_of["a"] != begun.row_of["a"]
    known = settle(now, begun, host_output([5], [3]))
    assert tokens(known) == {"a": [4, 4]}
    assert known.columns.num_computed_tokens_settled[known.row_of["a"]] == 0
    assert tokens(settle(known, now, host_output([7], [2]))) == {"a": [4, 4, 7]}


def test_who_was_rolled_back_meanwhile_does_not() -> None:
    """The scheduler takes a back while its step is in flight: it computes anew, and that step's token is dropped."""
    begun = two()
    first = settle(begun, begun, host_output([5, 6], [3, 3]))
    ahead = decode(first, "a", "b")
    back = CachedRequestData(("a", "b"), column(1, 4), column(1, 2), new_block_ids={"b": ((5,),)})
    now = update_states(ahead, scheduled(cached=back, counts={"a": 3, "b": 1}))
    assert now.row_of == begun.row_of
    known = settle(now, ahead, host_output([7, 0], [4, 4]))
    assert tokens(known) == {"a": [1, 2, 3, 5], "b": [1, 2, 3, 6, 0]}
    assert known.columns.num_computed_tokens_settled.tolist() == [1, 4]


def test_a_row_is_free_once_the_steps_that_name_it_are_settled() -> None:
    """Two rows, both given up while their step is in flight: nobody else gets in before it is known."""
    begun = two()
    gone = update_states(begun, scheduled(counts={}, finished=("a", "b")))
    new = scheduled(new_request("c", (1,), ((3,),)), counts={"c": 1})
    with pytest.raises(SchedulerOutputError, match=r"0 of 2 rows are free \(1 steps are unsettled"):
        update_states(gone, new)
    known = settle(gone, begun, host_output([5, 6], [3, 3]))
    assert update_states(known, new).row_of == {"c": 0}


def test_an_unfinished_prefill_keeps_nothing() -> None:
    """Its computed tokens are settled and its tokens stay."""
    new = new_request("a", (1, 2, 3), ((1,),))
    begun = update_states(InputBatch.make_empty(LIMITS), scheduled(new, counts={"a": 2}))
    known = settle(begun, begun, host_output([-1], [2]))
    assert tokens(known) == {"a": [1, 2, 3]}
    assert known.columns.num_computed_tokens_settled.tolist() == [2, 0]
    assert known.rows.requests is begun.rows.requests
    assert known.layout is begun.layout


def test_old_batches_keep_their_tokens() -> None:
    """Both branches of a fork are right: tapes are values."""
    begun = two()
    one, other = (
        settle(begun, begun, host_output([5, 6], [3, 3])),
        settle(begun, begun, host_output([7, 1], [3, 3])),
    )
    assert tokens(begun) == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert tokens(one) == {"a": [1, 2, 3, 5], "b": [1, 2, 3, 6]}
    assert tokens(other) == {"a": [1, 2, 3, 7], "b": [1, 2, 3, 1]}


def test_two_steps_in_flight_are_settled_in_order() -> None:
    """The same batch as if each step had been settled before the next was begun."""
    first = two()
    ahead = update_states(
        first,
        scheduled(cached=CachedRequestData(("a", "b"), column(3, 3), column(1, 1)), counts={"a": 1, "b": 1}),
    )
    late = settle(settle(ahead, first, host_output([5, 6], [3, 3])), ahead, host_output([7, 0], [4, 4]))
    known = settle(first, first, host_output([5, 6], [3, 3]))
    second = decode(known, "a", "b")
    in_turn = settle(second, second, host_output([7, 0], [4, 4]))
    assert_same(late, in_turn)


def two() -> InputBatch:
    """Requests a and b, whose prefill was begun."""
    new = [new_request(name, (1, 2, 3), ((i + 1,),)) for i, name in enumerate("ab")]
    return update_states(InputBatch.make_empty(LIMITS), scheduled(*new, counts={"a": 3, "b": 3}))


def tokens(batch: InputBatch) -> dict[str, list[int]]:
    """Tokens of the requests that have rows."""
    return {r: batch.rows.tokens[row].tolist() for r, row in batch.row_of.items()}  # type: ignore[union-attr]


def assert_same(a: InputBatch, b: InputBatch) -> None:
    """The same tokens and counts."""
    assert tokens(a) == tokens(b)
    assert a.clock == b.clock
    for name in ("num_tokens", "num_computed_tokens_settled", "num_computed_tokens_bound", "room"):
        assert getattr(a.columns, name).tolist() == getattr(b.columns, name).tolist()


@pytest.mark.parametrize("name", ["sampled_token_ids", "num_computed_tokens", "active", "has_nan"])
def test_a_column_that_is_too_short_is_refused(name: str, unchecked_records: None) -> None:
    """By name, and not by an index that is out of range."""
    new = new_request("a", (1, 2, 3), ((1,),))
    batch = update_states(InputBatch.make_empty(LIMITS), scheduled(new, counts={"a": 3}))
    right = host_output([5], [3])
    with pytest.raises(SchedulerOutputError, match=r"an output of 1 requests has .* at least 1 entries"):
        settle(batch, batch, replace(right, **{name: getattr(right, name)[:0]}))
