"""`update`: what the device learnt in a step, taken into the queue."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from purestep.pure.arrays import frozen
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import record, replace
from purestep.pure.records.outputs import StepOutput, host_columns
from purestep.pure.records.queue import (
    Finished,
    FinishReason,
    Queue,
    RequestState,
    RunningCounts,
    StepInFlight,
)
from purestep.pure.scheduler.lifecycle import end
from purestep.pure.scheduler.memory import leave, offer_settled
from purestep.pure.scheduler.rows import length_limit, rows_of, stepped, turn_page, with_line

Stop = tuple[FinishReason, int | None]


@record
class Learnt:
    """What a step says of each of the requests that it ran."""

    token: Int[np.ndarray, " reqs"]  # -1: none kept
    num_computed: Int[np.ndarray, " reqs"]
    has_nan: Bool[np.ndarray, " reqs"]


def update(queue: Queue, req_ids: tuple[str, ...], output: StepOutput) -> tuple[Queue, tuple[Finished, ...]]:
    """The queue with the tokens of the oldest step in flight, and the requests that end with it.

    A request ends with a stop id once it has `min_tokens` outputs, at its length limit, and, as an error, where its
    logits were NaN: then none of its blocks stays in the prefix cache. Full blocks below the settled length are offered
    to the cache while the prompt is computed, those of outputs when the request leaves. What is said about requests
    that have ended since is dropped. Entries of `output`, on the host, are in the order of `req_ids`; padding behind
    them is ignored.

    Raises:
        SchedulerOutputError: an output of another step than the oldest in flight, of other lengths, or one that has a
            token where the step samples none, none where it does, or other counts than were scheduled.
    Source: vllm/v1/core/sched/scheduler.py update_from_output; vllm/v1/core/sched/utils.py check_stop.
    """
    step = _oldest(queue, req_ids)
    told = host_columns(output, len(req_ids))
    learnt = Learnt(*(told if step.entry is None else [column[step.entry] for column in told]))
    _check(queue, step, learnt)
    finished: tuple[Finished, ...] = ()
    if step.ticket is not queue.running.facts.ticket:
        rows = rows_of(queue.running, step.ticket)
        if (rows < 0).any():
            queue, finished = _settle_waiting(queue, step, learnt, rows)
        learnt = _spread(queue, learnt, rows)
    queue, ended = _settle_running(queue, learnt)
    return queue, finished + ended


def _oldest(queue: Queue, req_ids: tuple[str, ...]) -> StepInFlight:
    expected = queue.in_flight[0].req_ids if queue.in_flight else None
    if expected is None or (req_ids is not expected and req_ids != expected):
        raise SchedulerOutputError(
            f"an output of requests {req_ids} was given, and "
            + ("no step is in flight" if expected is None else f"the oldest step in flight is of {expected}")
            + ": give outputs in the order of schedule's, each once, and none for empty ones"
        )
    return queue.in_flight[0]


def _check(queue: Queue, step: StepInFlight, learnt: Learnt) -> None:
    """What the device did is what was scheduled, for requests that are still there."""
    wrong = ((learnt.token >= 0) != step.samples) | (learnt.num_computed != step.num_computed)
    wrong &= ~learnt.has_nan
    if not wrong.any():
        return
    rows = rows_of(queue.running, step.ticket)
    for index in np.flatnonzero(wrong).tolist():
        if rows[index] >= 0 or int(step.ticket[index]) in queue.waiting.states:
            entry = index if step.entry is None else int(step.entry[index])
            raise SchedulerOutputError(
                f"request {step.req_ids[entry]!r}: the step leaves {step.num_computed[index]} tokens computed and "
                f"{'a' if step.samples[index] else 'no'} token sampled; the output says "
                f"{learnt.num_computed[index]} and {learnt.token[index]} (-1: none): the device ran another plan"
            )


def _spread(queue: Queue, learnt: Learnt, rows: NDArray[np.int64]) -> Learnt:
    """The same in the order of the running rows; rows that the step did not run learn nothing."""
    num_rows, here = len(queue.running), rows >= 0
    token, has_nan = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.bool_)
    num_computed = queue.running.counts.num_settled.copy()
    token[rows[here]] = learnt.token[here]
    has_nan[rows[here]] = learnt.has_nan[here]
    num_computed[rows[here]] = learnt.num_computed[here]
    return Learnt(token, num_computed, has_nan)


def _settle_running(queue: Queue, learnt: Learnt) -> tuple[Queue, tuple[Finished, ...]]:
    """The queue with the rows' tokens and counts, without those that end."""
    running, counts = queue.running, queue.running.counts
    sampled = learnt.token >= 0
    num_known = frozen(counts.num_known + sampled)
    num_settled = frozen(learnt.num_computed.astype(np.int32))
    done = learnt.has_nan | (sampled & (num_known >= running.facts.length_limit))
    hits = learnt.token[running.stop_rows] == running.stop_ids
    if hits.any():
        rows = running.stop_rows[hits]
        done[rows[num_known[rows] >= running.facts.min_length[rows]]] = True
    to_offer = (num_settled >= counts.next_offer) & ~learnt.has_nan
    counts = RunningCounts(
        num_tokens=counts.num_tokens,
        num_known=num_known,
        num_computed=counts.num_computed,
        num_settled=num_settled,
        num_covered=counts.num_covered,
        next_offer=counts.next_offer,
        ran=counts.ran,
    )
    log = with_line(queue, learnt.token) if len(running) else queue.log
    queue = turn_page(stepped(queue, counts, log=log, in_flight=queue.in_flight[1:]))
    if not (done | to_offer).any():
        return queue, ()
    queue = offer_settled(queue, np.flatnonzero(to_offer).tolist())
    return _end_rows(queue, learnt, np.flatnonzero(done).tolist())


def _end_rows(queue: Queue, learnt: Learnt, rows: Sequence[int]) -> tuple[Queue, tuple[Finished, ...]]:
    poisoned = [row for row in rows if learnt.has_nan[row]]
    queue, states = leave(queue, rows, poisoned)
    finished: list[Finished] = []
    for row, state in zip(rows, states, strict=True):
        stop: Stop | None = ("error", None) if row in poisoned else _stop(queue, state)
        assert stop is not None, "a row was found to end, and its request does not"
        queue, ended = end(queue, state, *stop)
        finished.append(ended)
    return queue, tuple(finished)


def _settle_waiting(
    queue: Queue, step: StepInFlight, learnt: Learnt, rows: NDArray[np.int64]
) -> tuple[Queue, tuple[Finished, ...]]:
    """The queue with the tokens of requests that were preempted while the step was under way."""
    finished: list[Finished] = []
    for index in np.flatnonzero(rows < 0).tolist():
        state = queue.waiting.states.get(int(step.ticket[index]))
        if state is None:
            continue
        token = int(learnt.token[index])
        state = replace(
            state,
            tokens=state.tokens if token < 0 else state.tokens.append(token),
            num_in_flight=state.num_in_flight - 1,
        )
        states = queue.waiting.states.with_items([(state.ticket, state)])
        queue = replace(queue, waiting=replace(queue.waiting, states=states))
        stop: Stop | None = (
            ("error", None) if learnt.has_nan[index] else _stop(queue, state) if token >= 0 else None
        )
        if stop is not None:
            queue, ended = end(queue, state, *stop)
            finished.append(ended)
    return queue, tuple(finished)


def _stop(queue: Queue, state: RequestState) -> Stop | None:
    """Whether and why a request ends with its last token: end of sequence before stop ids before length."""
    request, params = state.request, state.request.sampling_params
    num_prompt, last = len(request.prompt_token_ids), state.tokens[-1]
    if len(state.tokens) - num_prompt >= params.min_tokens:
        if last in request.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
    limit = length_limit(params, num_prompt, min(queue.config.max_model_len, queue.config.capacity + 1))
    return ("length", None) if len(state.tokens) >= limit else None
