"""Room for the next token: blocks are granted by horizon, and under pressure requests wait or are preempted.

When one row lacks room, all rows are given blocks for the next `block_horizon` tokens, so that a steady batch changes
its block tables once in so many steps. That is done only while at least as much stays available as is given, and
nobody is preempted while a row holds blocks ahead of need: who lacks one then sits out until they are used up.
Drafts come last: they take what budget the known tokens leave, and if blocks are short for them, none is verified.
So do further steps: if blocks are short for them, there is one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy.typing import NDArray

from purestep.pure.arrays import frozen, with_items
from purestep.pure.blocks import allocate
from purestep.pure.record import record, replace
from purestep.pure.records.queue import Queue, RequestState, Residence
from purestep.pure.records.scheduler_output import NOTHING, BlockIds
from purestep.pure.scheduler.drafts import num_drafts
from purestep.pure.scheduler.memory import leave
from purestep.pure.scheduler.rows import with_residences
from purestep.pure.scheduler.sharing import Copies, copies_into, own_again, without_copied

Tokens = Int32[np.ndarray, " rows"]


@record
class Served:
    """What the running requests do in a step. `queue` has their new blocks, and no preempted ones."""

    queue: Queue
    num_scheduled: Int32[np.ndarray, " rows"]
    new_block_ids: Mapping[str, BlockIds]
    copies: Mapping[str, Copies] = NOTHING
    preempted: tuple[RequestState, ...] = ()
    num_steps: int = 1


@record
class Given:
    """Blocks that rows were given, and the queue with them."""

    queue: Queue
    new_block_ids: dict[str, BlockIds]
    copies: dict[str, Copies]  # into the first of the new blocks


def serve_running(queue: Queue, num_steps: int = 1) -> Served:
    """Each running request's next tokens and drafts, in order, within the budget, and blocks for them.

    The tokens of `num_steps` steps, where all do nothing but decode and nobody waits, and there are blocks for it.
    """
    wanted = _wanted(queue)
    further = _further_steps(queue, wanted, num_steps) if num_steps > 1 else None
    served = None if further is None else _give(queue, frozen(wanted + further))
    if served is not None:
        return replace(served, num_steps=num_steps)
    drafts = num_drafts(queue, wanted) if queue.config.num_spec_tokens else None
    served = None if drafts is None else _serve(queue, wanted, drafts)
    return served or _serve(queue, wanted) or _press(queue, wanted)


def _serve(queue: Queue, wanted: Tokens, drafts: Tokens | None = None) -> Served | None:
    """The wanted tokens, and drafts as far as the budget goes then, if there are blocks for all of it."""
    num_scheduled = _within_budget(queue.config.max_num_batched_tokens, wanted)
    if drafts is not None:
        left = queue.config.max_num_batched_tokens - int(num_scheduled.sum())
        num_scheduled = frozen(num_scheduled + _within_budget(left, drafts))
    return _give(queue, num_scheduled)


def _give(queue: Queue, num_scheduled: Tokens) -> Served | None:
    """These tokens, if there are blocks for all of them."""
    lacking = _lacking(queue, num_scheduled)
    if not lacking.any():
        return Served(queue, num_scheduled, NOTHING)
    return _extend_all(queue, num_scheduled) or _extend_lacking(queue, num_scheduled, lacking)


def _further_steps(queue: Queue, wanted: Tokens, num_steps: int) -> Tokens | None:
    """Tokens of each row in the steps behind the first of so many; None if they are not to be taken at once.

    They are where whoever goes on ran in the last step too and says its next token in this one, and somebody takes all
    of them. Rows at their limits only wait to be told of it.
    """
    counts, config = queue.running.counts, queue.config
    left = queue.running.facts.length_limit - counts.num_tokens
    goes_on = left > 0
    decodes = (wanted == 1) & (counts.num_tokens - counts.num_computed == 1) & counts.ran
    if (
        config.num_spec_tokens
        or len(queue.waiting)
        or int(left.max(initial=0)) < num_steps
        or int(wanted.sum()) > config.max_num_batched_tokens
        or not decodes[goes_on].all()
    ):
        return None
    further: Tokens = np.where(goes_on, np.minimum(left, num_steps) - 1, 0).astype(np.int32)
    return further


def _wanted(queue: Queue) -> Tokens:
    """Tokens that each row could compute now."""
    counts, config = queue.running.counts, queue.config
    pending = counts.num_tokens > counts.num_known
    if (
        config.async_scheduling
    ):  # a row that sat out comes back as the host knows it, so nothing may be on its way
        pending = (pending | (counts.num_settled < counts.num_computed)) & ~counts.ran
    wanted: Tokens = counts.num_tokens - counts.num_computed
    waits = pending | (counts.num_tokens >= queue.running.facts.length_limit)
    if waits.any():
        wanted = np.where(waits, 0, wanted).astype(np.int32)
    if config.long_prefill_token_threshold is not None:
        wanted = np.minimum(wanted, config.long_prefill_token_threshold).astype(np.int32)
    return wanted


def _lacking(queue: Queue, num_scheduled: Tokens) -> NDArray[np.bool_]:
    """Which rows of the step have too few blocks for it. One that gave up its open block may sit out without."""
    counts = queue.running.counts
    lacking: NDArray[np.bool_] = counts.num_computed + num_scheduled > counts.num_covered
    return lacking & (num_scheduled > 0)


def _within_budget(budget: int, wanted: Tokens) -> Tokens:
    """The wanted tokens, cut where those before have used up the budget."""
    if wanted.sum() <= budget:
        return wanted
    before = np.cumsum(wanted) - wanted
    cut: Tokens = np.clip(budget - before, 0, wanted).astype(np.int32)
    return cut


def _extend_all(queue: Queue, num_scheduled: Tokens) -> Served | None:
    """Blocks for all rows of the step up to the horizon, if as much again stays available."""
    counts, facts = queue.running.counts, queue.running.facts
    ahead = np.minimum(counts.num_tokens + queue.config.block_horizon, facts.length_limit) - 1
    target = np.where(num_scheduled > 0, np.maximum(ahead, counts.num_computed + num_scheduled), 0)
    missing = _missing(queue, target)
    if any(2 * n > pool.num_available for n, pool in zip(_needed(queue, missing), queue.pools, strict=True)):
        return None
    given = _extend(queue, missing)
    return Served(given.queue, num_scheduled, given.new_block_ids, given.copies)


def _extend_lacking(queue: Queue, num_scheduled: Tokens, lacking: NDArray[np.bool_]) -> Served | None:
    """Blocks for what the rows do in this step, if there are enough."""
    missing = _missing(queue, np.where(lacking, queue.running.counts.num_computed + num_scheduled, 0))
    if any(n > pool.num_available for n, pool in zip(_needed(queue, missing), queue.pools, strict=True)):
        return None
    given = _extend(queue, missing)
    return Served(given.queue, num_scheduled, given.new_block_ids, given.copies)


def _press(queue: Queue, wanted: Tokens) -> Served:
    """Not all can go on. Row by row: take a block, or sit out, or have the last row preempted.

    A row sits out while another one that can go on holds blocks ahead of need, and when it is the last itself:
    to preempt it would give nobody anything. So the first row always gets on, or one that will run short later.
    """
    new_block_ids: dict[str, list[list[int]]] = {}
    copies: dict[str, Copies] = {}
    preempted: list[RequestState] = []
    while True:
        counts = queue.running.counts
        num_scheduled = _within_budget(queue.config.max_num_batched_tokens, wanted)
        lacking = np.flatnonzero(_lacking(queue, num_scheduled))
        if not len(lacking):
            break
        row, last = int(lacking[0]), len(queue.running) - 1
        target = np.zeros(last + 1, np.int32)
        target[row] = counts.num_computed[row] + num_scheduled[row]
        missing = _missing(queue, target)
        short = [n > p.num_available for n, p in zip(_needed(queue, missing), queue.pools, strict=True)]
        if not any(short):
            new = _extend(queue, missing)
            queue, copies = new.queue, copies | new.copies
            for req_id, groups in new.new_block_ids.items():
                own = new_block_ids.setdefault(req_id, [[] for _ in groups])
                new_block_ids[req_id] = [a + list(b) for a, b in zip(own, groups, strict=True)]
        elif row == last or _held_ahead(queue, wanted, short):
            wanted = with_items(wanted, row, 0)
        else:
            queue, states = leave(queue, [last])
            preempted += states
            wanted = wanted[:last]
    running_ids = set(queue.running.req_ids)
    given = {
        req_id: tuple([tuple(ids) for ids in groups])
        for req_id, groups in new_block_ids.items()
        if req_id in running_ids
    }
    copies = {req_id: pairs for req_id, pairs in copies.items() if req_id in running_ids}
    return Served(queue, frozen(num_scheduled), given, copies, tuple(preempted))


def _held_ahead(queue: Queue, wanted: Tokens, short: Sequence[Any]) -> bool:
    """Whether a row that can go on holds more than it needs for its known tokens, in a group that is short."""
    counts = queue.running.counts
    has_work = (wanted > 0) | (counts.num_tokens > counts.num_known)
    goes_on = has_work & (counts.num_computed + wanted <= counts.num_covered)
    ahead = [
        _held(queue, group) > -(-counts.num_tokens // size)
        for group, (size, is_short) in enumerate(zip(queue.config.block_sizes, short, strict=True))
        if is_short
    ]
    return bool((np.logical_or.reduce(ahead) & goes_on).any())


def _held(queue: Queue, group: int) -> NDArray[Any]:
    """Blocks that each row holds."""
    return np.array([len(residence.blocks[group]) for residence in queue.running.residences])


def _missing(queue: Queue, target: Tokens) -> list[NDArray[Any]]:
    """Blocks that each row lacks to cover so many tokens, per KV group."""
    sizes = queue.config.block_sizes
    return [np.maximum(-(-target // size) - _held(queue, group), 0) for group, size in enumerate(sizes)]


def _needed(queue: Queue, missing: Sequence[NDArray[Any]]) -> list[int]:
    """Blocks that have to come from the pools, per KV group, if rows are given those that they lack."""
    return [int(n.sum()) - len(own_again(queue, n, group)) for group, n in enumerate(missing)]


def _extend(queue: Queue, missing: Sequence[NDArray[Any]]) -> Given:
    """The queue with so many more blocks for each row, per KV group.

    A row that has a block to copy gets a copy of it in the first one, or that block itself if nobody else has it.
    """
    pools, running, sizes = [], queue.running, queue.config.block_sizes
    rows = np.flatnonzero(np.sum(missing, axis=0)).tolist()
    new_ids: list[list[tuple[int, ...]]] = []  # per KV group, then row
    for group, (pool, num_blocks) in enumerate(zip(queue.pools, missing, strict=True)):
        own = own_again(queue, num_blocks, group)
        taken = with_items(num_blocks, list(own), num_blocks[list(own)] - 1) if own else num_blocks
        pool, fresh = allocate(pool, int(taken.sum()))
        pools.append(pool)
        ids, ends = fresh.tolist(), np.cumsum(taken[rows]).tolist()
        given = [tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        new_ids.append(
            [(own[row], *new) if row in own else new for row, new in zip(rows, given, strict=True)]
        )
    new_block_ids = dict(zip((running.req_ids[row] for row in rows), zip(*new_ids, strict=True), strict=True))
    residences = {
        row: _longer(running.residences[row], new)
        for row, new in zip(rows, new_block_ids.values(), strict=True)
    }
    covered = running.counts.num_covered.copy()
    covered[rows] = [
        min([len(tape) * size for tape, size in zip(residence.blocks, sizes, strict=True)])
        for residence in residences.values()
    ]
    running = with_residences(running, residences)
    running = replace(running, counts=replace(running.counts, num_covered=frozen(covered)))
    copies = {
        running.req_ids[row]: copies_into(old, new_block_ids[running.req_ids[row]])
        for row in rows
        if (old := queue.running.residences[row]).sources
    }
    queue = replace(queue, running=running, pools=tuple(pools))
    return Given(without_copied(queue, list(copies.values())), new_block_ids, copies)


def _longer(residence: Residence, new: BlockIds) -> Residence:
    """`replace` written out: a step that grants a horizon calls it for every row."""
    return Residence(
        residence.slot,
        residence.log_start,
        tuple([tape.extend(ids) for tape, ids in zip(residence.blocks, new, strict=True)]),
        residence.num_borrowed,
        residence.num_offered,
        residence.may_offer,
    )  # and no sources: the first of the new blocks is a copy of them
