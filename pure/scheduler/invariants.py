"""What holds of every queue, between any two calls."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from purestep.pure.persistent import Heap, num_in, pop
from purestep.pure.records.block_pool import BlockPool
from purestep.pure.records.queue import Queue
from purestep.pure.scheduler.drafts import num_computed_least
from purestep.pure.scheduler.memory import SLACK, held_by
from purestep.pure.scheduler.rows import rank, tokens_of


def check_invariants(queue: Queue) -> None:
    """Raise unless every block is accounted for, blocks have one writer, and columns agree with what they are about.

    For tests: it looks at every block, request and token. Raises: AssertionError that says what does not hold.
    """
    for group, pool in enumerate(queue.pools):
        held = Counter(block for own in queue.running.residences for block in held_by(own, group).tolist())
        held.update(block for blocks in queue.moments.values() for block in blocks[group].tolist())
        _check_pool(pool, held)
        _check_writers(queue, group)
    _check_columns(queue)
    _check_requests(queue)


def _check_pool(pool: BlockPool, held: Counter[int]) -> None:
    refcounts = pool.refcounts.array
    counts = {block: int(refcounts[block]) for block in np.flatnonzero(refcounts).tolist()}
    assert counts == dict(held), f"reference counts {counts} are not the holders {dict(held)}"
    assert 0 not in held, "the null block is held"
    free = pool.free[pool.free_head :].tolist()
    entries = pool.idle[pool.idle_head :]
    places = np.arange(pool.idle_head, len(pool.idle))
    idle = entries[pool.idle_at[entries] == places].tolist()
    everything = sorted([*free, *idle, *held])
    assert everything == list(range(1, len(pool.refcounts))), (
        f"free {free}, idle {idle} and held {sorted(held)} blocks are not each block but the null block once"
    )
    assert pool.num_idle == len(idle) == int((pool.idle_at.array >= 0).sum()), "idle blocks are miscounted"
    keys = dict(pool.key_of.items())
    assert {key: block for block, key in keys.items()} == dict(pool.block_of.items()), (
        "keys and blocks disagree"
    )
    assert len(keys) == len(pool.key_of) == len(pool.block_of), "two blocks have one key"
    assert set(idle) <= set(keys), "an idle block is not cached"
    assert not set(free) & set(keys), "a free block is cached"


def _check_writers(queue: Queue, group: int) -> None:
    """What steps to come may write has one holder, and the prefix cache is none."""
    pool, size, least = queue.pools[group], queue.config.block_sizes[group], num_computed_least(queue)
    refcounts = pool.refcounts.array
    for row, residence in enumerate(queue.running.residences):
        computed = int(least[row])
        for block in residence.blocks[group][computed // size :].tolist():
            req_id = queue.running.req_ids[row]
            assert refcounts[block] == 1, f"block {block}, which {req_id!r} writes, has other holders"
            assert block not in pool.key_of, f"block {block}, which {req_id!r} writes, is cached"


def _check_columns(queue: Queue) -> None:
    running, config = queue.running, queue.config
    facts, counts = running.facts, running.counts
    assert len(running.states) == len(running.residences) == len(running) <= config.max_num_reqs
    assert list(running.states) == sorted(running.states, key=rank), "rows are out of order"
    for row, (state, residence) in enumerate(zip(running.states, running.residences, strict=True)):
        assert running.req_ids[row] == state.request.req_id
        assert facts.ticket[row] == state.ticket and facts.slot[row] == residence.slot
        assert counts.num_known[row] == len(tokens_of(queue, row)), "the log has another number of tokens"
        room = min(
            len(blocks) * size for blocks, size in zip(residence.blocks, config.block_sizes, strict=True)
        )
        assert counts.num_covered[row] == room, "num_covered is not what the blocks have room for"
    assert (counts.num_settled <= num_computed_least(queue)).all()
    assert all(0 < len(drafts) <= config.num_spec_tokens for drafts in queue.drafts.values())
    assert queue.drafts.keys() <= set(facts.ticket.tolist()), "drafts of a request that does not run"
    copies = np.array([bool(residence.sources) for residence in running.residences], np.bool_)
    assert (copies | (counts.num_computed <= counts.num_covered)).all(), "blocks do not hold what is computed"
    assert (counts.num_computed <= counts.num_tokens).all() and (counts.num_known <= counts.num_tokens).all()
    assert (counts.num_tokens <= facts.length_limit).all() and (counts.num_known < facts.length_limit).all()
    slots = [*facts.slot.tolist(), *queue.log.free_slots]
    assert sorted(slots) == list(range(config.max_num_reqs)), "slots are not each taken or free"


def _check_requests(queue: Queue) -> None:
    waiting, running = dict(queue.waiting.states.items()), queue.running
    live = {state.request.req_id: ticket for ticket, state in waiting.items()}
    live |= zip(running.req_ids, running.facts.ticket.tolist(), strict=True)
    assert live == dict(queue.live.items()), "the live requests are not those that wait and run"
    assert len(queue.live) == len(waiting) + len(running), "a request is counted twice"
    forks = [ticket for tickets in queue.waiting.forks.values() for ticket in tickets]
    entries = list(_tickets(queue.waiting.line))
    assert len(entries) == num_in(queue.waiting.line) <= 2 * len(waiting) + SLACK, "most of the line has left"
    line = [ticket for ticket in entries if ticket in waiting]
    assert sorted([*line, *forks]) == sorted(waiting), "a waiting request is not in line once"
    assert all(state.num_in_flight <= len(queue.in_flight) for state in waiting.values())


def _tickets(line: Heap | None) -> Iterator[int]:
    while line is not None:
        first, line = pop(line)
        yield first[-1]
