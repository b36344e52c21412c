"""The two ends of a step, a kernel each; the ledger's columns are those of `kernels/reference/ends.py`.

Both touch a few numbers of each row and request, which a program of 128 lanes does for as many of them.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.layout import request_of
from purestep.kernels.triton.shared import cdiv, early_launch, take_turn
from purestep.kernels.types import Kernels

LANES = 128
COMPUTED, KNOWN, OUTPUTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LIMIT, ACTIVE, HAS_NAN, STEP = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


def lay_out(
    kernels: Kernels,
    row_of_index: Tensor,
    query_start_loc: Tensor,
    ledger: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    room: Tensor,
    *,
    block_sizes: tuple[int, ...],
    num_tokens: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a step reads, from which rows run and where their tokens lie. One launch for each KV group.

    It begins only when all before it has ended, unlike the kernels behind it: so whatever wrote the weights that these
    fetch early was finished.
    """
    num_reqs, device = row_of_index.shape[0], row_of_index.device
    input_ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    slots = torch.empty(len(block_tables), num_tokens, dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
    logits_indices = torch.empty_like(seq_lens)
    discard = torch.empty(num_reqs, dtype=torch.bool, device=device)
    per_req = (seq_lens, logits_indices, discard)
    if num_reqs:
        grid = (cdiv(max(num_tokens, num_reqs), LANES),)
        for own, table, size in zip(slots, block_tables, block_sizes, strict=True):
            _lay_out[grid](
                row_of_index, query_start_loc, ledger, token_ids, table, room, input_ids, positions, own, *per_req,
                num_tokens, num_reqs, max_seq_len, ledger.stride(0), token_ids.stride(0), token_ids.shape[1],
                table.stride(0), table.shape[1], BLOCK_SIZE=size, STEPS=num_reqs.bit_length(), LANES=LANES,
            )  # fmt: skip
    return input_ids, positions, slots, *per_req


SIZES = [
    "num_tokens",
    "num_reqs",
    "max_seq_len",
    "column",
    "tokens_row",
    "longest",
    "table_row",
    "table_columns",
]


@triton.jit(
    do_not_specialize=SIZES, do_not_specialize_on_alignment=["row_of_index", "query_start_loc", "slots"]
)
def _lay_out(
    row_of_index, query_start_loc, ledger, token_ids, table, room, input_ids, positions, slots, seq_lens,
    logits_indices, discard, num_tokens, num_reqs, max_seq_len, column, tokens_row, longest, table_row, table_columns,
    BLOCK_SIZE: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    # Of tokens.
    exists = lane < num_tokens
    own, offset = request_of(query_start_loc, lane, num_reqs, STEPS, LANES)
    row = tl.load(row_of_index + own).to(tl.int64)
    position = tl.load(ledger + COMPUTED * column + row) + offset
    position = tl.minimum(position, longest - 1)
    start, stop = tl.load(query_start_loc + own), tl.load(query_start_loc + own + 1)
    runs, _, _ = _runs(ledger, room, row, stop - start, max_seq_len, column)
    writes = runs & (lane < tl.load(query_start_loc + num_reqs))
    block = tl.minimum(position // BLOCK_SIZE, table_columns - 1)
    block = tl.load(table + row * table_row + block, mask=exists & writes, other=0).to(tl.int64)
    token = tl.load(token_ids + row * tokens_row + position, mask=exists, other=0)
    tl.store(input_ids + lane, token, mask=exists)
    tl.store(positions + lane, position.to(tl.int64), mask=exists)
    tl.store(slots + lane, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    # Of requests.
    exists = lane < num_reqs
    row = tl.load(row_of_index + lane, mask=exists, other=0).to(tl.int64)
    start = tl.load(query_start_loc + lane, mask=exists, other=0)
    stop = tl.load(query_start_loc + lane + 1, mask=exists, other=0)
    runs, length, known = _runs(ledger, room, row, stop - start, max_seq_len, column)
    tl.store(seq_lens + lane, tl.where(runs, length, 0), mask=exists)
    tl.store(logits_indices + lane, tl.maximum(stop - 1, 0), mask=exists)
    tl.store(discard + lane, ~runs | (length < known), mask=exists)


@triton.jit
def _runs(ledger, room, row, count, max_seq_len, column):
    """Whether rows run so many tokens or are idle, their lengths if they do, and their known tokens."""
    length = tl.load(ledger + COMPUTED * column + row) + count
    known = tl.load(ledger + KNOWN * column + row)
    most = tl.minimum(tl.minimum(known, tl.load(room + row)), max_seq_len)
    active = tl.load(ledger + ACTIVE * column + row) > 0
    return active & (length <= most), length, known


def advance(
    kernels: Kernels,
    ledger: Tensor,
    token_ids: Tensor,
    row_of_index: Tensor,
    seq_lens: Tensor,
    discard: Tensor,
    sampled: Tensor,
    stops: Tensor,
    has_nan: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`ledger` and `token_ids` after the step; kept tokens, computed lengths, who goes on, who has NaN.

    A token that is not kept is not written. Requests that run the same row, as padding does, are idle: they write
    back what they read.
    """
    num_reqs, num_rows = row_of_index.shape[0], ledger.shape[1]
    kept, computed, stays, now_nan = together(sampled, seq_lens, discard, discard)
    given = (row_of_index, seq_lens, discard, sampled, stops, has_nan)
    _advance[(cdiv(max(num_reqs, num_rows), LANES),)](
        ledger, token_ids, *(x.contiguous() for x in given), kept, computed, stays, now_nan, num_reqs, num_rows,
        ledger.stride(0), token_ids.stride(0), token_ids.shape[1], LANES=LANES, **early_launch(),
    )  # fmt: skip
    return ledger, token_ids, kept, computed, stays, now_nan


def together(*columns: Tensor) -> list[Tensor]:
    """Columns like these, unfilled, in one allocation: one copy brings them all to the host."""
    ends = list(itertools.accumulate([cdiv(x.nbytes, 16) * 16 for x in columns], initial=0))
    data = torch.empty(ends[-1], dtype=torch.uint8, device=columns[0].device)
    return [
        data[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(ends, columns, strict=False)
    ]


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "column", "tokens_row", "longest"],
    do_not_specialize_on_alignment=["row_of_index"],
)
def _advance(
    ledger, token_ids, row_of_index, seq_lens, discard, sampled, stops, has_nan, kept_ids, computed_lens, goes_on,
    is_nan, num_reqs, num_rows, column, tokens_row, longest, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    steps = ledger + STEP * column + lane
    tl.store(steps, tl.load(steps, mask=lane < num_rows, other=0) + 1, mask=lane < num_rows)
    exists = lane < num_reqs
    row = tl.load(row_of_index + lane, mask=exists, other=0).to(tl.int64)
    entry = ledger + row
    active = tl.load(entry + ACTIVE * column, mask=exists, other=0) > 0
    length = tl.load(seq_lens + lane, mask=exists, other=0)
    runs = active & (length > 0)
    nan = runs & (tl.load(has_nan + lane, mask=exists, other=0) != 0)
    token = tl.load(sampled + lane, mask=exists, other=0)
    kept = runs & (tl.load(discard + lane, mask=exists, other=0) == 0) & ~nan
    computed = tl.where(runs, length, tl.load(entry + COMPUTED * column, mask=exists, other=0))
    known = tl.load(entry + KNOWN * column, mask=exists, other=0)
    outputs = tl.load(entry + OUTPUTS * column, mask=exists, other=0)
    limit = tl.load(entry + LIMIT * column, mask=exists, other=0)
    had_nan = tl.load(entry + HAS_NAN * column, mask=exists, other=0) > 0
    ends = (tl.load(stops + lane, mask=exists, other=0) != 0) | (known + 1 >= limit)
    stays = active & ~nan & ~(kept & ends)
    counted = kept.to(tl.int32)
    tl.store(entry + COMPUTED * column, computed, mask=exists)
    tl.store(entry + KNOWN * column, known + counted, mask=exists)
    tl.store(entry + OUTPUTS * column, outputs + counted, mask=exists)
    tl.store(entry + ACTIVE * column, stays.to(tl.int32), mask=exists)
    tl.store(entry + HAS_NAN * column, (had_nan | nan).to(tl.int32), mask=exists)
    place = token_ids + row * tokens_row + known
    tl.store(place, token.to(token_ids.dtype.element_ty), mask=exists & kept & (known < longest))
    tl.store(kept_ids + lane, tl.where(kept, token, -1), mask=exists)
    tl.store(computed_lens + lane, computed, mask=exists)
    tl.store(goes_on + lane, stays, mask=exists)
    tl.store(is_nan + lane, nan, mask=exists)
