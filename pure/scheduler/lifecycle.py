"""Requests come and go, and so do parameters."""

from array import array
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from purestep.pure.arrays import Tape, empty_column, frozen
from purestep.pure.blocks import forget, make_pool
from purestep.pure.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    short,
)
from purestep.pure.persistent import Map, push
from purestep.pure.record import replace
from purestep.pure.records.queue import (
    Finished,
    FinishReason,
    KVVersion,
    News,
    Queue,
    Request,
    RequestState,
    SchedulerConfig,
    TokenLog,
    Waiting,
)
from purestep.pure.records.sampling_params import validate
from purestep.pure.scheduler.kinds import WHOLE, check_finish, check_ids, check_request, check_version
from purestep.pure.scheduler.memory import in_line, leave, put_back, tidied
from purestep.pure.scheduler.rows import no_rows

NUM_SHARDS = 64  # quickest for up to 16,000 requests
ANY_VOCAB_SIZE = 2**31 - 1  # every int32 that is no placeholder


def make_queue(config: SchedulerConfig) -> Queue:
    """An empty queue.

    Raises:
        OutOfBlocksError: a KV group without a block to give.
        InvalidParameterError: other limits that would let nothing run.
    """
    _check_config(config)
    return Queue(
        config=config,
        running=no_rows(),
        waiting=Waiting(Map.make_empty(NUM_SHARDS), None),
        live=Map.make_empty(NUM_SHARDS),
        pools=tuple([make_pool(num_blocks) for num_blocks in config.num_blocks]),
        log=TokenLog(Tape.of(), config.max_num_reqs, tuple(range(config.max_num_reqs))),
        news=News((), empty_column(0, np.int32)),
    )


def add(queue: Queue, request: Request, *, vocab_size: int = ANY_VOCAB_SIZE) -> Queue:
    """The queue with one more request waiting. The id of a request that has ended is free at once.

    A fork waits until its parent's prompt is computed and then shares its blocks. If the parent is not there, it is
    served like any other request.

    Raises:
        DuplicateRequestError: its id is in use.
        PromptTooLongError: its prompt leaves no room for an output in the model's length, or does not fit the cache.
        InvalidParameterError: a sampling parameter outside its domain, or all of them together leave no token.
        InvalidRequestError: an empty prompt, a token id outside the vocabulary, a fork of a request with another
            prompt, or a field of the wrong kind.
    """
    check_request(request)
    if request.req_id in queue.live:
        raise DuplicateRequestError(
            f"request id {short(request.req_id)} is in use: wait, abort it, or use another id"
        )
    try:
        tokens = _checked_prompt(queue.config, request, vocab_size)
    except TypeError:
        raise InvalidRequestError(
            f"request {short(request.req_id)} has a prompt that is no tuple of whole numbers: give token ids"
        ) from None
    validate(
        request.sampling_params,
        vocab_size,
        queue.config.max_model_len,
        eos_token_ids=request.eos_token_ids,
        req_id=request.req_id,
    )
    parent = None if request.fork_of is None else queue.live.get(request.fork_of)
    if parent is not None:
        _check_fork(queue, request, parent)
    ticket, waiting = queue.next_ticket, queue.waiting
    state = RequestState(request=request, ticket=ticket, tokens=tokens, parent=parent)
    line, forks = waiting.line, waiting.forks
    if parent is None:
        line = push(line, in_line(state))
    else:
        forks = MappingProxyType({**forks, parent: (*forks.get(parent, ()), ticket)})
    return replace(
        queue,
        waiting=Waiting(waiting.states.with_items([(ticket, state)]), line, forks),
        live=queue.live.with_items([(request.req_id, ticket)]),
        next_ticket=ticket + 1,
    )


def finish(
    queue: Queue,
    req_id: str,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    *,
    num_outputs: int | None = None,
) -> Queue:
    """The queue without a request that the caller found to have ended, by a stop string for example.

    It has so many outputs then: what was computed behind them is no part of it, and not offered to the prefix cache.

    Raises: InvalidRequestError for an id that is not in use, and what is no id or no reason.
    """
    check_finish(req_id, reason, stop_reason)
    ticket = queue.live.get(req_id)
    if ticket is None:
        raise InvalidRequestError(
            f"finish({short(req_id)}, {short(reason)}): no such request waits or runs; it may have ended"
        )
    if num_outputs is not None:
        queue = _settled_within(queue, ticket, num_outputs)
    queue, _ = _remove(queue, [ticket], reason, stop_reason)
    return queue


def abort(queue: Queue, req_ids: Iterable[str]) -> Queue:
    """The queue without these requests. Ids that are not in use are ignored: they may just have ended.

    Raises: InvalidRequestError for what is no collection of ids, a single one for example.
    """
    found = [queue.live.get(req_id) for req_id in dict.fromkeys(check_ids("abort", req_ids))]
    queue, _ = _remove(queue, [ticket for ticket in found if ticket is not None], "abort", None)
    return queue


def set_version(queue: Queue, version: int, *, keep_kv: bool = False) -> Queue:
    """The queue for parameters of this version, from the next step on; the same object if all KV is of it already.

    All running requests are preempted, to be computed anew, and the prefix cache hits only what the same version made.
    With `keep_kv` they run on and cached blocks stay good, because the caller says so; what these requests go on to
    compute mixes versions and is not offered to the cache.

    Raises: InvalidParameterError for a version that is no whole number.
    """
    check_version(version)
    kv = queue.kv_version
    if version == kv.version and (keep_kv or kv.root == (version, kv.num_mixtures)):
        return queue
    if not keep_kv:
        queue, states = leave(queue, range(len(queue.running)))
        kv_version = KVVersion(version, (version, kv.num_mixtures), kv.num_mixtures)
        return replace(put_back(queue, states), kv_version=kv_version)
    running = queue.running
    residences = tuple([replace(residence, may_offer=False) for residence in running.residences])
    return replace(
        queue,
        running=replace(running, residences=residences),
        kv_version=KVVersion(version, kv.root, kv.num_mixtures + 1),
    )


def preempt_all(queue: Queue) -> Queue:
    """The queue after a step was lost: nothing runs, nothing is cached, and steps in flight are given up.

    Requests keep the tokens that are known and are computed anew. Moments keep their blocks: no step writes those.
    """
    queue = replace(queue, in_flight=())
    queue, states = leave(queue, range(len(queue.running)))
    queue = put_back(queue, states)
    settled = [(ticket, replace(state, num_in_flight=0)) for ticket, state in queue.waiting.states.items()]
    return replace(
        queue,
        waiting=replace(queue.waiting, states=queue.waiting.states.with_items(settled), blocked=None),
        pools=tuple([forget(pool) for pool in queue.pools]),
    )


def num_free(queue: Queue, group: int = 0) -> int:
    """Blocks of a KV group that no request holds; cached ones count."""
    return queue.pools[group].num_available


def end(
    queue: Queue, state: RequestState, reason: FinishReason, stop_reason: int | str | None
) -> tuple[Queue, Finished]:
    """The queue that no longer knows a request that holds nothing any more, and what is to be said of it."""
    req_id, waiting, news = state.request.req_id, queue.waiting, queue.news
    if state.num_cached_tokens is not None:
        news = replace(
            news,
            finished_req_ids=news.finished_req_ids | {req_id},
            preempted_req_ids=news.preempted_req_ids - {req_id},
        )
    waiting = Waiting(
        waiting.states.without([state.ticket]), waiting.line, _forks_without(waiting, state), waiting.blocked
    )
    queue = replace(queue, waiting=tidied(waiting), live=queue.live.without([req_id]), news=news)
    return queue, Finished(
        req_id=req_id,
        reason=reason,
        stop_reason=stop_reason,
        token_ids=tuple(state.tokens[len(state.request.prompt_token_ids) :].tolist()),
        num_cached_tokens=state.num_cached_tokens or 0,
        num_preemptions=state.num_preemptions,
    )


def _forks_without(waiting: Waiting, state: RequestState) -> Mapping[int, tuple[int, ...]]:
    """The forks that wait for their parents, without this request."""
    forks = waiting.forks.get(state.parent, ()) if state.parent is not None else ()
    if state.ticket not in forks:
        return waiting.forks
    others = tuple([ticket for ticket in forks if ticket != state.ticket])
    return MappingProxyType({**waiting.forks, state.parent: others})


def _settled_within(queue: Queue, ticket: int, num_outputs: int) -> Queue:
    """The queue that does not know a request to have computed more than what comes before its last output."""
    facts, counts = queue.running.facts, queue.running.counts
    most = facts.num_prompt + num_outputs - 1
    settled = np.where(facts.ticket == ticket, np.minimum(counts.num_settled, most), counts.num_settled)
    counts = replace(counts, num_settled=frozen(settled))
    return replace(queue, running=replace(queue.running, counts=counts))


def _remove(
    queue: Queue, tickets: list[int], reason: FinishReason, stop_reason: int | str | None
) -> tuple[Queue, tuple[Finished, ...]]:
    """The queue without these live requests."""
    rows = np.flatnonzero(np.isin(queue.running.facts.ticket, tickets)).tolist()
    states = [state for ticket in tickets if (state := queue.waiting.states.get(ticket)) is not None]
    if rows:
        queue, left = leave(queue, rows)
        states += left
    finished = []
    for state in states:
        queue, ended = end(queue, state, reason, stop_reason)
        finished.append(ended)
    return queue, tuple(finished)


def _check_config(config: SchedulerConfig) -> None:
    sizes, threshold = config.block_sizes, config.long_prefill_token_threshold
    for name, per_group in (("num_blocks", config.num_blocks), ("block_sizes", sizes)):
        if not isinstance(per_group, tuple) or not all(isinstance(number, WHOLE) for number in per_group):
            raise InvalidParameterError(
                f"{name}={short(per_group)}: give a tuple of whole numbers, one for every KV group"
            )
    if not config.num_blocks or len(config.num_blocks) != len(sizes):
        raise InvalidParameterError(
            f"{len(config.num_blocks)} numbers of blocks and {len(sizes)} block sizes: give one of each for every KV "
            f"group, of which there is at least one"
        )
    least = (
        ("max_num_reqs", config.max_num_reqs, 1),
        ("max_num_batched_tokens", config.max_num_batched_tokens, 1),
        ("max_model_len", config.max_model_len, 2),  # a prompt and an output
        ("block_horizon", config.block_horizon, 1),
        ("num_spec_tokens", config.num_spec_tokens, 0),
        ("long_prefill_token_threshold", 1 if threshold is None else threshold, 1),
        *((f"block_sizes[{group}]", size, 1) for group, size in enumerate(sizes)),
    )
    for name, value, low in least:
        if not hasattr(value, "__index__") or value < low:
            raise InvalidParameterError(
                f"{name} must be a whole number of at least {low}, got {short(value)}"
            )
    if config.num_spec_tokens and config.async_scheduling and not config.drafts_on_device:
        raise InvalidParameterError(
            f"async_scheduling with num_spec_tokens={config.num_spec_tokens} drafts that the scheduler is told of: "
            "they would follow tokens that are still on their way; have them made on the device, or schedule in turn"
        )


def _checked_prompt(config: SchedulerConfig, request: Request, vocab_size: int) -> Tape:
    prompt = request.prompt_token_ids
    if not isinstance(prompt, tuple):
        raise TypeError
    if not prompt:
        raise InvalidRequestError(
            f"request {short(request.req_id)} has an empty prompt: give at least one token"
        )
    if len(prompt) >= config.max_model_len:
        raise PromptTooLongError(
            f"request {short(request.req_id)} has a prompt of {len(prompt)} tokens; with max_model_len="
            f"{config.max_model_len} at most {config.max_model_len - 1} leave room for an output: shorten it"
        )
    if len(prompt) > config.capacity:
        raise PromptTooLongError(
            f"request {short(request.req_id)} has a prompt of {len(prompt)} tokens; the whole KV cache has room for "
            f"{config.capacity}: shorten it, or give the cache more memory"
        )
    try:
        ids = np.frombuffer(array("i", prompt), np.int32)  # checked as a whole, which a long prompt gains by
    except OverflowError:
        ids = None
    if ids is None or not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < min(vocab_size, 2**31))
        raise InvalidRequestError(
            f"request {short(request.req_id)} has token id {short(wrong)} in its prompt; the vocabulary is 0 to "
            f"{vocab_size - 1}"
        )
    return Tape.of(ids)


def _check_fork(queue: Queue, request: Request, parent: int) -> None:
    waits = queue.waiting.states.get(parent)
    if waits is None:
        waits = queue.running.states[int(np.flatnonzero(queue.running.facts.ticket == parent)[0])]
    if waits.request.prompt_token_ids != request.prompt_token_ids:
        raise InvalidRequestError(
            f"request {short(request.req_id)} is a fork of {short(request.fork_of)}, whose prompt is another one "
            f"({len(waits.request.prompt_token_ids)} tokens, this one {len(request.prompt_token_ids)}): "
            f"give it the same"
        )
