"""Who holds which KV block, and the rule that a block which a step may write has one holder.

Blocks that are computed wholly are read alone, and may be shared. Holders are counted from what has changed since the
last count, so a step in which no row is admitted, rolled back or given blocks costs two comparisons.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, empty_column
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.records.batch import Holders, InputBatch
from purestep.pure.rows import changed_entries, occupied

Ids = NDArray[np.int32]
Tapes = Sequence[Tape | None]

_NO_IDS = empty_column(0, np.int32)


def with_one_writer(
    batch: InputBatch, at: NDArray[np.intp], start: NDArray[Any], end: NDArray[Any], back: Sequence[int]
) -> Holders:
    """The holders of every block in a step that computes tokens `start` up to `end` of the rows `at`.

    Of these rows `back` were not in the last step.

    A row may write its blocks from the one that `start` lies in. Those have no other holder, but for one case: where
    the step computes a block wholly, others may hold it as computed already, as upstream's prefix cache has it.
    The check is exact for rows that run; what others may write is checked when they come back.

    Raises:
        SchedulerOutputError: a block with two writers, or one that is held by others and not computed wholly after
            the step; or the null block where a step may write.
    """
    old, rows = batch.holders, batch.rows
    if rows.block_ids is old.block_ids and rows.requests is old.requests and not back:
        return old
    admitted = [] if rows.requests is old.requests else changed_entries(rows.requests, old.requests)
    first = np.zeros(batch.limits.max_num_reqs, np.intp)
    counts = []
    for group, size in enumerate(batch.limits.block_sizes):
        first[at] = start // size
        now, then = rows.block_ids[group], old.block_ids[group]
        given, taken = _changes(now, then)
        column = old.counts[group].plus(given, 1).plus(taken, -1)
        stayed = [row for row in {*admitted, *back} if now[row] is not None and then[row] is not None]
        again = [
            occupied(now[row])[first[row] :] for row in stayed
        ]  # who is rolled back, or comes back, may write what it has
        ids = np.concatenate([given, *again])
        suspects = ids[(column[ids] > 1) | (ids == 0)]
        if len(suspects) and len(at):
            _check_shared(batch, group, suspects, at, first[at], end // size)
        counts.append(column)
    return Holders(rows.requests, rows.block_ids, tuple(counts))


def _changes(now: Tapes, then: Tapes) -> tuple[Ids, Ids]:
    """The blocks that rows hold now and did not hold then, and the other way round, once for each mention."""
    given, taken = [_NO_IDS], [_NO_IDS]
    for row in changed_entries(now, then):
        new, old = now[row], then[row]
        if new is not None and old is not None and new.extends(old):
            given.append(new[len(old) :])
            continue
        given += [] if new is None else [new.array]
        taken += [] if old is None else [old.array]
    return np.concatenate(given), np.concatenate(taken)


def _check_shared(
    batch: InputBatch,
    group: int,
    suspects: Ids,
    at: NDArray[np.intp],
    first: NDArray[np.intp],
    full: NDArray[np.intp],
) -> None:
    """Each of these blocks is written by one row at most, which holds it once and computes it wholly.

    Rows `at` write their blocks from place `first` on, and those before place `full` are full after the step.
    """
    tapes = batch.rows.block_ids[group]
    written = [occupied(tapes[row])[place:] for row, place in zip(at.tolist(), first.tolist(), strict=True)]
    found = np.isin(np.concatenate(written), suspects)
    index = np.repeat(np.arange(len(at)), [len(ids) for ids in written])[found]
    named, seen = set(suspects.tolist()), set[int]()
    for i in dict.fromkeys(index.tolist()):
        ids, start = occupied(tapes[at[i]]).tolist(), int(first[i])
        own = named.intersection(ids[start:])
        times = Counter(block for block in ids if block in own)
        wrong = own & (seen | {0, *ids[max(start, int(full[i])) :]})
        wrong |= {block for block, num in times.items() if num > 1}
        if wrong:
            raise _refusal(batch, group, int(at[i]), min(wrong))
        seen |= own


def _refusal(batch: InputBatch, group: int, row: int, block: int) -> SchedulerOutputError:
    tapes, requests = batch.rows.block_ids[group], batch.rows.requests
    held_by = [i for i, tape in enumerate(tapes) if tape is not None and block in tape.tolist()]
    others = [occupied(requests[i]).req_id for i in held_by if i != row]
    also = (
        f"requests {', '.join(map(repr, others))} hold it too"
        if others
        else "it is in its list more than once"
    )
    return SchedulerOutputError(
        f"request {occupied(requests[row]).req_id!r} may write block {block} of KV group {group}, and "
        + (also if block else "that is the null block")
        + ": a block that a step may write has one holder; share only blocks that are computed wholly, and copy "
        "others to a block of the request's own (block_copies)"
    )
