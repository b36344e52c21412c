"""Edits of the running requests' columns, and of the log of their tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
from jaxtyping import Bool, Int, Int32
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, empty_column, frozen, taken
from purestep.pure.record import record, replace
from purestep.pure.records.queue import (
    News,
    Queue,
    RequestState,
    Residence,
    Running,
    RunningCounts,
    RunningFacts,
    StepInFlight,
    TokenLog,
)
from purestep.pure.records.sampling_params import SamplingParams

Columns = TypeVar("Columns", RunningFacts, RunningCounts)

LINES_PER_PAGE = 512  # steps until the log is written into each request's own tape


@record
class Newcomer:
    """A request about to run."""

    state: RequestState
    residence: Residence
    length_limit: int
    num_computed: int
    num_covered: int
    next_offer: int


def no_rows() -> Running:
    """Nobody runs."""
    nothing = empty_column(0, np.int32)
    facts = RunningFacts(empty_column(0, np.int64), nothing, nothing, nothing, nothing)
    counts = RunningCounts(nothing, nothing, nothing, nothing, nothing, nothing, empty_column(0, np.bool_))
    return Running((), (), (), facts, counts, empty_column(0, np.int64), nothing)


def add_rows(running: Running, newcomers: Sequence[Newcomer]) -> Running:
    """With these requests in their places in the order."""
    if not newcomers:
        return running
    states = [new.state for new in newcomers]
    more = Running(
        req_ids=tuple(state.request.req_id for state in states),
        states=tuple(states),
        residences=tuple(new.residence for new in newcomers),
        facts=_facts(newcomers),
        counts=_counts(newcomers),
        stop_rows=empty_column(0, np.int64),
        stop_ids=empty_column(0, np.int32),
    )
    stops = [(row, stop) for row, state in enumerate(states, len(running)) for stop in stop_ids(state)]
    stop_rows, ids = np.array(stops, np.int64).reshape(-1, 2).T
    joined = Running(
        req_ids=running.req_ids + more.req_ids,
        states=running.states + more.states,
        residences=running.residences + more.residences,
        facts=_join(running.facts, more.facts),
        counts=_join(running.counts, more.counts),
        stop_rows=frozen(np.concatenate([running.stop_rows, stop_rows])),
        stop_ids=frozen(np.concatenate([running.stop_ids, ids.astype(np.int32)])),
    )
    return in_order(joined, len(running))


def in_order(running: Running, first: int) -> Running:
    """In the order of their ranks, where those before `first` are in order."""
    places = [rank(state) for state in running.states[max(first - 1, 0) :]]
    if places == sorted(places):
        return running
    return take_rows(
        running, np.array(sorted(range(len(running)), key=lambda row: rank(running.states[row])))
    )


def take_rows(running: Running, rows: NDArray[Any]) -> Running:
    """These rows, in this order."""
    places = np.full(len(running), -1)
    places[rows] = np.arange(len(rows))
    stop_rows = places[running.stop_rows]
    kept = stop_rows >= 0
    listed = rows.tolist()
    return Running(
        req_ids=tuple([running.req_ids[row] for row in listed]),
        states=tuple([running.states[row] for row in listed]),
        residences=tuple([running.residences[row] for row in listed]),
        facts=_take(running.facts, rows),
        counts=_take(running.counts, rows),
        stop_rows=frozen(stop_rows[kept]),
        stop_ids=frozen(running.stop_ids[kept]),
    )


def drop_rows(running: Running, rows: Sequence[int]) -> Running:
    """Without these rows."""
    kept = np.ones(len(running), np.bool_)
    kept[list(rows)] = False
    return take_rows(running, np.flatnonzero(kept))


def add_twin(running: Running, row: int, state: RequestState, residence: Residence, *, ran: bool) -> Running:
    """With one request more, whose counts are those of the one in the row."""
    last, stop_rows, stop_ids = len(running), running.stop_rows, running.stop_ids
    rows = np.arange(last + 1)
    rows[last] = row
    if len(stop_ids):
        own_stops = stop_ids[stop_rows == row]
        stop_rows = frozen(np.concatenate([stop_rows, np.full(len(own_stops), last)]))
        stop_ids = frozen(np.concatenate([stop_ids, own_stops]))
    facts, counts = running.facts, running.counts
    joined = Running(
        (*running.req_ids, state.request.req_id),
        (*running.states, state),
        (*running.residences, residence),
        RunningFacts(
            taken(facts.ticket, rows, state.ticket),
            taken(facts.slot, rows, residence.slot),
            frozen(facts.num_prompt[rows]),
            frozen(facts.length_limit[rows]),
            frozen(facts.min_length[rows]),
        ),
        RunningCounts(
            frozen(counts.num_tokens[rows]),
            frozen(counts.num_known[rows]),
            frozen(counts.num_computed[rows]),
            frozen(counts.num_settled[rows]),
            frozen(counts.num_covered[rows]),
            frozen(counts.next_offer[rows]),
            taken(counts.ran, rows, ran),
        ),
        stop_rows,
        stop_ids,
    )
    return in_order(joined, last)


def with_residences(running: Running, changes: dict[int, Residence]) -> Running:
    """With other residences in these rows."""
    if not changes:
        return running
    residences = list(running.residences)
    for row, residence in changes.items():
        residences[row] = residence
    return replace(running, residences=tuple(residences))


def rank(state: RequestState) -> tuple[int, int, int]:
    """Its place in the order: who comes first is served first and preempted last."""
    return state.request.priority, state.request.arrival, state.ticket


def rows_of(running: Running, tickets: NDArray[np.int64]) -> NDArray[Any]:
    """The row of each ticket, -1 where it does not run."""
    if not len(running):
        return np.full(len(tickets), -1)
    order = np.argsort(running.facts.ticket)
    ordered = running.facts.ticket[order]
    places = np.minimum(np.searchsorted(ordered, tickets), len(ordered) - 1)
    return np.where(ordered[places] == tickets, order[places], -1)


def stop_ids(state: RequestState) -> tuple[int, ...]:
    """The ids that end the request, once it has its least number of tokens."""
    params = state.request.sampling_params
    return params.stop_token_ids if params.ignore_eos else state.request.eos_token_ids + params.stop_token_ids


def length_limit(params: SamplingParams, num_prompt: int, longest: int) -> int:
    """Tokens at which a request ends, where no request may have more than `longest`."""
    return longest if params.max_tokens is None else min(num_prompt + params.max_tokens, longest)


def tokens_of(queue: Queue, row: int) -> Tape:
    """Prompt and known outputs of a running request."""
    state, residence, log = queue.running.states[row], queue.running.residences[row], queue.log
    if residence.log_start == log.num_lines:
        return state.tokens
    lines = log.lines.array.reshape(-1, log.width)
    logged = lines[residence.log_start :, residence.slot]
    return state.tokens.extend(logged[logged >= 0])


def stepped(
    queue: Queue,
    counts: RunningCounts,
    *,
    log: TokenLog | None = None,
    news: News | None = None,
    in_flight: tuple[StepInFlight, ...] | None = None,
    drafts: Mapping[int, tuple[int, ...]] | None = None,
) -> Queue:
    """The queue with what every step changes: `replace` written out."""
    running = queue.running
    return Queue(
        config=queue.config,
        running=Running(
            running.req_ids,
            running.states,
            running.residences,
            running.facts,
            counts,
            running.stop_rows,
            running.stop_ids,
        ),
        waiting=queue.waiting,
        live=queue.live,
        pools=queue.pools,
        log=queue.log if log is None else log,
        news=queue.news if news is None else news,
        in_flight=queue.in_flight if in_flight is None else in_flight,
        moments=queue.moments,
        drafts=queue.drafts if drafts is None else drafts,
        kv_version=queue.kv_version,
        next_ticket=queue.next_ticket,
    )


def with_lines(queue: Queue, tokens: Int[np.ndarray, "rows width"]) -> TokenLog:
    """The log with the rows' tokens in it, -1 behind the last of each: a line more, or as many as a row has tokens."""
    log, slots = queue.log, queue.running.facts.slot
    num_lines = max(int(np.count_nonzero((tokens >= 0).any(axis=0))), 1) if tokens.shape[1] > 1 else 1
    lines = np.full((num_lines, log.width), -1, np.int32)
    for line in range(num_lines):
        lines[line, slots] = tokens[:, line]
    return TokenLog(log.lines.extend(lines.ravel()), log.width, log.free_slots)


def turn_page(queue: Queue) -> Queue:
    """The queue with an empty log, its tokens in the requests' own tapes, once it has grown long."""
    if queue.log.num_lines < LINES_PER_PAGE:
        return queue
    running = queue.running
    states = [replace(state, tokens=tokens_of(queue, row)) for row, state in enumerate(running.states)]
    residences = [replace(residence, log_start=0) for residence in running.residences]
    return replace(
        queue,
        running=replace(running, states=tuple(states), residences=tuple(residences)),
        log=replace(queue.log, lines=Tape.of()),
    )


def _facts(newcomers: Sequence[Newcomer]) -> RunningFacts:
    requests = [new.state.request for new in newcomers]
    num_prompt = _column([len(request.prompt_token_ids) for request in requests])
    return RunningFacts(
        ticket=frozen(np.array([new.state.ticket for new in newcomers], np.int64)),
        slot=_column([new.residence.slot for new in newcomers]),
        num_prompt=num_prompt,
        length_limit=_column([new.length_limit for new in newcomers]),
        min_length=frozen(num_prompt + _column([request.sampling_params.min_tokens for request in requests])),
    )


def _counts(newcomers: Sequence[Newcomer]) -> RunningCounts:
    num_tokens = _column([len(new.state.tokens) for new in newcomers])
    num_computed = _column([new.num_computed for new in newcomers])
    return RunningCounts(
        num_tokens=num_tokens,
        num_known=num_tokens,
        num_computed=num_computed,
        num_settled=num_computed,
        num_covered=_column([new.num_covered for new in newcomers]),
        next_offer=_column([new.next_offer for new in newcomers]),
        ran=empty_column(len(newcomers), np.bool_),
    )


def _column(values: list[int]) -> Int32[np.ndarray, " rows"]:
    return frozen(np.array(values, np.int32))


def _join(first: Columns, second: Columns) -> Columns:
    names = [field.name for field in attrs.fields(type(first))]  # type: ignore[arg-type]
    return type(first)(*(frozen(np.concatenate([getattr(first, n), getattr(second, n)])) for n in names))


def _take(columns: Columns, rows: NDArray[Any] | Bool[np.ndarray, " rows"]) -> Columns:
    names = [field.name for field in attrs.fields(type(columns))]  # type: ignore[arg-type]
    return type(columns)(*(frozen(getattr(columns, name)[rows]) for name in names))
