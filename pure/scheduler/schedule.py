"""`schedule`: what the next step does, and the queue that assumes it will be done."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32
from numpy.typing import NDArray

from purestep.pure.arrays import empty_column, frozen
from purestep.pure.record import replace
from purestep.pure.records.queue import News, Queue, Running, RunningCounts, StepInFlight
from purestep.pure.records.scheduler_output import (
    NOTHING,
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from purestep.pure.scheduler.admission import Admitted, admit
from purestep.pure.scheduler.drafts import verified
from purestep.pure.scheduler.growth import Served, serve_running
from purestep.pure.scheduler.memory import put_back, without_drafts
from purestep.pure.scheduler.rows import rows_of, stepped, tokens_of
from purestep.pure.scheduler.sharing import block_copies


def schedule(queue: Queue, num_steps: int = 1) -> tuple[Queue, SchedulerOutput]:
    """The next step's work: running requests first, then waiting ones, by priority and arrival.

    Continuous batching with chunked prefill: every request gets the tokens that it can compute, as far as
    `max_num_batched_tokens` goes. Counts are advanced here, as if the step were done, so that with
    `async_scheduling` the next one can be scheduled before its output is known; without it, rows whose token is
    not known yet sit out. A row is not scheduled past its length limit, drafts included. In a step that preempts
    nobody is admitted. A steady batch hands out the same id tuple and the same token counts, the very objects.
    `num_steps` steps are scheduled at once where nothing can change meanwhile but that a row ends: nobody waits, all
    decode without drafts, and blocks suffice. Else it is one; the output says which.

    Every output with scheduled requests must be answered by `update`, in order; an empty one must not.
    Source: vllm/v1/core/sched/scheduler.py schedule.
    """
    served = serve_running(queue, num_steps)
    num_scheduled, admitted = served.num_scheduled, tuple[Admitted, ...]()
    queue = served.queue
    if served.preempted:
        queue = put_back(queue, served.preempted)
    elif queue.waiting.states.num_items:
        queue, admitted = admit(queue, queue.config.max_num_batched_tokens - int(num_scheduled.sum()))
        if admitted:
            num_scheduled = _with_admitted(queue.running, num_scheduled, admitted)
    news = _news(queue, num_scheduled)
    ahead = _ahead(queue, num_scheduled) if queue.config.num_spec_tokens or served.num_steps > 1 else None
    drafts = ahead if served.num_steps == 1 else None
    of_device = drafts if queue.config.drafts_on_device else None
    copies = (*served.copies.values(), *(new.copies for new in admitted))
    output = SchedulerOutput(
        scheduled_new_reqs=tuple([_new_request(new) for new in admitted if new.is_new]),
        scheduled_cached_reqs=_cached_requests(queue, served, num_scheduled, admitted, news.req_ids),
        req_ids=news.req_ids,
        num_scheduled_tokens=news.num_scheduled_tokens,
        finished_req_ids=queue.news.finished_req_ids,
        preempted_req_ids=queue.news.preempted_req_ids,
        scheduled_spec_decode_tokens=NOTHING if drafts is None else verified(queue, drafts),
        num_device_drafts=None if of_device is None else frozen(of_device[num_scheduled > 0]),
        block_copies=block_copies(copies, len(queue.pools)) if copies else (),
        num_spec_tokens_to_schedule=queue.config.num_spec_tokens,
        num_steps=served.num_steps,
    )
    return _advance(queue, num_scheduled, news, ahead, served.num_steps), output


def _ahead(queue: Queue, num_scheduled: Int32[np.ndarray, " rows"]) -> Int32[np.ndarray, " rows"] | None:
    """How many of the rows' scheduled tokens follow the last one: drafts or further steps; None if there are none."""
    counts = queue.running.counts
    ahead = frozen(np.maximum(counts.num_computed + num_scheduled - counts.num_tokens, 0))
    return ahead if ahead.any() else None


def _with_admitted(
    running: Running, num_scheduled: Int32[np.ndarray, " rows"], admitted: Sequence[Admitted]
) -> Int32[np.ndarray, " rows"]:
    """The scheduled tokens of all rows, where those of rows that ran before are given in their order."""
    rows = _rows_of(running, admitted)
    joined, before = np.zeros(len(running), np.int32), np.ones(len(running), np.bool_)
    before[rows] = False
    joined[before] = num_scheduled
    joined[rows] = [new.num_scheduled for new in admitted]
    return joined


def _rows_of(running: Running, admitted: Sequence[Admitted]) -> NDArray[np.int64]:
    return rows_of(running, np.array([new.newcomer.state.ticket for new in admitted], np.int64))


def _news(queue: Queue, num_scheduled: Int32[np.ndarray, " rows"]) -> News:
    """Who runs and how many tokens of it; the same objects as last time if they say the same."""
    last, req_ids = queue.news, queue.running.req_ids
    if not num_scheduled.all():
        chosen = np.flatnonzero(num_scheduled)
        req_ids = tuple([req_ids[row] for row in chosen.tolist()])
        num_scheduled = num_scheduled[chosen]
    if req_ids is last.req_ids or req_ids == last.req_ids:
        req_ids = last.req_ids
        if (num_scheduled == last.num_scheduled_tokens).all():
            num_scheduled = last.num_scheduled_tokens
    return News(req_ids, frozen(num_scheduled))


def _new_request(new: Admitted) -> NewRequestData:
    state = new.newcomer.state
    request = state.request
    return NewRequestData(
        req_id=request.req_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        block_ids=_block_ids(new),
        num_computed_tokens=new.newcomer.num_computed,
        stream=request.stream,
        lora_request=request.adapter,
    )


def _cached_requests(
    queue: Queue,
    served: Served,
    num_scheduled: Int32[np.ndarray, " rows"],
    admitted: Sequence[Admitted],
    req_ids: tuple[str, ...],
) -> CachedRequestData:
    """The scheduled requests that the batch knows: those that ran on, then those that come back."""
    running, counts = queue.running, queue.running.counts
    num_output = frozen(counts.num_tokens - running.facts.num_prompt)
    if not admitted and len(req_ids) == len(running) and counts.ran.all():
        return CachedRequestData(req_ids, counts.num_computed, num_output, served.new_block_ids)
    resumed = [new for new in admitted if not new.is_new]
    runs_on, comes_back = num_scheduled > 0, _rows_of(running, resumed)
    runs_on[_rows_of(running, admitted)] = False
    rows = np.concatenate([np.flatnonzero(runs_on), comes_back])
    listed = rows.tolist()
    sat_out = [row for row in listed if not counts.ran[row]]
    complete = {new.newcomer.state.request.req_id: _block_ids(new) for new in resumed}
    return CachedRequestData(
        req_ids=tuple([running.req_ids[row] for row in listed]) if admitted else req_ids,
        num_computed_tokens=frozen(counts.num_computed[rows]),
        num_output_tokens=frozen(num_output[rows]),
        new_block_ids={**served.new_block_ids, **complete} if complete else served.new_block_ids,
        resumed_req_ids=frozenset(complete),
        all_token_ids={running.req_ids[row]: tuple(tokens_of(queue, row).tolist()) for row in sat_out}
        or NOTHING,
    )


def _block_ids(new: Admitted) -> BlockIds:
    return tuple([tuple(blocks.tolist()) for blocks in new.newcomer.residence.blocks])


def _advance(
    queue: Queue,
    num_scheduled: Int32[np.ndarray, " rows"],
    news: News,
    ahead: Int32[np.ndarray, " rows"] | None,
    num_steps: int,
) -> Queue:
    """The queue as if the step had been done and all drafts accepted, and one token more known of where it will be.

    So many tokens `ahead` of the last one are drafts, or those of further steps.
    """
    running, counts = queue.running, queue.running.counts
    if not len(news.req_ids):
        still = empty_column(len(running), np.bool_)
        return stepped(queue, replace(counts, ran=still) if counts.ran.any() else counts, news=news)
    runs = num_scheduled > 0
    num_computed = frozen(counts.num_computed + num_scheduled)
    num_tokens = counts.num_tokens if ahead is None else counts.num_tokens + ahead
    samples = frozen(runs & (num_computed == num_tokens))
    counts = RunningCounts(
        num_tokens=frozen(num_tokens + samples),
        num_known=counts.num_known,
        num_computed=num_computed,
        num_settled=counts.num_settled,
        num_covered=counts.num_covered,
        next_offer=counts.next_offer,
        ran=counts.ran if (runs == counts.ran).all() else frozen(runs),
    )
    drafts = ahead if num_steps == 1 else None
    step = StepInFlight(
        news.req_ids, running.facts.ticket, num_scheduled, samples, drafts, num_steps=num_steps
    )
    if len(news.req_ids) < len(running):
        step = _only(step, np.flatnonzero(runs))
    in_flight = (*queue.in_flight, step)
    left = without_drafts(queue.drafts, step.ticket.tolist()) if queue.drafts else queue.drafts
    return stepped(queue, counts, news=news, in_flight=in_flight, drafts=left)


def _only(step: StepInFlight, rows: NDArray[np.int64] | Bool[np.ndarray, " rows"]) -> StepInFlight:
    drafts = None if step.num_drafts is None else frozen(step.num_drafts[rows])
    return StepInFlight(
        req_ids=step.req_ids,
        ticket=frozen(step.ticket[rows]),
        num_scheduled=frozen(step.num_scheduled[rows]),
        samples=frozen(step.samples[rows]),
        num_drafts=drafts,
        num_steps=step.num_steps,
    )
