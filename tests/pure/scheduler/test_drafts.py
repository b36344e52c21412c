"""Drafts in the scheduler: who may have how many, what they cost, and what becomes of counts when they fall."""

from typing import Any

import numpy as np
import pytest

from purestep.pure.errors import InvalidParameterError, InvalidRequestError, SchedulerOutputError
from purestep.pure.records.outputs import DraftTokenIds, StepOutput
from purestep.pure.records.queue import Queue
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.scheduler import (
    abort,
    add,
    check_invariants,
    fork,
    hold,
    make_queue,
    preempt_all,
    schedule,
    set_version,
    take_drafts,
    update,
)
from purestep.pure.scheduler.rows import LINES_PER_PAGE
from tests.laws import assert_pure, digest
from tests.pure.scheduler.toy import Driver, config, counts, request


def drafts(**own: tuple[int, ...]) -> DraftTokenIds:
    return DraftTokenIds(tuple(own), tuple(own.values()))


def told(tokens: list[list[int]], computed: list[int]) -> StepOutput:
    width = max(map(len, tokens))
    padded = [[*own, *[-1] * (width - len(own))] for own in tokens]
    yes = np.ones(len(tokens), np.bool_)
    return StepOutput(np.array(padded, np.int32), np.array(computed, np.int32), yes, ~yes)


def decoding(*lengths: int, max_tokens: int = 20, **changes: Any) -> Queue:
    """Requests a, b, ... with prompts of so many tokens that have said token 5."""
    queue = make_queue(config(**({"num_spec_tokens": 3} | changes)))
    for arrival, (req_id, length) in enumerate(zip("abcd", lengths, strict=False)):
        queue = add(queue, request(req_id, [arrival] * length, max_tokens=max_tokens, arrival=arrival))
    queue, output = schedule(queue)
    assert list(counts(output).values()) == list(lengths)
    queue, _ = update(queue, output.req_ids, told([[5]] * len(lengths), list(lengths)))
    return queue


def step(queue: Queue) -> tuple[Queue, SchedulerOutput]:
    queue, output = schedule(queue)
    check_invariants(queue)
    return queue, output


def test_each_request_runs_its_token_and_its_drafts() -> None:
    queue = assert_pure(take_drafts, decoding(3, 4), drafts(a=(7, 8), b=(9,)))
    queue, output = assert_pure(schedule, queue)
    assert counts(output) == {"a": 3, "b": 2}
    assert output.scheduled_spec_decode_tokens == {"a": (7, 8), "b": (9,)}
    assert output.num_device_drafts is None
    queue, _ = assert_pure(update, queue, output.req_ids, told([[7, 3], [2]], [5, 5]))
    check_invariants(queue)
    running = queue.running.counts
    assert running.num_known.tolist() == running.num_tokens.tolist() == [6, 6]
    assert running.num_computed.tolist() == running.num_settled.tolist() == [5, 5]
    assert counts(step(queue)[1]) == {"a": 1, "b": 1}  # no drafts are left


def test_drafts_take_what_budget_the_known_tokens_leave() -> None:
    """Nobody sits out for the sake of another one's guesses."""
    queue = take_drafts(
        decoding(1, 1, 1, max_num_batched_tokens=5), drafts(a=(7, 8, 9), b=(7, 8, 9), c=(7, 8, 9))
    )
    _, output = step(queue)
    assert counts(output) == {"a": 3, "b": 1, "c": 1}
    assert output.scheduled_spec_decode_tokens == {"a": (7, 8)}


def test_nobody_is_preempted_for_drafts() -> None:
    """If there are no blocks for them, none is verified."""
    queue = decoding(3, 3, num_blocks=(3,), max_tokens=5)
    queue, output = step(take_drafts(queue, drafts(a=(7, 8, 9), b=(7, 8, 9))))
    assert counts(output) == {"a": 1, "b": 1}
    assert not output.preempted_req_ids and not output.scheduled_spec_decode_tokens


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, 0), (3, 1), (4, 2), (5, 3), (9, 3)])
def test_no_token_is_to_lie_beyond_the_limit(max_tokens: int, expected: int) -> None:
    """One was said; the token behind the drafts is the request's too."""
    for on_device in (False, True):
        queue = decoding(3, max_tokens=max_tokens, drafts_on_device=on_device)
        queue = queue if on_device else take_drafts(queue, drafts(a=(7, 8, 9)))
        assert counts(step(queue)[1]) == {"a": 1 + expected}


def test_drafts_of_the_device_are_counted_for_those_that_said_something_in_the_last_step() -> None:
    queue = decoding(3, drafts_on_device=True, max_num_batched_tokens=8)
    queue = add(queue, request("b", [1] * 6, arrival=1))
    queue, output = step(queue)
    assert counts(output) == {"a": 4, "b": 4}  # a prompt in two pieces
    assert output.num_device_drafts is not None and output.num_device_drafts.tolist() == [3, 0]
    queue, _ = update(queue, output.req_ids, told([[5, 5, -1, -1], [-1]], [5, 4]))
    queue, output = step(queue)
    assert counts(output) == {"a": 4, "b": 2}


def test_a_request_keeps_its_drafts_while_it_sits_out_and_loses_them_with_its_blocks() -> None:
    queue = take_drafts(decoding(1, 1, max_num_batched_tokens=2), drafts(a=(7,), b=(8,)))
    queue, output = step(queue)
    assert counts(output) == {"a": 1, "b": 1}
    assert not queue.drafts  # both ran, without them
    queue = take_drafts(queue, drafts(a=(7,), b=(8,), gone=(1,)))
    assert len(queue.drafts) == 2
    assert len(abort(queue, ["a"]).drafts) == 1
    assert not preempt_all(queue).drafts
    assert len(take_drafts(queue, drafts(b=())).drafts) == 1


def test_what_lies_behind_a_stop_is_dropped() -> None:
    """The device knows some stop ids; where it does not, the host cuts, and offers the cache no block of the rest."""
    for waits in (False, True):
        made = config(num_spec_tokens=3, drafts_on_device=True, async_scheduling=waits, block_sizes=(1,))
        queue = make_queue(made)
        queue = add(queue, request("a", [1, 2, 3], stop_token_ids=(4,), min_tokens=3, max_tokens=9))
        queue, output = schedule(queue)
        queue, _ = update(queue, output.req_ids, told([[4]], [3]))
        queue, output = step(queue)
        if (
            waits
        ):  # other parameters: it goes back to the line, and its tokens come when it has no row any more
            queue = set_version(queue, 1)
        queue, finished = update(queue, output.req_ids, told([[6, 4, 4, 2]], [7]))
        assert [(f.token_ids, f.reason, f.stop_reason) for f in finished] == [((4, 6, 4), "stop", 4)]
        check_invariants(queue)


def test_counts_fall_by_what_fell_though_further_steps_are_on_their_way() -> None:
    queue = decoding(3, drafts_on_device=True, async_scheduling=True)
    queue, first = step(queue)
    queue, second = step(queue)
    assert queue.running.counts.num_computed.tolist() == [11]
    assert second.scheduled_cached_reqs.num_computed_tokens.tolist() == [7]
    queue, _ = update(queue, first.req_ids, told([[1, 2, -1, -1]], [5]))
    check_invariants(queue)
    assert queue.running.counts.num_computed.tolist() == [9]
    queue, _ = update(queue, second.req_ids, told([[3, 4, 5, 6]], [9]))
    check_invariants(queue)
    assert queue.running.counts.num_computed.tolist() == queue.running.counts.num_settled.tolist() == [9]
    assert queue.running.counts.num_known.tolist() == [10]


@pytest.mark.parametrize(
    ("tokens", "computed"),
    [([[1, 2, 3, 4, 5]], 8), ([[1, 2]], 6), ([[1, 2]], 4), ([[-1]], 3)],
    ids=["more than drafts", "too far", "not far enough", "none"],
)
def test_an_output_of_another_plan_is_refused(tokens: list[list[int]], computed: int) -> None:
    queue, output = step(decoding(3, drafts_on_device=True))
    with pytest.raises(SchedulerOutputError, match=r"3 of them drafts.*ran another plan"):
        update(queue, output.req_ids, told(tokens, [computed]))


def test_blocks_are_not_shared_while_drafts_are_on_their_way() -> None:
    """It is not known yet which of them are full."""
    queue, output = step(decoding(3, drafts_on_device=True))
    with pytest.raises(InvalidRequestError, match="on their way"):
        fork(queue, "a", "b", arrival=2, stream=None)
    with pytest.raises(InvalidRequestError, match="on their way"):
        hold(queue, "moment")
    queue, _ = update(queue, output.req_ids, told([[1, -1, -1, -1]], [4]))
    assert fork(queue, "a", "b", arrival=2, stream=None).goes_on
    hold(queue, "moment")


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="num_spec_tokens must be"):
        make_queue(config(num_spec_tokens=-1))
    with pytest.raises(InvalidParameterError, match="tokens that are still on their way"):
        make_queue(config(num_spec_tokens=1, async_scheduling=True))
    for changes in ({"num_spec_tokens": 1}, {"drafts_on_device": True}):
        with pytest.raises(InvalidParameterError, match="2 drafts for a request"):
            take_drafts(decoding(3, **changes), drafts(a=(7, 8)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, r"take_drafts\(None\): give DraftTokenIds"),
        ({"a": (7,)}, "give DraftTokenIds"),
        (DraftTokenIds("a", ((7,),)), "drafts for 'a': give a tuple of ids"),
        (DraftTokenIds((["a"],), ((7,),)), "give a tuple of ids"),
        (DraftTokenIds(("a",), 7), r"drafts 7 for \('a',\)"),
        (DraftTokenIds(("a",), ((7,), (8,))), "a tuple of token ids for each request"),
        (DraftTokenIds(("a", "a"), ((7,), (8,))), "name each once"),
        (DraftTokenIds(("a",), (7,)), "request 'a' has drafts 7"),
        (DraftTokenIds(("a",), ("7",)), "request 'a' has drafts '7'"),
        (DraftTokenIds(("a",), ((7.5,),)), r"request 'a' has drafts \(7.5,\)"),
        (DraftTokenIds(("a",), ((-1,),)), r"request 'a' has drafts \(-1,\)"),
        (DraftTokenIds(("a",), ((2**31,),)), "whole numbers from 0 on"),
    ],
)
def test_what_is_no_drafts_is_refused_and_the_queue_is_as_it_was(wrong: Any, message: str) -> None:
    queue = decoding(3)
    before = digest(queue)
    with pytest.raises(InvalidParameterError, match=message):
        take_drafts(queue, wrong)
    assert digest(queue) == before


@pytest.mark.parametrize("is_async", [False, True])
def test_a_long_log_is_turned_with_several_lines_a_step(is_async: bool) -> None:
    """Tokens of a step lie in lines of the log below each other; pages are turned as ever."""
    made = Driver(
        config(
            num_blocks=(400,),
            max_model_len=1600,
            num_spec_tokens=3,
            drafts_on_device=True,
            async_scheduling=is_async,
        )
    )
    made.add(request("a", [1, 2, 3], max_tokens=700))
    made.add(request("b", [2, 3], max_tokens=650))
    num_steps = made.drain(lag=2 if is_async else 0)  # which compares all tokens
    assert num_steps < 500
    assert made.queue.log.num_lines < LINES_PER_PAGE  # 700 tokens of one request took as many lines
