"""`update_states`: the scheduler's word about a step, folded into the batch.

Rows are stable: a request keeps its row from admission to finish or preemption, so no row is ever moved or swapped.
Preemption gives the row up and keeps the request's tokens; resumption is admission with them.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, frozen, with_items
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import CachedRequestState, Clock, InputBatch, Parked, Rows
from purestep.pure.records.layout import Layout, LayoutBounds, SamplerShape, bucket, sampler_shape
from purestep.pure.records.scheduler_output import BlockIds, NewRequestData, SchedulerOutput
from purestep.pure.rows import check_blocks, occupied, place, release, room, rows_of, tapes, with_entries


def update_states(batch: InputBatch, scheduler_output: SchedulerOutput) -> InputBatch:
    """The batch of the coming step: finished requests dropped, unscheduled ones parked, new ones in rows.

    In order: finished ids go first, so that the same id may be finished and submitted anew in one step; then
    requests that sit out or come back as resumed leave their rows; then returning and new ones take the lowest free
    rows; then counts, blocks and output cuts of all known requests. A steady batch shares everything but one column.

    Raises:
        SchedulerOutputError: an output that contradicts the batch (unknown id, tokens past the end, missing blocks).
    Source: vllm/v1/worker/gpu_model_runner.py _update_states.
    """
    output = scheduler_output
    if _is_steady(batch, output):
        rows = batch.layout.row_of_index
        batch = _continue(batch, output, rows)
    else:
        _check_ids(output)
        batch = _drop(batch, output.finished_req_ids)
        batch = _park(batch, output)
        batch = place(batch, _returning(batch, output) + [_arriving(batch, new) for new in output.scheduled_new_reqs])
        batch = _continue(batch, output, rows_of(batch, output.scheduled_cached_reqs.req_ids))
        rows = frozen(rows_of(batch, output.req_ids))
    return _lay_out(batch, output, rows)


def _is_steady(batch: InputBatch, output: SchedulerOutput) -> bool:
    """Nobody comes, leaves or sits out, whatever else changes."""
    cached = output.scheduled_cached_reqs
    return (
        not output.scheduled_new_reqs
        and not output.finished_req_ids
        and not cached.resumed_req_ids
        and len(cached.req_ids) == len(batch.row_of)
        and cached.req_ids == batch.req_ids
        and output.req_ids == batch.req_ids
    )


def _check_ids(output: SchedulerOutput) -> None:
    named = output.scheduled_cached_reqs.req_ids + tuple(new.req_id for new in output.scheduled_new_reqs)
    if len(set(named)) != len(named) or len(output.req_ids) != len(named) or set(output.req_ids) != set(named):
        raise SchedulerOutputError(
            f"the output schedules tokens for {len(output.req_ids)} ids and describes {len(named)} requests, "
            f"{len(set(named))} of them distinct: every scheduled id must be described exactly once"
        )


def _drop(batch: InputBatch, req_ids: Iterable[str]) -> InputBatch:
    """Without these requests; ids that the batch does not know are ignored, as upstream does."""
    gone = {r for r in req_ids if r in batch.row_of or r in batch.parked}
    if not gone:
        return batch
    parked = MappingProxyType({r: p for r, p in batch.parked.items() if r not in gone})
    return replace(release(batch, [r for r in batch.row_of if r in gone]), parked=parked)


def _park(batch: InputBatch, output: SchedulerOutput) -> InputBatch:
    """Requests that this step leaves out, or that come back as resumed, leave their rows and keep their tokens."""
    resumed = output.scheduled_cached_reqs.resumed_req_ids
    scheduled = set(output.scheduled_cached_reqs.req_ids) - resumed
    leaving = [r for r in batch.row_of if r not in scheduled]
    if not leaving:
        return batch
    parked = dict(batch.parked)
    for req_id in leaving:
        row = batch.row_of[req_id]
        parked[req_id] = Parked(
            request=occupied(batch.rows.requests[row]),
            tokens=occupied(batch.rows.tokens[row]),
            block_ids=tuple(occupied(group[row]) for group in batch.rows.block_ids),
            num_computed_tokens=int(batch.columns.num_computed_tokens_settled[row]),
        )
    return replace(release(batch, leaving), parked=MappingProxyType(parked))


def _arriving(batch: InputBatch, new: NewRequestData) -> Parked:
    """A new request. An id that is known already was parked above and starts over with the longer prompt."""
    if new.sampling_params is None:
        raise SchedulerOutputError(f"new request {new.req_id!r} has no sampling_params: give it some")
    tokens = Tape.of(new.prompt_token_ids)
    vocab = batch.limits.vocab_size
    if not len(tokens) or not 0 <= tokens.array.min() <= tokens.array.max() < vocab:
        raise SchedulerOutputError(
            f"new request {new.req_id!r} has a prompt of {len(tokens)} tokens, which must be at least one, "
            f"with ids in 0 to {vocab - 1}"
        )
    request = CachedRequestState(
        req_id=new.req_id,
        num_prompt_tokens=len(tokens),
        sampling_params=new.sampling_params,
        stream=new.stream,
        num_computed_tokens=new.num_computed_tokens,
        lora_request=new.lora_request,
    )
    return Parked(request, tokens, tapes(batch, new.req_id, new.block_ids), new.num_computed_tokens)


def _returning(batch: InputBatch, output: SchedulerOutput) -> list[Parked]:
    """Parked requests on their way back: resumed with a whole new list of blocks, or only left out for a while."""
    cached, back = output.scheduled_cached_reqs, []
    for index, req_id in enumerate(cached.req_ids):
        entry = batch.parked.get(req_id)
        if entry is None:
            continue
        blocks = entry.block_ids
        if req_id in cached.resumed_req_ids:
            if req_id not in cached.new_block_ids:
                raise SchedulerOutputError(f"resumed request {req_id!r} has no blocks: send its complete list")
            blocks = tapes(batch, req_id, cached.new_block_ids[req_id])
        computed = int(cached.num_computed_tokens[index])
        length = entry.request.num_prompt_tokens + int(cached.num_output_tokens[index])
        tokens = entry.tokens.truncate(min(length, len(entry.tokens)))
        back.append(Parked(replace(entry.request, num_computed_tokens=computed), tokens, blocks, computed))
    return back


def _continue(batch: InputBatch, output: SchedulerOutput, rows: NDArray[Any]) -> InputBatch:
    """Counts, output cuts and further blocks of the requests that were known before."""
    cached = output.scheduled_cached_reqs
    computed = cached.num_computed_tokens
    known = batch.columns.num_prompt_tokens[rows] + cached.num_output_tokens
    back = (computed < batch.columns.num_computed_tokens_settled[rows]) | (known < batch.columns.num_tokens[rows])
    if back.any():
        batch = _roll_back(batch, rows[back], computed[back], known[back])
    if cached.new_block_ids:
        batch = _grow(batch, cached.resumed_req_ids, cached.new_block_ids)
    bound = with_items(batch.columns.num_computed_tokens_bound, rows, computed)
    return replace(batch, columns=replace(batch.columns, num_computed_tokens_bound=bound))


def _roll_back(
    batch: InputBatch, rows: NDArray[Any], computed: NDArray[Any], known: NDArray[Any]
) -> InputBatch:
    """The scheduler takes computed tokens or outputs back: these rows are written anew."""
    columns = batch.columns
    computed = np.minimum(computed, columns.num_computed_tokens_settled[rows])
    known = np.minimum(known, columns.num_tokens[rows])
    requests, tokens = {}, {}
    for row, count, length in zip(rows.tolist(), computed.tolist(), known.tolist(), strict=True):
        requests[row] = replace(occupied(batch.rows.requests[row]), num_computed_tokens=count)
        tokens[row] = occupied(batch.rows.tokens[row]).truncate(length)
    columns = replace(
        columns,
        num_tokens=with_items(columns.num_tokens, rows, known),
        num_computed_tokens_settled=with_items(columns.num_computed_tokens_settled, rows, computed),
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
        check_blocks(batch, req_id, ids)
        longer[row] = tuple(
            occupied(group[row]).extend(more) for group, more in zip(batch.rows.block_ids, ids, strict=True)
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


def _lay_out(batch: InputBatch, output: SchedulerOutput, rows: NDArray[Any]) -> InputBatch:
    """The order of the batch: the old layout while rows, counts and bounds are the same."""
    counts, old = output.num_scheduled_tokens, batch.layout
    start = batch.columns.num_computed_tokens_bound[rows]
    end = start + counts
    _check_ends(batch, output, rows, end)
    same = rows is old.row_of_index and np.array_equal(counts, np.diff(old.query_start_loc))
    bounds = LayoutBounds(
        num_reqs=len(rows),
        num_tokens=int(old.query_start_loc[-1] if same else counts.sum()),
        max_query_len=old.bounds.max_query_len if same else int(counts.max(initial=0)),
        max_seq_len=bucket(int(end.max(initial=0))) if len(rows) else 0,
        sampler=old.bounds.sampler if same else _sampler_shape(batch, rows),
    )
    if not same:
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        layout = Layout(rows, frozen(query_start_loc), bounds)
    else:
        layout = old if bounds == old.bounds else Layout(old.row_of_index, old.query_start_loc, bounds)
    return replace(
        batch,
        req_ids=batch.req_ids if same else output.req_ids,
        layout=layout,
        block_copies=output.block_copies,
        blocks_to_zero=output.new_block_ids_to_zero,
        clock=Clock(batch.clock.num_begun + bool(len(rows)), batch.clock.num_settled),
    )


def _sampler_shape(batch: InputBatch, rows: NDArray[Any]) -> SamplerShape:
    features = int(np.bitwise_or.reduce(batch.columns.sampler_features[rows], initial=0))
    num_logprobs = int(batch.columns.num_logprobs[rows].max(initial=-1))
    return sampler_shape(features, num_logprobs)


def _check_ends(batch: InputBatch, output: SchedulerOutput, rows: NDArray[Any], end: NDArray[Any]) -> None:
    """Every scheduled token is known or about to be, fits the model and has a block; the device agrees on the start."""
    columns, limits, clock = batch.columns, batch.limits, batch.clock
    unsettled = clock.num_begun - clock.num_settled
    start, known = end - output.num_scheduled_tokens, columns.num_tokens[rows] + unsettled
    last = np.minimum(np.minimum(known, limits.max_model_len), columns.room[rows])
    wrong = (end > last) | (output.num_scheduled_tokens < 1) | (start < 0)
    if not unsettled:
        wrong |= start != columns.num_computed_tokens_settled[rows]
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise SchedulerOutputError(
            f"request {output.req_ids[i]!r}: {output.num_scheduled_tokens[i]} tokens scheduled after "
            f"{start[i]} computed ones; it has {known[i]} tokens, {columns.num_computed_tokens_settled[rows[i]]} of "
            f"them computed, room for {columns.room[rows[i]]} in its blocks, and max_model_len is "
            f"{limits.max_model_len}: schedule at least one token, from where it stands, and no further than all three"
        )
