"""Drafts in the batch: how they are sent, what bounds they move, which of them are refused."""

from typing import Any

import numpy as np
import pytest
import torch

from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.initial import initial_state
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.records.state import StepState
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from tests.laws import digest
from tests.tiny import cached_requests, column, new_request, scheduled, settled, tiny_llama

LIMITS = BatchLimits(
    max_num_reqs=2, max_model_len=16, vocab_size=16, block_sizes=(4,), num_blocks=(20,), num_drafts=3
)
MODEL, _ = tiny_llama()
EMPTY = InputBatch.make_empty(LIMITS)


def two() -> InputBatch:
    """Requests a and b with three tokens of prompt and one output, blocks enough."""
    new = [new_request(name, (1, 2, 3), (tuple(range(1 + 4 * i, 5 + 4 * i)),)) for i, name in enumerate("ab")]
    return settled(update_states(EMPTY, scheduled(*new, counts={"a": 3, "b": 3})))


def decode_with(batch: InputBatch, counts: dict[str, int], **drafts: Any) -> SchedulerOutput:
    output = scheduled(cached=cached_requests(batch, *counts), counts=counts)
    return replace(output, **drafts)


def told(tokens: list[list[int]], computed: list[int]) -> StepOutput:
    yes = np.ones(len(tokens), np.bool_)
    return StepOutput(np.array(tokens, np.int32), column(*computed), yes, ~yes)


def absorbed(state: StepState, batch: InputBatch, base: InputBatch) -> StepState:
    return absorb(replace(state, inbox=plan_step(batch, base).inbox.to("cpu")), kernels=reference)


def drafts_of(state: StepState, batch: InputBatch, req_id: str) -> list[int]:
    assert state.ledger.drafts is not None
    return state.ledger.drafts[batch.row_of[req_id]].tolist()  # type: ignore[no-any-return]


def test_drafts_are_the_steps_own() -> None:
    """They go out with their step, up to the first -1; the next one sends none."""
    base = two()
    given = {"a": (7, 8, -1), "b": (-1, -1)}
    batch = update_states(base, decode_with(base, {"a": 4, "b": 3}, scheduled_spec_decode_tokens=given))
    state = absorbed(absorbed(initial_state(MODEL, LIMITS), base, EMPTY), batch, base)
    assert drafts_of(state, batch, "a") == [7, 8, -1]
    assert drafts_of(state, batch, "b") == [-1, -1, -1]
    assert state.layout.bounds.num_drafts == 3
    known = settle(batch, batch, told([[7, 5, -1, -1], [5, -1, -1, -1]], [5, 4]))
    after = update_states(known, decode_with(known, {"a": 1, "b": 1}))
    assert plan_step(after, batch).inbox.shape.drafts == 0
    assert after.layout.bounds.num_drafts == 0


def test_drafts_are_sent_though_nothing_else_has_changed() -> None:
    """As many of them as in the step before, in the same rows."""
    known, last = two(), EMPTY
    for tokens in ((7, 8), (9, 10)):
        output = decode_with(known, {"a": 3, "b": 1}, scheduled_spec_decode_tokens={"a": tokens})
        batch = update_states(known, output)
        inbox = plan_step(batch, last).inbox
        assert inbox.shape.drafts == 2
        assert inbox.data[-6:].tolist() == [0, 0, tokens[0], 0, 1, tokens[1]]
        computed = batch.columns.num_computed_tokens_settled[[0, 1]] + 1
        known, last = settle(batch, batch, told([[5, -1, -1, -1]] * 2, computed.tolist())), batch
    assert inbox.shape.layout is None


def test_drafts_that_the_device_has_are_counted_and_not_sent() -> None:
    """A steady batch that verifies them uploads nothing."""
    base = two()
    batches = [base]
    for _ in range(2):
        output = decode_with(batches[-1], {"a": 4, "b": 4}, num_device_drafts=column(3, 3))
        batches.append(update_states(batches[-1], output))
        computed = batches[-1].columns.num_computed_tokens_settled[[0, 1]] + 1
        batches.append(settle(batches[-1], batches[-1], told([[5, -1, -1, -1]] * 2, computed.tolist())))
    first, second = batches[1], batches[3]
    assert first.layout.bounds.num_drafts == 3
    assert second.layout is first.layout
    assert plan_step(second, first).inbox.is_empty


def test_what_fell_lowers_the_bound_of_steps_that_have_begun_since() -> None:
    """Two steps on their way: each outcome takes back what that step, and no other, got on less than it might have."""
    base = two()
    first = update_states(base, decode_with(base, {"a": 4, "b": 4}, num_device_drafts=column(3, 3)))
    assert first.columns.num_computed_tokens_bound.tolist() == [7, 7]
    cached = cached_requests(
        first, "a", "b", num_computed_tokens=column(7, 7), num_output_tokens=column(5, 5)
    )
    ahead = replace(scheduled(cached=cached, counts={"a": 4, "b": 4}), num_device_drafts=column(3, 3))
    second = update_states(first, ahead)
    assert second.columns.num_computed_tokens_bound.tolist() == [11, 11]
    known = settle(second, first, told([[5, -1, -1, -1], [5, 6, 7, 8]], [4, 7]))
    assert known.columns.num_computed_tokens_bound.tolist() == [8, 11]
    assert known.columns.num_computed_tokens_settled.tolist() == [4, 7]
    both = settle(known, second, told([[5, 6, -1, -1], [9, -1, -1, -1]], [6, 8]))
    assert both.columns.num_computed_tokens_bound.tolist() == [6, 8]
    assert both.columns.num_computed_tokens_settled.tolist() == [6, 8]
    assert [tape.tolist() for tape in both.rows.tokens if tape] == [
        [1, 2, 3, 5, 5, 5, 6],
        [1, 2, 3, 5, 5, 6, 7, 8, 9],
    ]


REFUSED: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "of a stranger": ({"a": 2}, {"scheduled_spec_decode_tokens": {"b": (7,)}}, "request 'b' has drafts"),
    "too many": ({"a": 5}, {"scheduled_spec_decode_tokens": {"a": (7,) * 4}}, "up to num_drafts=3"),
    "and no token before": ({"a": 1}, {"scheduled_spec_decode_tokens": {"a": (7,)}}, "follow a token"),
    "outside the vocabulary": ({"a": 2}, {"scheduled_spec_decode_tokens": {"a": (16,)}}, "ids from 0 to 15"),
    "below -1": ({"a": 2}, {"scheduled_spec_decode_tokens": {"a": (-2,)}}, "ids from 0 to 15"),
    "behind a gap": ({"a": 3}, {"scheduled_spec_decode_tokens": {"a": (7,)}}, r"\(1 of them drafts\)"),
    "in two ways": (
        {"a": 2},
        {"scheduled_spec_decode_tokens": {"a": (7,)}, "num_device_drafts": column(1)},
        "give one of them",
    ),
    "fewer than none": ({"a": 2}, {"num_device_drafts": column(-1)}, "-1 of 2 scheduled tokens"),
    "words": (
        {"a": 2},
        {"scheduled_spec_decode_tokens": {"a": ("x",)}},
        r"'a' has drafts \('x',\): ids are text",
    ),
    "no whole numbers": (
        {"a": 2},
        {"scheduled_spec_decode_tokens": {"a": (7.0,)}},
        r"drafts \(7.0,\): ids are",
    ),
    "one for a tuple": (
        {"a": 2},
        {"scheduled_spec_decode_tokens": {"a": 7}},
        "'a' has drafts 7: ids are text",
    ),
    "none": ({"a": 2}, {"scheduled_spec_decode_tokens": {"a": None}}, "'a' has drafts None: ids are text"),
    "of no id": ({"a": 2}, {"scheduled_spec_decode_tokens": {3: (7,)}}, "request 3 has drafts"),
    "no mapping": (
        {"a": 2},
        {"scheduled_spec_decode_tokens": [("a", (7,))]},
        "give a mapping of request ids",
    ),
    "a list of counts": ({"a": 2}, {"num_device_drafts": [1]}, r"num_device_drafts=\[1\] for 1 scheduled"),
    "counts too many": (
        {"a": 2},
        {"num_device_drafts": column(1, 1)},
        "for 1 scheduled requests: give an array",
    ),
    "halves of drafts": ({"a": 2}, {"num_device_drafts": np.array([0.5])}, "give an array of whole numbers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_drafts_that_can_not_be_are_refused_and_nothing_changes(kind: str, unchecked_records: None) -> None:
    counts, drafts, message = REFUSED[kind]
    base = two()
    before = digest(base)
    with pytest.raises(SchedulerOutputError, match=message):
        update_states(base, decode_with(base, counts, **drafts))
    assert digest(base) == before


def test_drafts_beyond_the_longest_length_are_refused() -> None:
    new = new_request("a", (1,) * 13, ((1, 2, 3, 4, 5),))
    base = settled(update_states(EMPTY, scheduled(new, counts={"a": 13})))
    update_states(base, decode_with(base, {"a": 3}, num_device_drafts=column(2)))
    with pytest.raises(SchedulerOutputError, match="max_model_len is 16"):
        update_states(base, decode_with(base, {"a": 4}, num_device_drafts=column(3)))


def test_a_batch_without_places_for_drafts_takes_none() -> None:
    plain = InputBatch.make_empty(replace(LIMITS, num_drafts=0))
    new = new_request("a", (1, 2, 3), ((1, 2),))
    base = settled(update_states(plain, scheduled(new, counts={"a": 3})))
    with pytest.raises(SchedulerOutputError, match="up to num_drafts=0"):
        update_states(base, decode_with(base, {"a": 2}, scheduled_spec_decode_tokens={"a": (7,)}))


def test_who_was_left_out_comes_back_with_drafts() -> None:
    """Its row is written anew, without drafts, and then those are put there."""
    base = two()
    left_out = update_states(base, decode_with(base, {"a": 1}))
    known = settle(left_out, left_out, told([[5]], [4]))
    assert known.parked.keys() == {"b"}
    cached = cached_requests(known, "a")
    both = replace(
        cached,
        req_ids=("a", "b"),
        num_computed_tokens=column(4, 3),
        num_output_tokens=column(2, 1),
    )
    output = replace(
        scheduled(cached=both, counts={"a": 1, "b": 3}), scheduled_spec_decode_tokens={"b": (7, 8)}
    )
    back = update_states(known, output)
    state = absorbed(absorbed(initial_state(MODEL, LIMITS), left_out, EMPTY), back, left_out)
    assert drafts_of(state, back, "b") == [7, 8, -1]
    assert torch.equal(state.layout.query_start_loc, torch.tensor([0, 1, 4], dtype=torch.int32))
