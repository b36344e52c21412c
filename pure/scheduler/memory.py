"""Blocks of running requests: offered to the prefix cache, given back, found again."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, appended, frozen
from purestep.pure.blocks import chain_keys, offer, release, root_key, withdraw
from purestep.pure.persistent import heap_of, num_in, push
from purestep.pure.record import replace
from purestep.pure.records.block_pool import BlockPool
from purestep.pure.records.queue import Queue, RequestState, Residence, TokenLog, Waiting
from purestep.pure.scheduler.rows import drop_rows, tokens_of, with_residences

NEVER = np.iinfo(np.int32).max
SLACK = 64  # entries of the line that are not worth cleaning up


def with_chain(queue: Queue, state: RequestState, tokens: Tape) -> RequestState:
    """The request with the keys of all full blocks of its tokens, for the parameters in use. Known keys are kept."""
    root = root_key(queue.kv_version.root, state.request.adapter, state.request.salt)
    sizes = queue.config.block_sizes
    known: tuple[tuple[bytes, ...], ...] = ((),) * len(sizes)
    if state.chain is not None and state.chain[0] == root:
        known = state.chain[1]
        if all(len(keys) == len(tokens) // size for keys, size in zip(known, sizes, strict=True)):
            return state
    by_size: dict[int, tuple[bytes, ...]] = {}
    for keys, size in zip(known, sizes, strict=True):
        if size not in by_size:
            parent = keys[-1] if keys else root
            by_size[size] = keys + chain_keys(parent, tokens[len(keys) * size :], size)
    return replace(state, chain=(root, tuple([by_size[size] for size in sizes])))


def offer_settled(queue: Queue, rows: Sequence[int]) -> Queue:
    """The queue with these requests' prompt blocks in the prefix cache, as far as they are settled."""
    if not rows:
        return queue
    running, pools = queue.running, queue.pools
    states, residences = list(running.states), dict[int, Residence]()
    offers: list[tuple[RequestState, Residence, int]] = []
    next_offer = running.counts.next_offer.copy()
    smallest = min(queue.config.block_sizes)
    for row in rows:
        state, residence = states[row], running.residences[row]
        num_tokens, settled = len(state.tokens), int(running.counts.num_settled[row])
        later = (settled // smallest + 1) * smallest
        next_offer[row] = later if later <= num_tokens else NEVER
        states[row] = state = with_chain(queue, state, state.tokens)
        settled = min(settled, num_tokens)
        offers.append((state, residence, settled))
        if residence.may_offer:
            residences[row] = replace(residence, num_offered=settled)
    pools = _offer(queue, pools, offers)
    running = replace(
        running, states=tuple(states), counts=replace(running.counts, next_offer=frozen(next_offer))
    )
    return replace(queue, running=with_residences(running, residences), pools=pools)


def leave(
    queue: Queue, rows: Sequence[int], poisoned: Collection[int] = ()
) -> tuple[Queue, tuple[RequestState, ...]]:
    """The queue without these running requests, their blocks given back, and their states with all known tokens.

    Their settled blocks, generated ones too, are offered to the prefix cache first. Blocks of poisoned rows are not,
    and those that they had put there before are withdrawn.
    """
    if not rows:
        return queue, ()
    running, pools, states = queue.running, queue.pools, []
    offers: list[tuple[RequestState, Residence, int]] = []
    for row in rows:
        state = replace(running.states[row], tokens=tokens_of(queue, row))
        residence = running.residences[row]
        if row in poisoned:
            own = [blocks[n:] for blocks, n in zip(residence.blocks, residence.num_borrowed, strict=True)]
            pools = tuple([withdraw(pool, blocks) for pool, blocks in zip(pools, own, strict=True)])
        elif queue.config.enable_prefix_caching:
            state = with_chain(queue, state, state.tokens)
            offers.append((state, residence, int(running.counts.num_settled[row])))
        states.append(state)
    pools = _offer(queue, pools, offers)
    gone = [running.residences[row] for row in rows]
    held = [_backwards([held_by(residence, g) for residence in gone]) for g in range(len(pools))]
    slots = queue.log.free_slots + tuple([residence.slot for residence in gone])
    queue = replace(
        queue,
        running=drop_rows(running, rows),
        pools=tuple([release(pool, blocks) for pool, blocks in zip(pools, held, strict=True)]),
        log=TokenLog(queue.log.lines, queue.log.width, slots),
        drafts=without_drafts(queue.drafts, [state.ticket for state in states]),
    )
    return queue, tuple(states)


def without_drafts(
    drafts: Mapping[int, tuple[int, ...]], tickets: Collection[int]
) -> Mapping[int, tuple[int, ...]]:
    """The drafts of all but these."""
    if not drafts:
        return drafts
    return MappingProxyType({ticket: own for ticket, own in drafts.items() if ticket not in tickets})


def put_back(queue: Queue, states: Sequence[RequestState]) -> Queue:
    """The queue with these requests, which have just left their rows, at the front of the line of their priority."""
    line, waiting, news = queue.waiting.line, [], queue.news
    for state in states:
        num_in_flight = sum(bool((step.ticket == state.ticket).any()) for step in queue.in_flight)
        state = replace(state, num_preemptions=state.num_preemptions + 1, num_in_flight=num_in_flight)
        waiting.append((state.ticket, state))
        line = push(line, in_line(state))
    preempted = news.preempted_req_ids | {state.request.req_id for state in states}
    return replace(
        queue,
        waiting=Waiting(queue.waiting.states.with_items(waiting), line, queue.waiting.forks),
        news=replace(news, preempted_req_ids=preempted),
    )


def in_line(state: RequestState) -> tuple[int, int, int, int]:
    """A request's place in the line: those that were preempted stand in front of their priority."""
    return state.request.priority, 0 if state.num_preemptions else 1, state.request.arrival, state.ticket


def tidied(waiting: Waiting) -> Waiting:
    """Without entries in line of requests that have left, once they are most of it: constant time, amortised."""
    if num_in(waiting.line) <= 2 * len(waiting) + SLACK:
        return waiting
    forks = {fork for forks in waiting.forks.values() for fork in forks}
    line = heap_of(in_line(state) for ticket, state in waiting.states.items() if ticket not in forks)
    return Waiting(waiting.states, line, waiting.forks, waiting.blocked)


def _offer(
    queue: Queue, pools: tuple[BlockPool, ...], offers: Sequence[tuple[RequestState, Residence, int]]
) -> tuple[BlockPool, ...]:
    """The pools with these requests' blocks in the prefix cache: those wholly below what is settled of each."""
    offered = []
    for group, (pool, size) in enumerate(zip(pools, queue.config.block_sizes, strict=True)):
        keys: list[bytes] = []
        ids: list[int] = []
        for state, residence, settled in offers:
            if state.chain is not None and residence.may_offer:
                span = slice(residence.num_offered // size, settled // size)
                keys += state.chain[1][group][span]
                ids += residence.blocks[group][span].tolist()
        offered.append(offer(pool, keys, ids))
    return tuple(offered)


def held_by(residence: Residence, group: int) -> NDArray[np.int32]:
    """What a request holds of a KV group: its blocks, and behind them the one that it has yet to copy."""
    blocks = residence.blocks[group].array
    source = residence.sources[group] if residence.sources else None
    return blocks if source is None else appended(blocks, source)


def _backwards(blocks: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Last blocks first: the beginnings of prompts are worth the most, and are evicted last."""
    return np.concatenate([ids[::-1] for ids in blocks])
