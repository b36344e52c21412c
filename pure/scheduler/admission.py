"""Admission: waiting requests get a row and blocks, in line, as long as budget and blocks last."""

import math
from collections.abc import Sequence
from itertools import product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape
from purestep.pure.blocks import allocate, find, release, retain
from purestep.pure.persistent import Heap, pop, push
from purestep.pure.record import record, replace
from purestep.pure.records.block_pool import BlockPool
from purestep.pure.records.queue import Queue, RequestState, Residence, TokenLog, Waiting
from purestep.pure.scheduler.memory import NEVER, held_by, in_line, tidied, with_chain
from purestep.pure.scheduler.rows import Newcomer, add_rows, length_limit
from purestep.pure.scheduler.sharing import Copies


@record
class Beginning:
    """What a request can begin with: blocks that are computed already, and one of each group to copy from."""

    num_computed: int
    shared: tuple[NDArray[np.int32], ...]  # per KV group
    sources: tuple[int | None, ...]  # per KV group: block that holds the tokens behind the shared blocks
    may_offer: bool = True


@record
class Taken:
    """Blocks for a request, and the pools without them."""

    pools: tuple[BlockPool, ...]  # per KV group
    blocks: tuple[Tape, ...]  # per KV group
    copies: Copies


@record
class Admitted:
    """A request that has been given a row and blocks."""

    newcomer: Newcomer
    num_scheduled: int
    copies: Copies
    is_new: bool  # it never ran before


def admit(queue: Queue, budget: int) -> tuple[Queue, tuple[Admitted, ...]]:
    """The queue with waiting requests in rows, and what they do in this step, `budget` tokens in all.

    Strictly in line: whoever can not be served blocks those behind. A request is given blocks for all its known
    tokens at once, so that a prefill that has begun is never short of them, and for the horizon. While others run it
    waits for all that, and one that was preempted for a block more for each of them: without it, it would soon be
    thrown out again.
    """
    queue = _release_forks(queue)
    admitted: list[Admitted] = []
    num_rows = queue.config.max_num_reqs - num_held_rows(queue)
    while budget > 0 and len(queue.running) + len(admitted) < num_rows:
        queue, state = _first_in_line(queue)
        if state is None or state.num_in_flight or queue.waiting.blocked == (state.ticket, queue.pools):
            break
        queue, new = _try_first(queue, state, budget, len(queue.running) + len(admitted))
        if new is None:
            break
        admitted.append(new)
        budget -= new.num_scheduled
    running = add_rows(queue.running, [new.newcomer for new in admitted])
    return replace(queue, running=running), tuple(admitted)


def num_held_rows(queue: Queue) -> int:
    """Rows of the device that steps on their way may still write, though their requests have left."""
    if not queue.in_flight:
        return 0
    ran = set[int]().union(*[step.ticket.tolist() for step in queue.in_flight])
    return len(ran.difference(queue.running.facts.ticket.tolist()))


def _release_forks(queue: Queue) -> Queue:
    """Forks stand in line from when their parent's prompt is computed, or when there is no parent any more."""
    waiting = queue.waiting
    if not waiting.forks:
        return queue
    facts, counts = queue.running.facts, queue.running.counts
    prompts = facts.ticket[counts.num_settled >= facts.num_prompt].tolist()
    unready = {ticket for ticket in waiting.forks if _is_live(queue, ticket)}.difference(prompts)
    line, states = waiting.line, waiting.states
    for ticket in waiting.forks:
        for fork in () if ticket in unready else waiting.forks[ticket]:
            state = states.get(fork)
            assert state is not None, "a fork has left, and still waits for its parent"
            line = push(line, in_line(state))
    forks = MappingProxyType({ticket: forks for ticket, forks in waiting.forks.items() if ticket in unready})
    return replace(queue, waiting=replace(waiting, line=line, forks=forks))


def _is_live(queue: Queue, ticket: int) -> bool:
    return ticket in queue.waiting.states or bool((queue.running.facts.ticket == ticket).any())


def _first_in_line(queue: Queue) -> tuple[Queue, RequestState | None]:
    """The first waiting request, and the queue without the dead entries before it."""
    waiting = queue.waiting
    line: Heap | None = waiting.line
    while line is not None and line[0][-1] not in waiting.states:
        _, line = pop(line)
    if line is not waiting.line:
        queue = replace(queue, waiting=replace(waiting, line=line))
    return queue, None if line is None else waiting.states.get(line[0][-1])


def _try_first(
    queue: Queue, state: RequestState, budget: int, num_running: int
) -> tuple[Queue, Admitted | None]:
    """The queue with the first request in line taken out of it, or blocked."""
    config, num_tokens = queue.config, len(state.tokens)
    num_prompt, params = len(state.request.prompt_token_ids), state.request.sampling_params
    limit = length_limit(params, num_prompt, min(config.max_model_len, config.capacity + 1))
    ahead = max(num_tokens, min(num_tokens + config.block_horizon, limit) - 1)
    spare = num_running if state.num_preemptions else 0
    state, beginnings = _beginnings(queue, state)
    for target, beginning in product((ahead,) if num_running else (ahead, num_tokens), beginnings):
        taken = _take(queue, beginning, target, spare)
        if taken is not None:
            queue, residence = _move_in(queue, taken, beginning)
            is_new = state.num_cached_tokens is None
            num_cached = beginning.num_computed if is_new else state.num_cached_tokens
            return queue, Admitted(
                newcomer=Newcomer(
                    state=replace(state, num_cached_tokens=num_cached),
                    residence=residence,
                    length_limit=limit,
                    num_computed=beginning.num_computed,
                    num_covered=covered(queue, residence.blocks),
                    next_offer=_next_offer(queue, beginning, num_tokens),
                ),
                num_scheduled=min(
                    num_tokens - beginning.num_computed,
                    budget,
                    config.long_prefill_token_threshold or num_tokens,
                ),
                copies=taken.copies,
                is_new=is_new,
            )
    states = queue.waiting.states.with_items([(state.ticket, state)])  # with its block keys
    waiting = Waiting(states, queue.waiting.line, queue.waiting.forks, (state.ticket, queue.pools))
    return replace(queue, waiting=waiting), None


def covered(queue: Queue, blocks: Sequence[Tape]) -> int:
    """Tokens that these blocks have room for."""
    return min(len(tape) * size for tape, size in zip(blocks, queue.config.block_sizes, strict=True))


def _beginnings(queue: Queue, state: RequestState) -> tuple[RequestState, list[Beginning]]:
    """The request with its block keys, and what it could begin with, best first."""
    forked = _forked(queue, state)
    if forked is not None:
        return state, [forked]
    if not queue.config.enable_prefix_caching or state.request.sampling_params.prompt_logprobs is not None:
        return state, [_beginning(queue, [()] * len(queue.pools), 0)]
    state = with_chain(queue, state, state.tokens)
    assert state.chain is not None
    sizes = queue.config.block_sizes
    found = [find(pool, keys) for pool, keys in zip(queue.pools, state.chain[1], strict=True)]
    num_hit = min(len(blocks) * size for blocks, size in zip(found, sizes, strict=True))
    num_hit = min(
        num_hit, len(state.tokens) - 1
    )  # the last token must be computed to be followed by another one
    whole = num_hit // math.lcm(*sizes) * math.lcm(*sizes)  # needs no copies, whose sources take room
    return state, [
        _beginning(queue, found, num_computed) for num_computed in sorted({num_hit, whole}, reverse=True)
    ]


def _forked(queue: Queue, state: RequestState) -> Beginning | None:
    """All of the parent's prompt but its last token, which is computed again to be followed by another one."""
    if state.parent is None or state.num_cached_tokens is not None:
        return None
    rows = np.flatnonzero(queue.running.facts.ticket == state.parent)
    num_prompt, request = len(state.tokens), state.request
    if not len(rows) or queue.running.counts.num_settled[rows[0]] < num_prompt:
        return None
    parent, residence = queue.running.states[rows[0]].request, queue.running.residences[rows[0]]
    if (parent.adapter, parent.salt) != (request.adapter, request.salt):
        return None
    if request.sampling_params.prompt_logprobs is not None:  # needs the logits of every prompt token
        return None
    blocks = [held_by(residence, group) for group in range(len(queue.pools))]
    beginning = _beginning(queue, blocks, num_prompt - 1)
    return replace(beginning, may_offer=residence.may_offer)


def _beginning(
    queue: Queue, blocks: Sequence[Sequence[int] | NDArray[np.int32]], num_computed: int
) -> Beginning:
    """So many tokens of a request that these blocks are of."""
    sizes = queue.config.block_sizes
    return Beginning(
        num_computed,
        shared=tuple(
            np.asarray(ids[: num_computed // size], np.int32) for ids, size in zip(blocks, sizes, strict=True)
        ),
        sources=tuple(
            int(ids[num_computed // size]) if num_computed % size else None
            for ids, size in zip(blocks, sizes, strict=True)
        ),
    )


def _take(queue: Queue, beginning: Beginning, target: int, spare: int) -> Taken | None:
    """Blocks to cover `target` tokens; None if fewer than `spare` would be left."""
    pools, taken, copies = [], [], []
    for pool, size, shared, source in zip(
        queue.pools, queue.config.block_sizes, beginning.shared, beginning.sources, strict=True
    ):
        needed = -(-target // size) - len(shared)
        kept = () if source is None else (source,)  # not evicted before it is copied
        pool = retain(retain(pool, shared), kept)
        if needed + spare > pool.num_available:
            return None
        pool, fresh = allocate(pool, needed)
        pools.append(release(pool, kept))
        taken.append(Tape.of(shared).extend(fresh))
        copies.append(None if source is None else (source, int(fresh[0])))
    return Taken(tuple(pools), tuple(taken), tuple(copies))


def _move_in(queue: Queue, taken: Taken, beginning: Beginning) -> tuple[Queue, Residence]:
    """The queue without the first request in line, and what that holds from now on."""
    waiting, log = queue.waiting, queue.log
    first, line = pop(waiting.line)
    residence = Residence(
        slot=log.free_slots[-1],
        log_start=log.num_lines,
        blocks=taken.blocks,
        num_borrowed=tuple([len(ids) for ids in beginning.shared]),
        num_offered=beginning.num_computed,
        may_offer=beginning.may_offer,
    )
    queue = replace(
        queue,
        waiting=tidied(Waiting(waiting.states.without([first[-1]]), line, waiting.forks)),
        pools=taken.pools,
        log=TokenLog(log.lines, log.width, log.free_slots[:-1]),
    )
    return queue, residence


def _next_offer(queue: Queue, beginning: Beginning, num_tokens: int) -> int:
    """Settled tokens at which the request has another block for the prefix cache."""
    if not queue.config.enable_prefix_caching or not beginning.may_offer:
        return NEVER
    smallest = min(queue.config.block_sizes)
    first = (beginning.num_computed // smallest + 1) * smallest
    return first if first <= num_tokens else NEVER
