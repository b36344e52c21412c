"""`plan_step`: the pure difference of two batches, as the one packed message that the device gets.

Legal between any two batches of the same limits, so rewinding needs no code of its own. Rows are compared by the
identity of their cold records: in a steady batch every column is the same object, and the plan is empty.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, frozen
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.kv_config import kernel_block_ids
from purestep.pure.records.layout import CONSTRAINTS, LayoutBounds
from purestep.pure.records.plan import Inbox, InboxShape, StepPlan
from purestep.pure.records.sampling_rows import (
    MAX_STOP_IDS,
    NUM_WORDS,
    TokenConstraints,
    packed_row,
    stop_ids_of,
)
from purestep.pure.rows import changed_entries

_NO_WORDS = frozen(np.zeros(0, np.int32))
_NO_ENTRIES = frozen(np.zeros((0, 3), np.int32))
_NOTHING = Inbox(_NO_WORDS, InboxShape())


def plan_step(batch: InputBatch, absorbed: InputBatch) -> StepPlan:
    """What the device must be told so that its host-written leaves reflect `batch` instead of `absorbed`.

    Written anew: ledger rows of requests admitted or rolled back since, their sampling rows, those of their tokens
    that the device lacks, new entries of block tables, the layout if its arrays are other ones. The block copies,
    zeroings, drafts and forks are the batch's own and belong to the step in which it was made; the ledger row of a
    fork and its tokens are copied from its parent's.
    """
    if _same_rows(batch, absorbed):
        new, old = batch.layout, absorbed.layout
        return StepPlan(
            absorbed, batch, _NOTHING if new is old else Inbox(_NO_WORDS, InboxShape(), bounds=new.bounds)
        )
    rows, limits = _admitted(batch, absorbed), batch.limits
    forks = _forks(batch, absorbed) if batch.forks else {}
    unknown = [row for row in rows if row not in forks] if forks else rows
    blocks = tuple(_block_entries(batch, absorbed, group) for group in range(len(limits.block_sizes)))
    bounds, layout = _layout_entries(batch, absorbed)
    sections = [
        layout,
        _ledger_entries(batch, unknown),
        _sampling_entries(batch, absorbed, rows),
        _token_entries(batch, absorbed, unknown),
        _room_entries(batch, absorbed),
        *blocks,
        *(_kernel_blocks(_block_ids(pairs, 2), limits, g) for g, pairs in enumerate(batch.block_copies)),
        *(_kernel_blocks(_block_ids(ids, 1), limits, g) for g, ids in enumerate(batch.blocks_to_zero)),
        np.array([(source, target) for target, source in forks.items()], np.int32),
        batch.drafts,
    ]
    has_constraints, constraints = _constraints(batch, absorbed)
    data = [s.reshape(-1) for s in sections if s.size]
    num_groups, num_copies = len(blocks), len(batch.block_copies)
    sizes = tuple(len(s) for s in sections)
    shape = InboxShape(
        layout=batch.layout.bounds.num_reqs if layout.size else None,
        ledger=sizes[1],
        sampling=sizes[2],
        tokens=sizes[3],
        rooms=sizes[4],
        blocks=_counts(sizes[5 : 5 + num_groups]),
        copies=_counts(sizes[5 + num_groups : 5 + num_groups + num_copies]),
        zeros=_counts(sizes[5 + num_groups + num_copies : -2]),
        forks=len(forks),
        drafts=len(batch.drafts),
    )
    words = np.concatenate(data) if data else _NO_WORDS
    floats = words.view(np.float32) if shape.sampling else None
    return StepPlan(absorbed, batch, Inbox(words, shape, constraints, bounds, has_constraints, floats))


def _same_rows(batch: InputBatch, absorbed: InputBatch) -> bool:
    """Nothing but a bound can be different, and no block is to be prepared."""
    new, old = batch.layout, absorbed.layout
    return batch is absorbed or (
        batch.rows.requests is absorbed.rows.requests
        and batch.rows.block_ids is absorbed.rows.block_ids
        and batch.columns.room is absorbed.columns.room
        and new.row_of_index is old.row_of_index
        and new.query_start_loc is old.query_start_loc
        and not any(batch.block_copies)
        and not any(batch.blocks_to_zero)
        and not len(batch.drafts)
    )


def _counts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return sizes if any(sizes) else ()


def _admitted(batch: InputBatch, absorbed: InputBatch) -> list[int]:
    """Rows whose device state does not descend from what `absorbed` put there."""
    now, then = batch.rows.requests, absorbed.rows.requests
    if now is then:
        return []
    return [row for row in changed_entries(now, then) if now[row] is not None]


def _forks(batch: InputBatch, absorbed: InputBatch) -> dict[int, int]:
    """The rows that come into being in this step as copies of others, and of which."""
    copies = {}
    for fork in batch.forks:
        row, source = batch.row_of.get(fork.child.req_id), absorbed.row_of.get(fork.parent.req_id)
        if (
            row is None or source is None or fork.num_begun < batch.clock.num_begun - 1
        ):  # steps have run since
            continue
        if batch.rows.requests[row] is fork.child and absorbed.rows.requests[source] is fork.parent:
            copies[row] = source
    return copies


def _ledger_entries(batch: InputBatch, rows: Sequence[int]) -> NDArray[np.int32]:
    """(row, computed, known, outputs, length limit, active, has_nan) of each."""
    c, limits = batch.columns, batch.limits
    entries = np.zeros((len(rows), 7), np.int32)
    if not rows:
        return entries
    known, prompt = c.num_tokens[rows], c.num_prompt_tokens[rows]
    max_tokens = [request.sampling_params.max_tokens for request in _requests(batch, rows)]
    budget = np.array([limits.max_model_len if n is None else n for n in max_tokens])
    entries[:, 0] = rows
    entries[:, 1] = c.num_computed_tokens_settled[rows]
    entries[:, 2] = known
    entries[:, 3] = known - prompt
    entries[:, 4] = np.minimum(prompt + budget, limits.max_model_len)
    entries[:, 5] = known < entries[:, 4]
    return entries


def _sampling_entries(batch: InputBatch, absorbed: InputBatch, rows: Sequence[int]) -> NDArray[np.int32]:
    """(row, packed sampling row), where parameters or stream are other ones."""
    limits, packed = batch.limits, []
    for row, request in zip(rows, _requests(batch, rows), strict=True):
        old, params = absorbed.rows.requests[row], request.sampling_params
        if old is not None and old.sampling_params is params and old.stream == request.stream:
            continue
        seed = limits.seed if params.seed is None else params.seed
        words = packed_row(params, seed=seed, stream=request.stream, eos_token_ids=limits.eos_token_ids)
        packed.append([row, *words])
    return np.asarray(packed, np.int32).reshape(len(packed), 1 + NUM_WORDS)


def _token_entries(batch: InputBatch, absorbed: InputBatch, rows: Sequence[int]) -> NDArray[np.int32]:
    """(row, position, token id) of settled tokens that the row's tape on the device does not hold yet."""
    return _tails(rows, batch.rows.tokens, absorbed.rows.tokens)


def _room_entries(batch: InputBatch, absorbed: InputBatch) -> NDArray[np.int32]:
    """(row, tokens that its blocks can hold, as far as it may use them) where the device has another number."""
    now, then = (np.minimum(b.columns.room, b.limits.max_model_len) for b in (batch, absorbed))
    rows = np.flatnonzero(now != then)
    return np.stack([rows, now[rows]], axis=1).astype(np.int32)


def _block_entries(batch: InputBatch, absorbed: InputBatch, group: int) -> NDArray[np.int32]:
    """(row, place, block id) of entries that the row's block table on the device does not hold yet.

    Blocks beyond those that max_model_len tokens fill are never used, and have no place in the table.
    """
    now, then = batch.rows.block_ids[group], absorbed.rows.block_ids[group]
    if now is then:
        return _NO_ENTRIES
    entries = _tails(changed_entries(now, then), now, then)
    if not len(entries):
        return entries
    limits, ratio = batch.limits, batch.limits.num_kernel_blocks[group]
    if ratio > 1:
        blocks = _kernel_blocks(entries[:, 1:], limits, group)
        entries = np.concatenate([np.repeat(entries[:, :1], ratio, axis=0), blocks], axis=1)
    width = -(-limits.max_model_len // limits.table_block_sizes[group])
    return entries[entries[:, 1] < width]


def _block_ids(ids: Sequence[Any], width: int) -> NDArray[np.int32]:
    return np.asarray(ids, np.int32).reshape(-1, width)


def _kernel_blocks(blocks: NDArray[np.int32], limits: BatchLimits, group: int) -> NDArray[np.int32]:
    """Rows of a group's blocks as rows of kernel blocks; places in a table expand as the blocks there do."""
    size, kernel_size = limits.block_sizes[group], limits.table_block_sizes[group]
    if size == kernel_size:
        return blocks
    columns = [
        kernel_block_ids(ids, block_size=size, kernel_block_size=kernel_size) for ids in blocks.transpose()
    ]
    return np.stack(columns, axis=1)


def _tails(rows: Sequence[int], now: Sequence[Tape | None], then: Sequence[Tape | None]) -> NDArray[np.int32]:
    """(row, place, item) of each row's items from the first that is another one in `then`."""
    found: list[tuple[int, int, NDArray[np.int32]]] = []
    for row in rows:
        tape, old = now[row], then[row]
        if tape is not None:
            start = 0 if old is None else _num_same(tape, old)
            found.append((row, start, tape[start:]))
    if not found:
        return _NO_ENTRIES
    counts = np.array([len(items) for _, _, items in found])
    ends = np.cumsum(counts)
    shift = np.array([start for _, start, _ in found]) - ends + counts
    entries = np.empty((ends[-1], 3), np.int32)
    entries[:, 0] = np.repeat([row for row, _, _ in found], counts)
    entries[:, 1] = np.arange(ends[-1]) + np.repeat(shift, counts)
    entries[:, 2] = np.concatenate([items for _, _, items in found])
    return entries


def _num_same(tape: Tape, old: Tape) -> int:
    """How many of the first items are the same."""
    both = min(len(tape), len(old))
    if tape.extends(old) or old.extends(tape):
        return both
    different = np.flatnonzero(tape[:both] != old[:both])
    return int(different[0]) if len(different) else both


def _layout_entries(batch: InputBatch, absorbed: InputBatch) -> tuple[LayoutBounds | None, NDArray[np.int32]]:
    """The new bounds, and row_of_index and query_start_loc where they are other arrays."""
    new, old = batch.layout, absorbed.layout
    if new is old:
        return None, _NO_WORDS
    if new.row_of_index is old.row_of_index and new.query_start_loc is old.query_start_loc:
        return new.bounds, _NO_WORDS
    return new.bounds, np.concatenate([new.row_of_index, new.query_start_loc])


def _constraints(batch: InputBatch, absorbed: InputBatch) -> tuple[bool, TokenConstraints | None]:
    """Whether the sparse rules changed, and the rules of all rows."""
    if batch.rows.requests is absorbed.rows.requests:
        return False, None
    constrained = np.flatnonzero(batch.columns.sampler_features & CONSTRAINTS).tolist()
    rows = [row for row in constrained if batch.rows.requests[row] is not None]
    had_any = bool((absorbed.columns.sampler_features & CONSTRAINTS).any())
    if not rows:
        return had_any, None
    bias: list[tuple[int, int, float]] = []
    allowed, words, stops = [], [], []
    for row, request in zip(rows, _requests(batch, rows), strict=True):
        params = request.sampling_params
        bias += [(row, token, value) for token, value in params.logit_bias]
        allowed += [(row, token) for token in params.allowed_token_ids or ()]
        words += [(row, word) for word in params.bad_words_token_ids]
        stops += [(row, token) for token in stop_ids_of(params, batch.limits.eos_token_ids)[0][MAX_STOP_IDS:]]
    longest = max((len(word) for _, word in words), default=1)
    padded = [list(word) + [-1] * (longest - len(word)) for _, word in words]
    return True, TokenConstraints(
        bias_row=_column([b[0] for b in bias]),
        bias_ids=_column([b[1] for b in bias]),
        bias_values=np.asarray([b[2] for b in bias], np.float32),
        allowed_row=_column([a[0] for a in allowed]),
        allowed_ids=_column([a[1] for a in allowed]),
        words_row=_column([w[0] for w in words]),
        words=np.asarray(padded, np.int32).reshape(len(words), longest),
        stop_row=_column([s[0] for s in stops]),
        stop_ids=_column([s[1] for s in stops]),
    )


def _column(values: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def _requests(batch: InputBatch, rows: Sequence[int]) -> list[Any]:
    return [batch.rows.requests[row] for row in rows]
