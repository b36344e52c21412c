"""The two ends of a step that verifies drafts; the ledger's columns are those of `kernels/reference/ends.py`.

How many tokens a request runs depends on all before it, so one program looks at all requests first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.ends import (
    ACTIVE,
    COMPUTED,
    HAS_NAN,
    KNOWN,
    LANES,
    LIMIT,
    OUTPUTS,
    STEP,
    together,
)
from purestep.kernels.triton.layout import request_of
from purestep.kernels.triton.shared import cdiv, check_rows, early_launch, next_power_of_2, take_turn
from purestep.kernels.types import Kernels


def lay_out_drafts(
    kernels: Kernels,
    row_of_index: Tensor,
    query_start_loc: Tensor,
    ledger: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    room: Tensor,
    *,
    block_sizes: tuple[int, ...],
    num_tokens: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a step reads where drafts may follow known tokens. One launch, and one for each KV group.

    They begin only when all before them has ended, as `lay_out`.
    """
    num_reqs, num_drafts, device = row_of_index.shape[0], drafts.shape[1], row_of_index.device
    input_ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    slots = torch.empty(len(block_tables), num_tokens, dtype=torch.int64, device=device)
    starts = torch.empty(num_reqs + 1, dtype=torch.int32, device=device)
    seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
    logits_indices = torch.empty(num_reqs * (num_drafts + 1), dtype=torch.int64, device=device)
    discard = torch.empty(num_reqs, dtype=torch.bool, device=device)
    verified = torch.empty(num_reqs, num_drafts, dtype=torch.int32, device=device)
    _lay_out_requests[(1,)](
        row_of_index, query_start_loc, ledger, drafts, room, starts, seq_lens, logits_indices, discard, verified,
        num_reqs, max_seq_len, ledger.stride(0), drafts.stride(0), NUM_DRAFTS=num_drafts,
        BLOCK=next_power_of_2(max(num_reqs, 1)),
    )  # fmt: skip
    if num_reqs and num_tokens:
        for own, table, size in zip(slots, block_tables, block_sizes, strict=True):
            _lay_out_tokens[(cdiv(num_tokens, LANES),)](
                row_of_index, starts, ledger, drafts, token_ids, table, seq_lens, input_ids, positions, own,
                num_tokens, num_reqs, ledger.stride(0), drafts.stride(0), token_ids.stride(0), token_ids.shape[1],
                table.stride(0), table.shape[1], BLOCK_SIZE=size, STEPS=num_reqs.bit_length(), LANES=LANES,
            )  # fmt: skip
    return input_ids, positions, slots, starts, seq_lens, logits_indices, discard, verified


@triton.jit(
    do_not_specialize=["num_reqs", "max_seq_len", "column", "drafts_row"],
    do_not_specialize_on_alignment=["row_of_index", "query_start_loc", "drafts"],
)
def _lay_out_requests(
    row_of_index, query_start_loc, ledger, drafts, room, starts, seq_lens, logits_indices, discard, verified, num_reqs,
    max_seq_len, column, drafts_row, NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    exists = lane < num_reqs
    row = tl.load(row_of_index + lane, mask=exists, other=0).to(tl.int64)
    start = tl.load(query_start_loc + lane, mask=exists, other=0)
    stop = tl.load(query_start_loc + lane + 1, mask=exists, other=0)
    computed = tl.load(ledger + COMPUTED * column + row, mask=exists, other=0)
    known = tl.load(ledger + KNOWN * column + row, mask=exists, other=0)
    active = tl.load(ledger + ACTIVE * column + row, mask=exists, other=0) > 0
    asked = computed + stop - start
    most = tl.minimum(tl.load(room + row, mask=exists, other=0), max_seq_len)
    given = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(NUM_DRAFTS):
        draft = tl.load(drafts + row * drafts_row + place, mask=exists, other=-1)
        given += ((given == place) & (draft >= 0)).to(tl.int32)
    count = tl.maximum(tl.minimum(tl.minimum(asked, most) - known, given), 0)
    end = tl.minimum(asked, known + count)
    runs = active & (asked <= known + NUM_DRAFTS) & (end <= most)
    count = tl.where(runs, count, 0)
    lens = tl.where(exists, tl.where(runs, end - computed, stop - start), 0)
    ends = tl.cumsum(lens, 0)
    tl.store(starts + lane, 0, mask=lane == 0)
    tl.store(starts + lane + 1, ends, mask=exists)
    tl.store(seq_lens + lane, tl.where(runs, end, 0), mask=exists)
    tl.store(discard + lane, ~runs | (end < known), mask=exists)
    for place in tl.static_range(NUM_DRAFTS + 1):
        wanted = tl.maximum(ends - 1 - tl.maximum(count - place, 0), 0)
        tl.store(logits_indices + lane * (NUM_DRAFTS + 1) + place, wanted.to(tl.int64), mask=exists)
    for place in tl.static_range(NUM_DRAFTS):
        draft = tl.load(drafts + row * drafts_row + place, mask=exists & (place < count), other=-1)
        tl.store(verified + lane * NUM_DRAFTS + place, draft, mask=exists)


SIZES = [
    "num_tokens",
    "num_reqs",
    "column",
    "drafts_row",
    "tokens_row",
    "longest",
    "table_row",
    "table_columns",
]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["row_of_index", "drafts", "slots"])
def _lay_out_tokens(
    row_of_index, starts, ledger, drafts, token_ids, table, seq_lens, input_ids, positions, slots, num_tokens, num_reqs,
    column, drafts_row, tokens_row, longest, table_row, table_columns, BLOCK_SIZE: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = lane < num_tokens
    own, offset = request_of(starts, lane, num_reqs, STEPS, LANES)
    row = tl.load(row_of_index + own).to(tl.int64)
    position = tl.minimum(tl.load(ledger + COMPUTED * column + row) + offset, longest - 1)
    guess = position - tl.load(ledger + KNOWN * column + row)
    length = tl.load(seq_lens + own)
    is_draft = exists & (guess >= 0) & (position < length)
    token = tl.load(token_ids + row * tokens_row + position, mask=exists, other=0)
    draft = tl.load(drafts + row * drafts_row + guess, mask=is_draft, other=0)
    writes = exists & (length > 0) & (lane < tl.load(starts + num_reqs))
    block = tl.minimum(position // BLOCK_SIZE, table_columns - 1)
    block = tl.load(table + row * table_row + block, mask=writes, other=0).to(tl.int64)
    tl.store(input_ids + lane, tl.where(is_draft, draft, token), mask=exists)
    tl.store(positions + lane, position.to(tl.int64), mask=exists)
    tl.store(slots + lane, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)


def advance_drafts(
    kernels: Kernels,
    ledger: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    row_of_index: Tensor,
    seq_lens: Tensor,
    discard: Tensor,
    sampled: Tensor,
    stops: Tensor,
    has_nan: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`advance` with several tokens a request, [reqs, width]; what is not kept is not written."""
    num_reqs, num_rows = row_of_index.shape[0], ledger.shape[1]
    kept, computed, stays, now_nan = together(sampled, seq_lens, discard, discard)
    given = (row_of_index, seq_lens, discard, sampled, stops, has_nan)
    _advance_drafts[(cdiv(max(num_reqs, num_rows), LANES),)](
        ledger, drafts, token_ids, *(x.contiguous() for x in given), kept, computed, stays, now_nan, num_reqs, num_rows,
        ledger.stride(0), drafts.stride(0), token_ids.stride(0), token_ids.shape[1], WIDTH=sampled.shape[1],
        LANES=LANES, **early_launch(),
    )  # fmt: skip
    return ledger, drafts, token_ids, kept, computed, stays, now_nan


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "column", "drafts_row", "tokens_row", "longest"],
    do_not_specialize_on_alignment=["row_of_index", "drafts"],
)
def _advance_drafts(
    ledger, drafts, token_ids, row_of_index, seq_lens, discard, sampled, stops, has_nan, kept_ids, computed_lens,
    goes_on, is_nan, num_reqs, num_rows, column, drafts_row, tokens_row, longest, WIDTH: tl.constexpr,
    LANES: tl.constexpr, EARLY: tl.constexpr,
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
    known = tl.load(entry + KNOWN * column, mask=exists, other=0)
    outputs = tl.load(entry + OUTPUTS * column, mask=exists, other=0)
    limit = tl.load(entry + LIMIT * column, mask=exists, other=0)
    had_nan = tl.load(entry + HAS_NAN * column, mask=exists, other=0) > 0
    before = tl.load(entry + COMPUTED * column, mask=exists, other=0)
    dropped = tl.load(discard + lane, mask=exists, other=0) != 0
    runs = active & (length > 0)
    goes = runs & ~dropped
    count = tl.zeros([LANES], tl.int32)
    for place in tl.static_range(WIDTH):
        token = tl.load(sampled + lane * WIDTH + place, mask=exists, other=-1)
        kept = goes & (token >= 0)
        stops_here = tl.load(stops + lane * WIDTH + place, mask=exists, other=0) != 0
        end = token_ids + row * tokens_row + known + place
        tl.store(end, token.to(token_ids.dtype.element_ty), mask=exists & kept & (known + place < longest))
        tl.store(kept_ids + lane * WIDTH + place, tl.where(kept, token, -1), mask=exists)
        count += kept.to(tl.int32)
        goes = goes & ~(kept & (stops_here | (known + place + 1 >= limit)))
    ended = runs & ~dropped & ~goes
    nan = runs & (tl.load(has_nan + lane, mask=exists, other=0) != 0) & ~ended
    told = tl.where(dropped, length, known + count - 1 + nan.to(tl.int32))
    computed = tl.where(runs, told, before)
    stays = active & ~nan & ~ended
    for place in tl.static_range(WIDTH - 1):
        tl.store(drafts + row * drafts_row + place, -1, mask=exists & (count > 0))
    tl.store(entry + COMPUTED * column, computed, mask=exists)
    tl.store(entry + KNOWN * column, known + count, mask=exists)
    tl.store(entry + OUTPUTS * column, outputs + count, mask=exists)
    tl.store(entry + ACTIVE * column, stays.to(tl.int32), mask=exists)
    tl.store(entry + HAS_NAN * column, (had_nan | nan).to(tl.int32), mask=exists)
    tl.store(computed_lens + lane, computed, mask=exists)
    tl.store(goes_on + lane, stays, mask=exists)
    tl.store(is_nan + lane, nan, mask=exists)


def put_drafts(
    kernels: Kernels,
    ledger: Tensor,
    drafts: Tensor,
    row_of_index: Tensor,
    seq_lens: Tensor,
    sampled: Tensor,
    proposed: Tensor,
    *,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """The drafts of a step's requests, put into their rows and told of. One launch."""
    check_rows("put_drafts", drafts=drafts)
    sampled, proposed = sampled.contiguous(), proposed.contiguous()  # a drafter may propose what it likes
    num_reqs, num_drafts = proposed.shape
    told = torch.empty(num_reqs, num_drafts, dtype=torch.int32, device=drafts.device)
    if num_reqs:
        _put_drafts[(cdiv(num_reqs, LANES),)](
            ledger, drafts, row_of_index.contiguous(), seq_lens.contiguous(), sampled, proposed, told, num_reqs,
            ledger.stride(0), drafts.stride(0), sampled.stride(0), proposed.stride(0), longest,
            NUM_DRAFTS=num_drafts, LANES=LANES, **early_launch(),
        )  # fmt: skip
    return drafts, told


@triton.jit(
    do_not_specialize=["num_reqs", "column", "drafts_row", "sampled_row", "proposed_row", "longest"],
    do_not_specialize_on_alignment=["drafts", "row_of_index", "seq_lens", "sampled", "proposed"],
)
def _put_drafts(
    ledger, drafts, row_of_index, seq_lens, sampled, proposed, told, num_reqs, column, drafts_row, sampled_row,
    proposed_row, longest, NUM_DRAFTS: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = lane < num_reqs
    at = lane.to(tl.int64)
    row = tl.load(row_of_index + lane, mask=exists, other=0).to(tl.int64)
    limit = tl.minimum(tl.load(ledger + LIMIT * column + row, mask=exists, other=0), longest)
    budget = limit - tl.load(ledger + KNOWN * column + row, mask=exists, other=0) - 1
    ran = tl.load(seq_lens + lane, mask=exists, other=0) != 0
    stands = tl.load(sampled + at * sampled_row, mask=exists, other=-1) >= 0
    for place in tl.static_range(NUM_DRAFTS):
        draft = tl.load(proposed + at * proposed_row + place, mask=exists, other=-1).to(tl.int32)
        stands = stands & (draft >= 0) & (place < budget)
        draft = tl.where(stands, draft, -1)
        tl.store(drafts + row * drafts_row + place, draft, mask=exists & ran)
        tl.store(told + at * NUM_DRAFTS + place, draft, mask=exists)
