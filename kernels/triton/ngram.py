"""Drafts out of a request's own past, by `kernels/reference/ngram.py`.

A program looks at the ends of occurrences in one part of a history, one program a request joins what they found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import cdiv, check_rows, next_power_of_2

PART = 1024  # positions of a history, per program


def propose_ngram(
    token_ids: Tensor,
    rows: Tensor,
    lengths: Tensor,
    room: Tensor,
    *,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> Tensor:
    """What followed the earliest earlier occurrence of a history's longest known ending: int32 [reqs, num_drafts].

    Histories are the first `lengths` entries of rows of token_ids [rows, positions]. At most `room` drafts each.
    """
    check_rows("propose_ngram", token_ids=token_ids)
    reqs, width, device = rows.shape[0], token_ids.shape[1], token_ids.device
    out = torch.empty(reqs, num_drafts, dtype=torch.int32, device=device)
    if out.numel():
        parts = cdiv(width, PART)
        found = torch.empty(reqs, parts, dtype=torch.int64, device=device)
        steps = (token_ids.stride(0), rows.stride(0), lengths.stride(0))
        _search[(reqs, parts)](
            token_ids, rows, lengths, found, *steps, width, parts, MAX_N=max_n, PART=PART,
        )  # fmt: skip
        _copy_out[(reqs,)](
            token_ids, rows, lengths, room, found, out, *steps, room.stride(0), width, parts, MIN_N=min_n,
            NUM=num_drafts, LANES=next_power_of_2(num_drafts), BLOCK=next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["width", "parts"], do_not_specialize_on_alignment=["token_ids", "rows", "lengths"]
)
def _search(
    token_ids, rows, lengths, found, row_step, rows_step, lengths_step, width, parts, MAX_N: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """The longest match of each part and its earliest end, as one number that sorts like them."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + request * lengths_step)
    best = tl.zeros([], tl.int64)
    if part * PART < length:
        tape = token_ids + tl.load(rows + request * rows_step).to(tl.int64) * row_step
        end = part * PART + tl.arange(0, PART)
        runs = (end > 0) & (end < length)
        matched = tl.zeros([PART], tl.int64)
        for back in range(1, MAX_N + 1):
            runs = runs & (end >= back)
            own = tl.load(tape + length - back, mask=length >= back, other=0)
            runs = runs & (tl.load(tape + end - back, mask=runs, other=0) == own)
            matched += runs.to(tl.int64)
        best = tl.max(matched * (width + 1) + (width - end), 0)
    tl.store(found + request * parts + part, best)


@triton.jit(
    do_not_specialize=["width", "parts"],
    do_not_specialize_on_alignment=["token_ids", "rows", "lengths", "room"],
)
def _copy_out(
    token_ids, rows, lengths, room, found, out, row_step, rows_step, lengths_step, room_step, width, parts,
    MIN_N: tl.constexpr, NUM: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    best = tl.max(tl.load(found + request * parts + part, mask=part < parts, other=0), 0)
    at = width - best % (width + 1)
    most = tl.minimum(tl.load(lengths + request * lengths_step) - at, tl.load(room + request * room_step))
    most = tl.where(best >= MIN_N * (width + 1), most, 0)
    place = tl.arange(0, LANES)
    tape = token_ids + tl.load(rows + request * rows_step).to(tl.int64) * row_step
    draft = tl.load(tape + at + place, mask=(place < most) & (place < NUM), other=-1)
    tl.store(out + request * NUM + place, draft.to(tl.int32), mask=place < NUM)
