"""`settle`: the device's word about a step, folded into the batch."""

from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import append_each, with_items
from purestep.pure.record import replace
from purestep.pure.records.batch import Clock, InputBatch, Rows
from purestep.pure.records.outputs import StepOutput


def settle(batch: InputBatch, stepped: InputBatch, output: StepOutput) -> InputBatch:
    """The batch, knowing what the step of `stepped` did on the device: kept tokens and true lengths.

    Works by request, not by row: a request that finished meanwhile is left alone, one that was parked meanwhile
    still gets its tokens, one that was admitted anew does not (it recomputes them). `output` is on the host, its
    entries in the order of `stepped.req_ids`; padding behind them is ignored.
    """
    num_reqs = len(stepped.req_ids)
    rows = stepped.layout.row_of_index[:num_reqs].astype(np.intp)
    kept = np.asarray(output.sampled_token_ids)[:num_reqs, 0]
    computed = np.asarray(output.num_computed_tokens)[:num_reqs]
    clock = Clock(batch.clock.num_begun, batch.clock.num_settled + 1)
    if batch.rows.requests is not stepped.rows.requests:
        current = _current(batch, stepped, rows)
        batch = _settle_parked(batch, stepped, ~current, kept, computed)
        rows, kept, computed = rows[current], kept[current], computed[current]
    sampled = kept >= 0
    columns = batch.columns
    tokens = append_each(batch.rows.tokens, rows[sampled], kept[sampled])  # type: ignore[arg-type]
    return replace(
        batch,
        rows=Rows(batch.rows.requests, tokens, batch.rows.block_ids),
        columns=replace(
            columns,
            num_tokens=with_items(columns.num_tokens, rows, columns.num_tokens[rows] + sampled),
            num_computed_tokens_settled=with_items(columns.num_computed_tokens_settled, rows, computed),
        ),
        clock=clock,
    )


def give_up(batch: InputBatch) -> InputBatch:
    """The batch after a failure: outputs of steps begun but not settled will never come, and hold no row any more."""
    return replace(batch, clock=Clock(batch.clock.num_begun, batch.clock.num_begun))


def _current(batch: InputBatch, stepped: InputBatch, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of the stepped rows still hold the admission that ran in them."""
    now, then = batch.rows.requests, stepped.rows.requests
    return np.array([now[row] is then[row] for row in rows.tolist()], bool)


def _settle_parked(
    batch: InputBatch, stepped: InputBatch, left: NDArray[Any], kept: NDArray[Any], computed: NDArray[Any]
) -> InputBatch:
    if not (left.any() and batch.parked):
        return batch
    parked = dict(batch.parked)
    for index in np.flatnonzero(left).tolist():
        request = stepped.rows.requests[stepped.layout.row_of_index[index]]
        entry = parked.get(request.req_id) if request is not None else None
        if entry is not None and entry.request is request:
            tokens = entry.tokens.append(int(kept[index])) if kept[index] >= 0 else entry.tokens
            parked[entry.request.req_id] = replace(
                entry, tokens=tokens, num_computed_tokens=int(computed[index])
            )
    return replace(batch, parked=MappingProxyType(parked))
