"""`update_states`: the scheduler's word about a step, folded into the batch.

Rows are stable: a request keeps its row from admission to finish or preemption, so no row is ever moved or swapped.
Preemption gives the row up and keeps the request's tokens; resumption is admission with them.
"""

from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, frozen, start_loc, with_items
from purestep.pure.contradictions import (
    check_block_orders,
    check_counts,
    check_draft_kinds,
    check_drafts,
    check_ids,
    check_steps,
    check_supported,
    has_full_columns,
)
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.holders import with_one_writer
from purestep.pure.record import replace
from purestep.pure.records.batch import (
    NO_DRAFTS,
    CachedRequestState,
    Clock,
    Columns,
    Fork,
    InputBatch,
    Parked,
    Rows,
)
from purestep.pure.records.layout import Layout, LayoutBounds, bucket, sampler_shape
from purestep.pure.records.sampling_params import validate
from purestep.pure.records.scheduler_output import NOTHING, BlockIds, NewRequestData, SchedulerOutput
from purestep.pure.rows import (
    as_parked,
    drop,
    last_run,
    occupied,
    place,
    release,
    room,
    rows_of,
    tapes,
    with_entries,
)


def update_states(batch: InputBatch, scheduler_output: SchedulerOutput) -> InputBatch:
    """The batch of the coming step: finished requests dropped, unscheduled ones parked, new ones in rows.

    In order: finished ids go first, so that the same id may be finished and submitted anew in one step; then
    requests that sit out, unless tokens of theirs are on their way, or come back as resumed leave their rows; then
    returning and new ones take the lowest free rows; then counts, blocks and output cuts of all known requests. A
    steady batch shares everything but one column.

    Raises:
        SchedulerOutputError: an output that contradicts the batch (unknown id, tokens past the end, missing blocks, a
            block with two writers, drafts that do not fit), or a new request with what is not supported.
        InvalidParameterError: sampling parameters of a new request outside their domain.
    Source: vllm/v1/worker/gpu_model_runner.py _update_states.
    """
    output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    if _is_steady(batch, output):
        rows = batch.layout.row_of_index
        at = known = rows.astype(np.intp)  # numpy indexes several times faster with integers of its own
    else:
        check_ids(output)
        batch = drop(batch, output.finished_req_ids)
        batch = _park(batch, output)
        arriving = [_arriving(batch, new) for new in output.scheduled_new_reqs]
        batch = place(batch, _returning(batch, output) + arriving)
        at, known = rows_of(batch, output.req_ids), rows_of(batch, cached.req_ids)
        rows = frozen(at.astype(np.int32))
    batch = _continue(batch, output, known)
    return _lay_out(batch, output, rows, at, known)


def _is_steady(batch: InputBatch, output: SchedulerOutput) -> bool:
    """Nobody comes, leaves or sits out, whatever else changes."""
    cached = output.scheduled_cached_reqs
    return (
        not output.scheduled_new_reqs
        and not output.finished_req_ids
        and not output.preempted_req_ids
        and not cached.resumed_req_ids
        and len(cached.req_ids) == len(batch.row_of)
        and (cached.req_ids is batch.req_ids or cached.req_ids == batch.req_ids)
        and (output.req_ids is batch.req_ids or output.req_ids == batch.req_ids)
        and has_full_columns(output)
        and not batch.forks  # one of them may have taken the id of a request of the last step
    )


def _park(batch: InputBatch, output: SchedulerOutput) -> InputBatch:
    """Requests that this step leaves out, or that come back as resumed, leave their rows and keep their tokens.

    One that is only left out stays in its row while tokens of it are on their way: it may go on behind them.
    """
    cached, columns = output.scheduled_cached_reqs, batch.columns
    gone = (
        cached.resumed_req_ids | output.preempted_req_ids | {new.req_id for new in output.scheduled_new_reqs}
    )
    on_its_way = (columns.num_computed_tokens_bound > columns.num_computed_tokens_settled).tolist()
    staying = set(cached.req_ids) | {r for r, row in batch.row_of.items() if on_its_way[row]}
    leaving = [r for r in batch.row_of if r in gone or r not in staying]
    scheduled = set(output.req_ids)
    sitting_out = [row for r, row in batch.row_of.items() if r in staying and r not in scheduled]
    if sitting_out:
        batch = replace(batch, columns=replace(columns, released_at=last_run(batch, sitting_out)))
    if not leaving:
        return batch
    parked = {**batch.parked, **{req_id: as_parked(batch, req_id) for req_id in leaving}}
    return replace(release(batch, leaving), parked=MappingProxyType(parked))


def _arriving(batch: InputBatch, new: NewRequestData) -> Parked:
    """A new request. An id that is known already was parked above and starts over with the longer prompt."""
    check_supported(new)
    if new.sampling_params is None:
        raise SchedulerOutputError(f"new request {new.req_id!r} has no sampling_params: give it some")
    ids, limits = new.prompt_token_ids, batch.limits
    if not 0 < len(ids) < limits.max_model_len or not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        raise SchedulerOutputError(
            f"new request {new.req_id!r} has a prompt of {len(ids)} tokens: send 1 to {limits.max_model_len - 1}, so "
            f"that one can follow within max_model_len, with ids from 0 to {limits.vocab_size - 1}"
        )
    validate(
        new.sampling_params,
        limits.vocab_size,
        limits.max_model_len,
        eos_token_ids=limits.eos_token_ids,
        req_id=new.req_id,
    )
    tokens = Tape.of(ids)
    request = CachedRequestState(
        req_id=new.req_id,
        num_prompt_tokens=len(tokens),
        sampling_params=new.sampling_params,
        stream=new.stream,
        num_computed_tokens=new.num_computed_tokens,
    )
    return Parked(request, tokens, tapes(batch, new.req_id, new.block_ids), new.num_computed_tokens)


def _returning(batch: InputBatch, output: SchedulerOutput) -> list[Parked]:
    """Parked requests on their way back: resumed with a whole new list of blocks, or only left out for a while."""
    cached, back = output.scheduled_cached_reqs, []
    for index, req_id in enumerate(cached.req_ids if batch.parked else ()):
        entry = batch.parked.get(req_id)
        if entry is None:
            continue
        computed, is_resumed = int(cached.num_computed_tokens[index]), req_id in cached.resumed_req_ids
        if is_resumed and req_id not in cached.new_block_ids:
            raise SchedulerOutputError(
                f"resumed request {req_id!r} has no blocks: send its complete list for every KV group"
            )
        if not is_resumed and computed > entry.num_computed_tokens:
            raise SchedulerOutputError(
                f"request {req_id!r} comes back with {computed} computed tokens, but when it was left out it had "
                f"{entry.num_computed_tokens} for certain: settle its last step first, or resume it"
            )
        blocks = tapes(batch, req_id, cached.new_block_ids[req_id]) if is_resumed else entry.block_ids
        request = replace(entry.request, num_computed_tokens=computed)
        back.append(Parked(request, entry.tokens, blocks, computed))
    return back


def _continue(batch: InputBatch, output: SchedulerOutput, at: NDArray[np.intp]) -> InputBatch:
    """Roll-backs and further blocks of the requests that were known before, which sit in the rows `at`."""
    cached, columns, clock = output.scheduled_cached_reqs, batch.columns, batch.clock
    computed = cached.num_computed_tokens
    known = columns.num_prompt_tokens[at] + cached.num_output_tokens
    is_settled = clock.num_begun == clock.num_settled
    least = columns.num_computed_tokens_settled if is_settled else columns.num_computed_tokens_bound
    back = (computed < least[at]) | (known < columns.num_tokens[at])
    if np.count_nonzero(back):
        batch = _roll_back(batch, at[back], computed[back], known[back])
    if cached.new_block_ids:
        batch = _grow(batch, cached.resumed_req_ids, cached.new_block_ids)
    return batch


def _roll_back(
    batch: InputBatch, at: NDArray[np.intp], computed: NDArray[Any], known: NDArray[Any]
) -> InputBatch:
    """The scheduler takes computed tokens or outputs back: these rows are written anew."""
    columns = batch.columns
    known = np.minimum(known, columns.num_tokens[at])
    computed = np.minimum(np.minimum(computed, columns.num_computed_tokens_settled[at]), known)
    requests, tokens = {}, {}
    for row, count, length in zip(at.tolist(), computed.tolist(), known.tolist(), strict=True):
        request = occupied(batch.rows.requests[row])
        if count < 0 or length < request.num_prompt_tokens:
            raise SchedulerOutputError(
                f"request {request.req_id!r} is to go back to {count} computed tokens of {length} known ones; its "
                f"prompt alone has {request.num_prompt_tokens}: only outputs can be taken back"
            )
        requests[row] = replace(request, num_computed_tokens=count)
        tokens[row] = occupied(batch.rows.tokens[row]).truncate(length)
    columns = replace(
        columns,
        num_tokens=with_items(columns.num_tokens, at, known),
        num_computed_tokens_bound=with_items(columns.num_computed_tokens_bound, at, computed),
        num_computed_tokens_settled=with_items(columns.num_computed_tokens_settled, at, computed),
    )
    kept = batch.rows
    cut = Rows(with_entries(kept.requests, requests), with_entries(kept.tokens, tokens), kept.block_ids)
    return replace(batch, rows=cut, columns=columns)


def _grow(batch: InputBatch, resumed: frozenset[str], new_block_ids: Mapping[str, BlockIds]) -> InputBatch:
    """Further blocks, appended; a resumed request came with its complete list."""
    grown = {r: ids for r, ids in new_block_ids.items() if r not in resumed}
    if not grown:
        return batch
    rows = rows_of(batch, tuple(grown)).tolist()
    longer: dict[int, tuple[Tape, ...]] = {}
    for row, (req_id, ids) in zip(rows, grown.items(), strict=True):
        longer[row] = tapes(
            batch, req_id, ids, behind=[occupied(group[row]) for group in batch.rows.block_ids]
        )
    groups = tuple(
        with_entries(group, {row: blocks[g] for row, blocks in longer.items()})
        for g, group in enumerate(batch.rows.block_ids)
    )
    rooms = with_items(batch.columns.room, rows, [room(batch, blocks) for blocks in longer.values()])
    return replace(
        batch,
        rows=Rows(batch.rows.requests, batch.rows.tokens, groups),
        columns=replace(batch.columns, room=rooms),
    )


def _lay_out(
    batch: InputBatch,
    output: SchedulerOutput,
    rows: NDArray[np.int32],
    at: NDArray[np.intp],
    known: NDArray[np.intp],
) -> InputBatch:
    """The order of the batch, and how far it runs: the old layout while rows, counts and bounds are the same."""
    counts, old, columns = output.num_scheduled_tokens, batch.layout, batch.columns
    start, num_steps = _starts(batch, output, at, known), output.num_steps
    if num_steps != 1:
        check_steps(batch, output, at, start)
    end, num_drafts = start + counts, _num_drafts(batch, output)
    check_counts(batch, output, at, start, end, num_drafts if num_steps == 1 else counts - 1)
    if num_steps > 1:
        counts = np.minimum(counts, 1)  # in each of them
    back = () if rows is old.row_of_index else np.setdiff1d(rows, old.row_of_index).tolist()
    holders = with_one_writer(batch, at, start, end, back)
    if output.block_copies or output.new_block_ids_to_zero:
        check_block_orders(batch, output, holders)
    is_steady = rows is old.row_of_index and not np.count_nonzero(counts != _counts(old))
    max_seq_len = bucket(int(end.max())) if len(rows) else 0
    most_drafts = 0 if num_drafts is None or not num_drafts.any() else batch.limits.num_drafts
    if is_steady:
        layout = _bounded(old, max_seq_len, most_drafts, num_steps)
    else:
        layout = _new_layout(batch, rows, at, counts, max_seq_len, most_drafts, num_steps)
    return InputBatch(
        limits=batch.limits,
        rows=batch.rows,
        columns=_with_bound(columns, with_items(columns.num_computed_tokens_bound, at, end)),
        row_of=batch.row_of,
        parked=batch.parked,
        req_ids=batch.req_ids if rows is old.row_of_index else output.req_ids,
        layout=layout,
        holders=holders,
        block_copies=output.block_copies,
        blocks_to_zero=output.new_block_ids_to_zero,
        clock=Clock(batch.clock.num_begun + bool(len(rows)), batch.clock.num_settled),
        forks=_recent_forks(batch) if batch.forks else (),
        drafts=_drafts(batch, output) if output.scheduled_spec_decode_tokens else NO_DRAFTS,
    )


def _num_drafts(batch: InputBatch, output: SchedulerOutput) -> NDArray[Any] | None:
    """How many of each request's scheduled tokens are drafts, None if no request has any."""
    given, num_drafts = output.scheduled_spec_decode_tokens, output.num_device_drafts
    if given is not NOTHING or num_drafts is not None:
        check_draft_kinds(output)
    if given:
        num_drafts = np.array([len(given.get(req_id, ())) for req_id in output.req_ids], np.int32)
    if num_drafts is not None:
        check_drafts(batch, output, num_drafts)
    return num_drafts


def _drafts(batch: InputBatch, output: SchedulerOutput) -> NDArray[np.int32]:
    """(row, place, token id) of drafts that the host has: those of a request up to the first -1."""
    entries = []
    for req_id, drafts in output.scheduled_spec_decode_tokens.items():
        row, own = batch.row_of[req_id], list(takewhile(lambda token: token >= 0, drafts))
        entries += [(row, place, token) for place, token in enumerate(own)]
    return frozen(np.array(entries, np.int32).reshape(-1, 3))


def _recent_forks(batch: InputBatch) -> tuple[Fork, ...]:
    """Those that the device has not heard of, or that unsettled steps have something to tell."""
    clock = batch.clock
    return tuple(
        [f for f in batch.forks if f.num_begun == clock.num_begun or f.num_begun > clock.num_settled]
    )


def _with_bound(columns: Columns, bound: NDArray[np.int32]) -> Columns:
    """The columns with another bound, built by hand: every step does it."""
    return Columns(
        num_prompt_tokens=columns.num_prompt_tokens,
        num_tokens=columns.num_tokens,
        num_computed_tokens_bound=bound,
        num_computed_tokens_settled=columns.num_computed_tokens_settled,
        room=columns.room,
        sampler_features=columns.sampler_features,
        num_logprobs=columns.num_logprobs,
        released_at=columns.released_at,
    )


def _starts(
    batch: InputBatch, output: SchedulerOutput, at: NDArray[np.intp], known: NDArray[np.intp]
) -> NDArray[Any]:
    """The computed tokens from which each request goes on: the scheduler's word, or that at admission."""
    computed = output.scheduled_cached_reqs.num_computed_tokens
    if known is at:
        return computed
    start: NDArray[Any] = batch.columns.num_computed_tokens_settled.copy()
    start[known] = computed
    return start[at]


def _counts(layout: Layout) -> NDArray[Any]:
    """Tokens of each request; the same as np.diff, in a third of its time."""
    starts = layout.query_start_loc
    counts: NDArray[Any] = starts[1:] - starts[:-1]
    return counts


def _bounded(layout: Layout, max_seq_len: int, num_drafts: int, num_steps: int) -> Layout:
    """The same rows and counts with other bounds."""
    old = layout.bounds
    if (old.max_seq_len, old.num_drafts, old.num_steps) == (max_seq_len, num_drafts, num_steps):
        return layout
    bounds = replace(old, max_seq_len=max_seq_len, num_drafts=num_drafts, num_steps=num_steps)
    return Layout(layout.row_of_index, layout.query_start_loc, bounds)


def _new_layout(
    batch: InputBatch,
    rows: NDArray[np.int32],
    at: NDArray[np.intp],
    counts: NDArray[Any],
    max_seq_len: int,
    num_drafts: int,
    num_steps: int,
) -> Layout:
    features = int(np.bitwise_or.reduce(batch.columns.sampler_features[at], initial=0))
    bounds = LayoutBounds(
        num_reqs=len(rows),
        num_tokens=int(counts.sum()),
        max_query_len=int(counts.max(initial=0)),
        max_seq_len=max_seq_len,
        sampler=sampler_shape(features, int(batch.columns.num_logprobs[at].max(initial=-1))),
        num_drafts=num_drafts,
        num_steps=num_steps,
    )
    return Layout(rows, start_loc(counts), bounds)
