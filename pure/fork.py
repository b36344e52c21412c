"""`fork_request`: a second request that goes on from where another one is.

The device copies the parent's row in the next step, since the parent's last token may be known only there. Blocks are
shared; what a step on its way will tell of the parent is told of the fork too.
"""

from collections.abc import Mapping
from types import MappingProxyType

from purestep.pure.arrays import Tape, with_items
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import Fork, InputBatch, Rows
from purestep.pure.rows import as_parked, drop, occupied, place_beside, room, with_entries


def keep_blocks(batch: InputBatch, kept: Mapping[str, tuple[int, ...]]) -> InputBatch:
    """The batch whose requests have given up all but their first so many blocks, per KV group.

    The scheduler takes away what others hold too; what it gives instead is appended as ever.
    """
    if not kept:
        return batch
    parked = {
        req_id: replace(batch.parked[req_id], block_ids=_cut(batch.parked[req_id].block_ids, counts))
        for req_id, counts in kept.items()
        if req_id in batch.parked
    }
    if parked:
        batch = replace(batch, parked=MappingProxyType(batch.parked | parked))
    cut = {
        batch.row_of[req_id]: _cut(as_parked(batch, req_id).block_ids, counts)
        for req_id, counts in kept.items()
        if req_id in batch.row_of
    }
    if not cut:
        return batch
    groups = tuple(
        with_entries(group, {row: blocks[g] for row, blocks in cut.items()})
        for g, group in enumerate(batch.rows.block_ids)
    )
    rooms = [room(batch, blocks) for blocks in cut.values()]
    return replace(
        batch,
        rows=Rows(batch.rows.requests, batch.rows.tokens, groups),
        columns=replace(batch.columns, room=with_items(batch.columns.room, list(cut), rooms)),
    )


def fork_request(
    batch: InputBatch, req_id: str, new_req_id: str, *, stream: int | None, goes_on: bool
) -> InputBatch:
    """The batch with a new request of the same tokens, blocks and parameters as a known one.

    With `goes_on` it sits in a row of its own, as its parent does, and may run in the next step; without, it is parked.
    A request that had the new id before, and has ended, is dropped.

    Raises:
        SchedulerOutputError: the batch does not know the parent, or a fork that goes on finds no row.
    """
    batch = drop(batch, [new_req_id])
    row = batch.row_of.get(req_id)
    if row is None and req_id not in batch.parked:
        raise SchedulerOutputError(
            f"fork of {req_id!r} as {new_req_id!r}: the batch knows {len(batch.row_of)} requests in rows and "
            f"{len(batch.parked)} parked, none of this id: send it in scheduled_new_reqs first"
        )
    parent = batch.parked[req_id].request if row is None else occupied(batch.rows.requests[row])
    request = replace(parent, req_id=new_req_id, stream=parent.stream if stream is None else stream)
    inherited = [Fork(fork.parent, request, fork.num_begun) for fork in batch.forks if fork.child is parent]
    forks = (*batch.forks, *inherited, Fork(parent, request, batch.clock.num_begun))
    if row is not None and goes_on:
        return place_beside(batch, row, request, forks)
    entry = batch.parked[req_id] if row is None else as_parked(batch, req_id)
    own = replace(entry, request=request)
    return replace(batch, forks=forks, parked=MappingProxyType(batch.parked | {new_req_id: own}))


def _cut(block_ids: tuple[Tape, ...], counts: tuple[int, ...]) -> tuple[Tape, ...]:
    return tuple([tape.truncate(count) for tape, count in zip(block_ids, counts, strict=True)])
