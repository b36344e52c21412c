"""Going back and branching: moments hold blocks, and a fork goes on from another request's history.

A queue is a value, so an old one says who ran and waited then. Only the blocks belong to the present: a moment is a
holder of them from `hold` to `let_go`, and `go_back` takes the old queue with the present pools.
"""

from collections.abc import Hashable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import empty_column, frozen, taken, with_entry
from purestep.pure.blocks import release, retain, share
from purestep.pure.errors import DuplicateRequestError, InvalidRequestError, OutOfBlocksError, OutOfRowsError
from purestep.pure.persistent import push
from purestep.pure.record import record, replace
from purestep.pure.records.block_pool import BlockPool
from purestep.pure.records.queue import (
    News,
    Queue,
    Request,
    RequestState,
    Running,
    StepInFlight,
    TokenLog,
    Waiting,
)
from purestep.pure.scheduler.admission import num_held_rows
from purestep.pure.scheduler.kinds import WHOLE, check_ids, check_stream
from purestep.pure.scheduler.lifecycle import add, set_version
from purestep.pure.scheduler.memory import held_by, in_line
from purestep.pure.scheduler.rows import add_twin, tokens_of
from purestep.pure.scheduler.sharing import Shareable, give_up_open_blocks


@record
class Forked:
    """A queue with a fork in it."""

    queue: Queue
    kept: Mapping[str, tuple[int, ...]]  # as in Shareable, for the batch
    has_run: bool  # the batch knows the parent, and has to be given the fork
    goes_on: bool  # the fork sits in a row, as its parent does; else it is parked, or not known yet


def hold(queue: Queue, moment: Hashable) -> Shareable:
    """The queue in which a moment of this name holds the blocks of all running requests.

    What is in that queue, and in the batch whose requests `kept` so many blocks, is what there is to remember.

    Raises: InvalidRequestError for a name that is in use.
    """
    if moment in queue.moments:
        raise InvalidRequestError(
            f"hold({moment!r}): a moment of this name holds blocks already: choose another one, or let it go"
        )
    shareable = give_up_open_blocks(queue, range(len(queue.running)))
    queue = shareable.queue
    blocks = tuple([frozen(np.unique(_held(queue.running, group))) for group in range(len(queue.pools))])
    pools = tuple([share(pool, ids) for pool, ids in zip(queue.pools, blocks, strict=True)])
    moments = MappingProxyType({**queue.moments, moment: blocks})
    return Shareable(replace(queue, pools=pools, moments=moments), shareable.kept)


def let_go(queue: Queue, moment: Hashable) -> Queue:
    """The queue in which no moment of this name holds anything."""
    blocks = queue.moments.get(moment)
    if blocks is None:
        return queue
    pools = tuple([release(pool, ids) for pool, ids in zip(queue.pools, blocks, strict=True)])
    left = MappingProxyType({name: ids for name, ids in queue.moments.items() if name != moment})
    return replace(queue, pools=pools, moments=left)


def go_back(queue: Queue, then: Queue) -> Queue:
    """The queue that there was then, with the blocks, the prefix cache and the parameters that there are now.

    `then` is the queue of a moment that still holds its blocks. Where the parameters have changed since and KV was not
    to be kept, its requests wait to be computed anew.

    Raises: InvalidRequestError for what is no queue with these groups of blocks.
    """
    if not isinstance(then, Queue) or then.config != queue.config:
        raise InvalidRequestError(
            f"go_back to {type(then).__name__}: give a queue that came of this one: a Queue with the same config"
        )
    groups = range(len(queue.pools))
    pools = [
        retain(pool, _held(then.running, group)) for pool, group in zip(queue.pools, groups, strict=True)
    ]
    pools = [release(pool, _held(queue.running, group)) for pool, group in zip(pools, groups, strict=True)]
    now = queue.kv_version
    queue = replace(then, pools=tuple(pools), moments=queue.moments)
    if now == then.kv_version:
        return queue
    queue = set_version(queue, now.version, keep_kv=now.root == then.kv_version.root)
    return replace(queue, kv_version=now)


def fork(
    queue: Queue, req_id: str, new_req_id: str, *, arrival: int, stream: int | None, has_row: bool = True
) -> Forked:
    """The queue with a new request of the same history as a live one: its tokens, blocks and parameters.

    Tokens that are still on their way to the parent come to the fork too. From the next one on it draws from `stream`,
    or from its parent's if that is None.
    `has_row` says whether the batch has a row to give: without, the fork runs once all its tokens are known.

    Raises:
        InvalidRequestError: the parent neither runs nor waits; an id, arrival or stream of the wrong kind.
        DuplicateRequestError: the new id is in use.
        OutOfRowsError: the parent runs, and no row is left.
        OutOfBlocksError: the parent runs, and no block is left for what is not shared.
    """
    check_ids("fork", [req_id, new_req_id])
    if not isinstance(arrival, WHOLE):
        raise InvalidRequestError(f"fork as {new_req_id!r}: arrival={arrival!r}: it is a whole number")
    check_stream(new_req_id, 0 if stream is None else stream)
    ticket = queue.live.get(req_id)
    if ticket is None:
        raise InvalidRequestError(f"fork of {req_id!r}: no such request waits or runs; it may have ended")
    if new_req_id in queue.live:
        raise DuplicateRequestError(
            f"fork of {req_id!r} as {new_req_id!r}: this id is in use, choose another one"
        )
    waits = queue.waiting.states.get(ticket)
    if (
        waits is not None and waits.num_cached_tokens is None
    ):  # it has never run: there is nothing to share yet
        own = _request(waits, new_req_id, arrival, stream)
        return Forked(add(queue, replace(own, fork_of=req_id)), {}, has_run=False, goes_on=False)
    if waits is None:
        row = queue.running.req_ids.index(req_id)
        shareable = give_up_open_blocks(queue, [row])
        queue, kept = shareable.queue, shareable.kept
        goes_on = has_row and bool(queue.running.counts.ran[row])
        own = _request(queue.running.states[row], new_req_id, arrival, stream)
        running, pools, log = _run_along(queue, row, own, goes_on)
        waiting = queue.waiting
    else:
        kept, goes_on = {}, False
        running, pools, log = queue.running, queue.pools, queue.log
        waiting = _wait_along(queue, waits, _request(waits, new_req_id, arrival, stream))
    new_ticket = queue.next_ticket
    queue = replace(
        queue,
        running=running,
        waiting=waiting,
        pools=pools,
        log=log,
        live=queue.live.with_item(new_req_id, new_ticket),
        next_ticket=new_ticket + 1,
        in_flight=tuple([_with_fork(step, ticket, new_ticket) for step in queue.in_flight]),
        news=_without(queue.news, new_req_id),  # the batch learns by the fork who has the id now
    )
    return Forked(queue, kept, True, goes_on)


def _without(news: News, req_id: str) -> News:
    """The news, without any of a request that had this id before."""
    finished, preempted = news.finished_req_ids, news.preempted_req_ids
    if req_id not in finished and req_id not in preempted:
        return news
    return replace(news, finished_req_ids=finished - {req_id}, preempted_req_ids=preempted - {req_id})


def _request(parent: RequestState, req_id: str, arrival: int, stream: int | None) -> Request:
    own = parent.request.stream if stream is None else stream
    return replace(parent.request, req_id=req_id, arrival=arrival, stream=own, fork_of=None)


def _run_along(
    queue: Queue, row: int, request: Request, goes_on: bool
) -> tuple[Running, tuple[BlockPool, ...], TokenLog]:
    """Who runs once this request does, beside the one in the row, which has no open block; pools and log then."""
    config, log, running = queue.config, queue.log, queue.running
    parent, residence = running.states[row], running.residences[row]
    num_rows = config.max_num_reqs - num_held_rows(queue)
    if len(running) >= num_rows:
        raise OutOfRowsError(
            f"fork of {parent.request.req_id!r} as {request.req_id!r}: {len(running)} requests run, and there "
            f"are rows for {num_rows} of max_num_reqs={config.max_num_reqs} now (others belong to steps on their way): "
            "wait for one to end, or abort one"
        )
    for group, (pool, source) in enumerate(zip(queue.pools, residence.sources, strict=False)):
        if source is not None and not pool.num_available:
            raise OutOfBlocksError(
                f"fork of {parent.request.req_id!r} as {request.req_id!r}: its last block is not full and has to be "
                f"copied, and all {config.num_blocks[group] - 1} blocks of KV group {group} are held: abort a request, "
                "or drop a moment"
            )
    pools = tuple([share(pool, held_by(residence, group)) for group, pool in enumerate(queue.pools)])
    tokens = tokens_of(queue, row)
    if tokens is not parent.tokens:  # the parent has them too, so that they are not copied for its next fork
        running = replace(
            running,
            states=with_entry(running.states, row, replace(parent, tokens=tokens)),
            residences=with_entry(running.residences, row, replace(residence, log_start=log.num_lines)),
        )
    twin = replace(
        parent,
        request=request,
        ticket=queue.next_ticket,
        tokens=tokens,
        parent=None,
        num_cached_tokens=min(running.counts.num_computed.item(row), len(request.prompt_token_ids)),
        num_preemptions=0,
        num_in_flight=0,
    )
    own = replace(
        residence,
        slot=log.free_slots[-1],
        log_start=log.num_lines,
        num_borrowed=tuple([len(blocks) for blocks in residence.blocks]),
    )
    running = add_twin(running, row, twin, own, ran=goes_on)
    return running, pools, TokenLog(log.lines, log.width, log.free_slots[:-1])


def _wait_along(queue: Queue, parent: RequestState, request: Request) -> Waiting:
    """Who waits when this request does beside one that was preempted."""
    state = replace(parent, request=request, ticket=queue.next_ticket, parent=None)
    waiting = queue.waiting
    states = waiting.states.with_items([(state.ticket, state)])
    return Waiting(states, push(waiting.line, in_line(state)), waiting.forks)


def _with_fork(step: StepInFlight, parent: int, ticket: int) -> StepInFlight:
    """The step whose output is news of the fork too, if it is of the parent."""
    is_parent = step.ticket == parent
    place = is_parent.argmax()
    if not is_parent[place]:
        return step
    places = np.arange(len(is_parent) + 1)
    places[-1] = place
    return StepInFlight(
        step.req_ids,
        taken(step.ticket, places, ticket),
        frozen(step.num_scheduled[places]),
        frozen(step.samples[places]),
        None if step.num_drafts is None else frozen(step.num_drafts[places]),
        frozen(places if step.entry is None else step.entry[places]),
        step.num_steps,
    )


def _held(running: Running, group: int) -> NDArray[np.int32]:
    """What running requests hold of a KV group: a block as often as it has holders among them."""
    held = [held_by(residence, group)[::-1] for residence in running.residences]
    return np.concatenate(held) if held else empty_column(0, np.int32)
