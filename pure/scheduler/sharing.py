"""Blocks with several holders: what is full is read by all of them, what would be written is copied first.

Before another holder is added, a request gives up the block that its next token would go to, and those behind it. It
keeps a hold on the first of them, its source: the next block that it gets is a copy of that, or the source itself, if
nobody else holds it any more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy.typing import NDArray

from purestep.pure.arrays import frozen
from purestep.pure.blocks import release
from purestep.pure.errors import InvalidRequestError
from purestep.pure.record import record, replace
from purestep.pure.records.queue import Queue, Residence
from purestep.pure.scheduler.drafts import num_computed_least

Copies = tuple[tuple[int, int] | None, ...]  # per KV group: (source, target)
BlockCopies = tuple[tuple[tuple[int, int], ...], ...]  # per KV group


@record
class Shareable:
    """Requests whose blocks are full, so that others may hold them too; the queue with them."""

    queue: Queue
    kept: Mapping[str, tuple[int, ...]]  # how many blocks requests kept that had more, per KV group


def give_up_open_blocks(queue: Queue, rows: Sequence[int]) -> Shareable:
    """These running requests without the blocks that are not computed wholly.

    Raises:
        InvalidRequestError: drafts of one of them are on their way, so that nobody knows yet which blocks those are.
    """
    running, sizes = queue.running, queue.config.block_sizes
    least = num_computed_least(queue)
    if least is not running.counts.num_computed and (least < running.counts.num_computed)[list(rows)].any():
        raise InvalidRequestError(
            f"blocks of {len(rows)} requests are to be shared, and drafts of theirs are on their way: take in the "
            "outputs of the steps in flight first"
        )
    more = []
    for row in rows:
        computed = running.counts.num_computed.item(row)
        full = tuple([computed // size for size in sizes])
        if full != tuple(map(len, running.residences[row].blocks)):
            more.append((row, computed, full))
    if not more:
        return Shareable(queue, {})
    residences = list(running.residences)
    given_up: list[list[NDArray[np.int32]]] = [[] for _ in sizes]
    covered, kept = running.counts.num_covered.copy(), dict[str, tuple[int, ...]]()
    for row, computed, full in more:
        old = running.residences[row]
        sources: list[int | None] = []
        for group, (tape, n, size) in enumerate(zip(old.blocks, full, sizes, strict=True)):
            is_open = computed % size > 0
            sources.append(tape[n] if is_open else None)
            given_up[group].append(tape[n + is_open :])
        blocks = tuple([tape.truncate(n) for tape, n in zip(old.blocks, full, strict=True)])
        held = tuple(sources) if any(source is not None for source in sources) else ()
        residences[row] = replace(old, blocks=blocks, sources=held)
        covered[row] = min([n * size for n, size in zip(full, sizes, strict=True)])
        kept[running.req_ids[row]] = full
    running = replace(
        running, residences=tuple(residences), counts=replace(running.counts, num_covered=frozen(covered))
    )
    pools = tuple([release(p, np.concatenate(ids)) for p, ids in zip(queue.pools, given_up, strict=True)])
    return Shareable(replace(queue, running=running, pools=pools), kept)


def own_again(queue: Queue, num_blocks: Int32[np.ndarray, " rows"], group: int) -> dict[int, int]:
    """Of rows that are about to be given so many blocks, those that nobody else shares their source with by then."""
    residences = queue.running.residences
    rows = [row for row in np.flatnonzero(num_blocks).tolist() if residences[row].sources]
    sources = {row: source for row in rows if (source := residences[row].sources[group]) is not None}
    blocks = list(dict.fromkeys(sources.values()))
    holders = queue.pools[group].refcounts[np.array(blocks, np.int32)].tolist()
    left, own = dict(zip(blocks, holders, strict=True)), dict[int, int]()
    for row, source in sources.items():
        if left[source] == 1:
            own[row] = source
        else:
            left[source] -= 1  # who has copied it holds it no longer
    return own


def copies_into(residence: Residence, new: Sequence[Sequence[int]]) -> Copies:
    """What is to be copied into the first of a request's new blocks, per KV group."""
    return tuple(
        [
            None if source is None or source == ids[0] else (source, ids[0])
            for source, ids in zip(residence.sources, new, strict=True)
        ]
    )


def without_copied(queue: Queue, copies: Sequence[Copies]) -> Queue:
    """The queue whose requests hold no longer what is copied; the step copies before anything is written."""
    if not copies:
        return queue
    sources = [[pair[0] for pair in group if pair is not None] for group in zip(*copies, strict=True)]
    return replace(queue, pools=tuple([release(p, ids) for p, ids in zip(queue.pools, sources, strict=True)]))


def block_copies(copies: Sequence[Copies], num_groups: int) -> BlockCopies:
    """A step's copies, per KV group, all to be read before any is written; () for none at all.

    A source that is itself the target of a copy before it is taken from where that one is copied from.
    """
    groups = []
    for group in range(num_groups):
        origin: dict[int, Any] = {}
        for source, target in (pair for own in copies if (pair := own[group]) is not None):
            origin[target] = origin.get(source, source)
        groups.append(tuple([(source, target) for target, source in origin.items()]))
    return tuple(groups) if any(groups) else ()
