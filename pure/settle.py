"""`settle`: the device's word about a step, folded into the batch."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import append_each, with_items
from purestep.pure.record import replace
from purestep.pure.records.batch import CachedRequestState, Clock, InputBatch, Rows
from purestep.pure.records.outputs import StepOutput, host_columns
from purestep.pure.rows import occupied


def settle(batch: InputBatch, stepped: InputBatch, output: StepOutput) -> InputBatch:
    """The batch, knowing what the step of `stepped` did on the device: kept tokens and true lengths.

    Works by request, not by row: a request that finished meanwhile is left alone, one that was parked meanwhile
    still gets its tokens, one that was admitted anew does not (it recomputes them), and a fork made since gets those
    of its parent. Drafts that were not accepted lower the bound. `output` is on the host, its entries in the order of
    `stepped.req_ids`; padding behind them is ignored.

    Raises:
        SchedulerOutputError: columns of other lengths than the step's.
    """
    kept, computed, _ = host_columns(output, len(stepped.req_ids))
    rows = stepped.layout.row_of_index[: len(kept)].astype(np.intp)
    most = np.diff(stepped.layout.query_start_loc)[: len(kept)] if stepped.layout.bounds.num_drafts else None
    clock = Clock(batch.clock.num_begun, batch.clock.num_settled + 1)
    if batch.forks or batch.rows.requests is not stepped.rows.requests:
        requests, entries = _told(batch, stepped, rows)
        rows, kept, computed = _rows_now(batch, requests), kept[entries], computed[entries]
        batch = _settle_parked(batch, requests, rows < 0, kept, computed)
        current = rows >= 0
        most = None if most is None else most[entries][current]
        rows, kept, computed = rows[current], kept[current], computed[current]
    sampled = kept >= 0
    num_sampled = sampled.sum(axis=1, dtype=np.int32)
    columns = batch.columns
    settled, bound = columns.num_computed_tokens_settled, columns.num_computed_tokens_bound
    if most is not None:
        bound = with_items(bound, rows, bound[rows] - (settled[rows] + most - computed))
    tokens = append_each(batch.rows.tokens, np.repeat(rows, num_sampled), kept[sampled])  # type: ignore[arg-type]
    return replace(
        batch,
        rows=Rows(batch.rows.requests, tokens, batch.rows.block_ids),
        columns=replace(
            columns,
            num_tokens=with_items(columns.num_tokens, rows, columns.num_tokens[rows] + num_sampled),
            num_computed_tokens_bound=bound,
            num_computed_tokens_settled=with_items(settled, rows, computed),
        ),
        clock=clock,
    )


def give_up(batch: InputBatch) -> InputBatch:
    """The batch after a failure: outputs of steps begun but not settled will never come, and hold no row any more."""
    return replace(batch, clock=Clock(batch.clock.num_begun, batch.clock.num_begun), forks=())


def _told(
    batch: InputBatch, stepped: InputBatch, rows: NDArray[Any]
) -> tuple[list[CachedRequestState], NDArray[Any]]:
    """Whom the step has something to tell, and where in its output: the requests that ran, and forks of them since."""
    ran = [occupied(stepped.rows.requests[row]) for row in rows.tolist()]
    heirs = [
        (ran.index(fork.parent), fork.child)
        for fork in batch.forks
        if stepped.clock.num_begun <= fork.num_begun and fork.parent in ran
    ]
    entries = np.array([*range(len(ran)), *(entry for entry, _ in heirs)], np.intp)
    return [*ran, *(child for _, child in heirs)], entries


def _rows_now(batch: InputBatch, requests: Sequence[CachedRequestState]) -> NDArray[np.intp]:
    """The row of each, -1 where that admission has left its row."""
    rows = [batch.row_of.get(request.req_id, -1) for request in requests]
    now = batch.rows.requests
    return np.array(
        [row if row >= 0 and now[row] is r else -1 for row, r in zip(rows, requests, strict=True)], np.intp
    )


def _settle_parked(
    batch: InputBatch,
    requests: Sequence[CachedRequestState],
    left: NDArray[Any],
    kept: NDArray[Any],
    computed: NDArray[Any],
) -> InputBatch:
    if not (left.any() and batch.parked):
        return batch
    parked = dict(batch.parked)
    for index in np.flatnonzero(left).tolist():
        entry = parked.get(requests[index].req_id)
        if entry is not None and entry.request is requests[index]:
            parked[entry.request.req_id] = replace(
                entry,
                tokens=entry.tokens.extend(kept[index][kept[index] >= 0]),
                num_computed_tokens=int(computed[index]),
            )
    return replace(batch, parked=MappingProxyType(parked))
