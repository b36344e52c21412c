"""Edits of a batch's rows: who sits where. Each returns a new batch; untouched columns stay the same objects."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import is_, is_not
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, with_copy, with_entry, with_items
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import CachedRequestState, Columns, Fork, InputBatch, Parked, Rows
from purestep.pure.records.layout import sampler_features
from purestep.pure.records.scheduler_output import BlockIds

T = TypeVar("T")


def occupied(item: T | None) -> T:
    """What a row that is in use holds."""
    assert item is not None, "a row named by row_of is empty"
    return item


def with_entries(column: tuple[Any, ...], entries: Mapping[int, Any]) -> tuple[Any, ...]:
    """The tuple with some entries exchanged."""
    items = list(column)
    for index, value in entries.items():
        items[index] = value
    return tuple(items)


def without(entries: MappingProxyType[str, T], names: Iterable[str]) -> MappingProxyType[str, T]:
    """The mapping without these names, all of which it has; the same object if there are none."""
    left = entries.copy()
    for name in names:
        del left[name]
    return entries if len(left) == len(entries) else MappingProxyType(left)


def changed_entries(now: Sequence[Any], then: Sequence[Any]) -> list[int]:
    """Where two sequences of one length hold different objects."""
    return list(compress(range(len(now)), map(is_not, now, then)))


def rows_of(batch: InputBatch, req_ids: Sequence[str]) -> NDArray[np.intp]:
    """The rows of these requests.

    Raises:
        SchedulerOutputError: an id that has no row.
    """
    try:
        return np.fromiter(map(batch.row_of.__getitem__, req_ids), np.intp, len(req_ids))
    except KeyError as error:
        raise SchedulerOutputError(
            f"request {error.args[0]!r} is scheduled as a known one, but the batch knows only "
            f"{len(batch.row_of)} requests in rows and {len(batch.parked)} parked, none of this id: "
            "send it in scheduled_new_reqs first"
        ) from None


def tapes(
    batch: InputBatch, req_id: str, block_ids: BlockIds, *, behind: Sequence[Tape] | None = None
) -> tuple[Tape, ...]:
    """A request's block lists as tapes, one per KV group, behind those that it has already.

    Raises:
        SchedulerOutputError: too few groups, a block that does not exist, or what is no block id.
    """
    try:
        _check_blocks(batch, req_id, block_ids)
        if behind is None:
            return tuple([Tape.of(ids) for ids in block_ids])
        return tuple([tape.extend(ids) for tape, ids in zip(behind, block_ids, strict=True)])
    except TypeError:
        raise SchedulerOutputError(
            f"request {req_id!r} got blocks {block_ids!r}: send a list of whole numbers for every KV group"
        ) from None


def _check_blocks(batch: InputBatch, req_id: str, block_ids: BlockIds) -> None:
    limits = batch.limits
    if len(block_ids) != len(limits.block_sizes):
        raise SchedulerOutputError(
            f"request {req_id!r} got blocks for {len(block_ids)} KV groups; the cache has {len(limits.block_sizes)}"
        )
    for group, (ids, num_blocks) in enumerate(zip(block_ids, limits.num_blocks, strict=True)):
        if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
            raise SchedulerOutputError(
                f"request {req_id!r} got blocks {min(ids)} to {max(ids)} in KV group {group}, "
                f"which has blocks 0 to {num_blocks - 1}"
            )


def room(batch: InputBatch, block_ids: Iterable[Tape]) -> int:
    """Tokens that these blocks can hold: the smallest of the KV groups."""
    return min(len(ids) * size for ids, size in zip(block_ids, batch.limits.block_sizes, strict=True))


def release(batch: InputBatch, req_ids: Sequence[str]) -> InputBatch:
    """These requests' rows are free, once the last step that they ran in is settled: until then it may write them."""
    if not req_ids:
        return batch
    rows = [batch.row_of[r] for r in req_ids]
    nobody: dict[int, None] = dict.fromkeys(rows)
    released_at = last_run(batch, rows)
    return replace(
        batch,
        rows=Rows(
            with_entries(batch.rows.requests, nobody),
            with_entries(batch.rows.tokens, nobody),
            tuple(with_entries(group, nobody) for group in batch.rows.block_ids),
        ),
        columns=replace(batch.columns, released_at=released_at),
        row_of=without(batch.row_of, req_ids),
    )


def last_run(batch: InputBatch, rows: Sequence[int]) -> NDArray[np.int32]:
    """`released_at` with the last step that ran each of these rows: the last one begun, or it is there already, since
    a row that sits out is marked when it begins to."""
    released_at = batch.columns.released_at
    just_now = np.isin(rows, batch.layout.row_of_index)
    return with_items(released_at, rows, np.where(just_now, batch.clock.num_begun, released_at[rows]))


def drop(batch: InputBatch, req_ids: Iterable[str]) -> InputBatch:
    """Without these requests; ids that the batch does not know are ignored, as upstream does."""
    known = [r for r in req_ids if r in batch.row_of or r in batch.parked]
    if not known:
        return batch
    gone = sorted(known)  # a set's order is not the same in every process
    batch = release(batch, [r for r in gone if r in batch.row_of])
    return replace(batch, parked=without(batch.parked, [r for r in gone if r in batch.parked]))


def as_parked(batch: InputBatch, req_id: str) -> Parked:
    """What there is to know of a request in a row, when it leaves that."""
    row = batch.row_of[req_id]
    return Parked(
        occupied(batch.rows.requests[row]),
        occupied(batch.rows.tokens[row]),
        tuple([occupied(group[row]) for group in batch.rows.block_ids]),
        batch.columns.num_computed_tokens_settled.item(row),
    )


def place(batch: InputBatch, arrivals: Sequence[Parked]) -> InputBatch:
    """These requests, in the lowest free rows in order.

    Raises:
        SchedulerOutputError: fewer rows are free.
    """
    if not arrivals:
        return batch
    free = free_rows(batch)
    if len(free) < len(arrivals):
        clock = batch.clock
        raise SchedulerOutputError(
            f"{len(arrivals)} requests are to be admitted and {len(free)} of {batch.limits.max_num_reqs} rows are free "
            f"({clock.num_begun - clock.num_settled} steps are unsettled and hold rows that were given up): "
            "schedule fewer, or settle first"
        )
    free = free[: len(arrivals)]
    return _seated(batch, dict(zip(free, arrivals, strict=True)), _columns(batch, free, arrivals))


def place_beside(
    batch: InputBatch, row: int, request: CachedRequestState, forks: tuple[Fork, ...]
) -> InputBatch:
    """This request, which is not parked, in the lowest free row, with all that the one in the row has; these forks.

    Raises:
        SchedulerOutputError: no row is free.
    """
    own = first_free_row(batch)
    if own is None:
        raise SchedulerOutputError(
            f"request {request.req_id!r} is to go on beside another one, and none of "
            f"{batch.limits.max_num_reqs} rows is free: park it, or settle first"
        )
    c, rows = batch.columns, batch.rows
    columns = Columns(
        with_copy(c.num_prompt_tokens, own, row),
        with_copy(c.num_tokens, own, row),
        with_copy(c.num_computed_tokens_bound, own, row),
        with_copy(c.num_computed_tokens_settled, own, row),
        with_copy(c.room, own, row),
        with_copy(c.sampler_features, own, row),
        with_copy(c.num_logprobs, own, row),
        c.released_at,
    )
    return replace(
        batch,
        rows=Rows(
            with_entry(rows.requests, own, request),
            with_entry(rows.tokens, own, rows.tokens[row]),
            tuple([with_entry(group, own, group[row]) for group in rows.block_ids]),
        ),
        columns=columns,
        row_of=MappingProxyType(batch.row_of | {request.req_id: own}),
        forks=forks,
    )


def _seated(batch: InputBatch, placed: Mapping[int, Parked], columns: Columns) -> InputBatch:
    names = {a.request.req_id for a in placed.values()}
    return replace(
        batch,
        rows=Rows(
            with_entries(batch.rows.requests, {row: a.request for row, a in placed.items()}),
            with_entries(batch.rows.tokens, {row: a.tokens for row, a in placed.items()}),
            tuple(
                with_entries(group, {row: a.block_ids[g] for row, a in placed.items()})
                for g, group in enumerate(batch.rows.block_ids)
            ),
        ),
        columns=columns,
        row_of=MappingProxyType(batch.row_of | {a.request.req_id: row for row, a in placed.items()}),
        parked=without(batch.parked, names & batch.parked.keys()),
    )


def free_rows(batch: InputBatch) -> list[int]:
    """Rows in which nobody sits, and which no step on its way may write."""
    settled, released = batch.clock.num_settled, batch.columns.released_at
    empty = compress(range(batch.limits.max_num_reqs), map(is_, batch.rows.requests, repeat(None)))
    return [row for row in empty if released[row] <= settled]


def first_free_row(batch: InputBatch) -> int | None:
    """The lowest of the free rows, None if there is none."""
    requests, released, settled = batch.rows.requests, batch.columns.released_at, batch.clock.num_settled
    row = -1
    for _ in range(len(requests) - len(batch.row_of)):  # those in which nobody sits
        row = requests.index(None, row + 1)
        if released.item(row) <= settled:
            return row
    return None


def _columns(batch: InputBatch, rows: Sequence[int], arrivals: Sequence[Parked]) -> Columns:
    requests = [a.request for a in arrivals]
    computed = [a.num_computed_tokens for a in arrivals]
    vocab = batch.limits.vocab_size
    wanted = [r.sampling_params.logprobs for r in requests]
    num_logprobs = [-1 if n is None else vocab if n == -1 else n for n in wanted]
    eos = batch.limits.eos_token_ids
    features = [sampler_features(r.sampling_params, vocab, eos) for r in requests]
    c = batch.columns
    return Columns(
        num_prompt_tokens=with_items(c.num_prompt_tokens, rows, [r.num_prompt_tokens for r in requests]),
        num_tokens=with_items(c.num_tokens, rows, [len(a.tokens) for a in arrivals]),
        num_computed_tokens_bound=with_items(c.num_computed_tokens_bound, rows, computed),
        num_computed_tokens_settled=with_items(c.num_computed_tokens_settled, rows, computed),
        room=with_items(c.room, rows, [room(batch, a.block_ids) for a in arrivals]),
        sampler_features=with_items(c.sampler_features, rows, features),
        num_logprobs=with_items(c.num_logprobs, rows, num_logprobs),
        released_at=c.released_at,
    )
