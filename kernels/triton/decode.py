"""Paged attention of one query a request: its keys are split among programs, whose parts a second kernel joins.

How a request's keys are split depends on its own length and on the shape of the batch, never on the bounds: so
a larger bound changes no bit. The parts are joined in order, sixteen at a time.
Source: https://pytorch.org/blog/flash-decoding/.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import INTERPRETED, rounded
from purestep.kernels.triton.softmax import (
    ScoreForm,
    Tile,
    empty_softmax,
    is_wide,
    lanes,
    load_tile,
    normalized,
    scores_of,
    take_in,
)

PROGRAMS = 528  # that keep a large chip busy: four on each of 132 processors
MOST_PARTS = 64
LONGEST_PART = tl.constexpr(4096)  # keys that one program takes at most
PARTS = tl.constexpr(16)  # joined at a time


def decode_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """The tile for a head size; at least 16 rows, as tensor cores want them."""
    rows = max(16, triton.next_power_of_2(group))
    if is_wide(dtype):
        return Tile(rows, keys=32 if head_dim <= 64 else 16, num_warps=4, num_stages=3)
    return Tile(rows, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=5)


def num_parts(num_reqs: int, num_kv_heads: int) -> int:
    """Into how many parts the keys of each request are split, if it is not very long: a power of two."""
    wanted = PROGRAMS // max(num_reqs * num_kv_heads, 1)
    return min(max(1, 1 << max(wanted.bit_length() - 1, 0)), MOST_PARTS)


def decode(
    q: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    max_seq_len: int,
    form: ScoreForm,
    tile: Tile,
) -> Tensor:
    """Attention where no request has more than one query token: [tokens, heads, dim]. The cache is read only."""
    num_tokens, num_heads, dim = q.shape
    num_reqs, num_kv_heads = seq_lens.shape[0], kv.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    places = max(num_reqs, num_tokens)  # the further ones zero padding tokens
    parts = num_parts(num_reqs, num_kv_heads)
    span = min(max_seq_len, form.window) if form.window else max_seq_len
    grid_parts = max(min(parts, triton.cdiv(span, tile.keys)), triton.cdiv(span, LONGEST_PART.value), 1)
    shape = (num_reqs, num_heads, grid_parts) if grid_parts > 1 else (1, 1, 1)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
    mass = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    counts = (num_reqs, num_tokens, parts, grid_parts, block_table.shape[1])
    fixed = dict(HEADS=num_heads, DIM=dim, WIDTH=lanes(dim), BLOCK_SIZE=kv.shape[2], KEYS=tile.keys,
                 WINDOW=form.window)  # fmt: skip
    _decode[(num_kv_heads, grid_parts, places)](
        q, kv, out, partial, mass, query_start_loc, seq_lens, block_table, form.scale, form.cap, *counts,
        *q.stride()[:2], *kv.stride()[:4], block_table.stride(0),
        **fixed, GROUP=num_heads // num_kv_heads, ROWS=tile.rows, HAS_CAP=form.cap > 0, SPLIT=grid_parts > 1,
        STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    if grid_parts > 1:
        _join[(num_heads, places)](
            out, partial, mass, query_start_loc, seq_lens, *counts, **fixed, num_warps=4
        )
    return out


@triton.jit
def _share(length, parts, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that is seen, and how many keys each part takes."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, parts), KEYS) * KEYS
    return first, tl.maximum(tl.minimum(share, LONGEST_PART), KEYS)


@triton.jit
def _query_of(query_start_loc, seq_lens, place, num_reqs, capacity):
    """The query token of a request (-1: it has none), and its length."""
    exists = place < num_reqs
    start = tl.load(query_start_loc + place, mask=exists, other=0)
    end = tl.load(query_start_loc + place + 1, mask=exists, other=0)
    length = tl.load(seq_lens + place, mask=exists, other=0)
    return tl.where(end > start, start, -1), tl.minimum(length, capacity)


@triton.jit
def _zero_padding(
    out,
    query_start_loc,
    place,
    head,
    num_reqs,
    num_tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The place-th token past the last request gets 0 in this head."""
    token = tl.load(query_start_loc + num_reqs) + place
    lane = tl.arange(0, WIDTH)
    row = out + (token.to(tl.int64) * HEADS + head) * DIM
    tl.store(
        row + lane, tl.zeros([WIDTH], out.dtype.element_ty), mask=lane < tl.where(token < num_tokens, DIM, 0)
    )


COUNTS = ["num_reqs", "num_tokens", "parts", "grid_parts", "table_columns", "table_row"]
SMALL = ["query_start_loc", "seq_lens", "block_table"]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def _decode(
    q, kv, out, partial, mass, query_start_loc, seq_lens, block_table, scale, cap, num_reqs, num_tokens, parts,
    grid_parts, table_columns, q_token, q_head, kv_block, kv_plane, kv_slot, kv_head, table_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    group, part, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, length = _query_of(query_start_loc, seq_lens, place, num_reqs, table_columns * BLOCK_SIZE)
    first, share = _share(length, parts, KEYS, WINDOW)
    begin = first + part * share
    end = tl.minimum(begin + share, length)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)[None, :]
    mask = (row < GROUP)[:, None] & (lane < DIM)
    head = group * GROUP + row
    if (token >= 0) & ((begin < end) | (not SPLIT)):
        query = tl.load(
            q + token.to(tl.int64) * q_token + head[:, None] * q_head + lane, mask=mask, other=0.0
        )
        if INTERPRETED:
            query = query.to(tl.float32)
        largest, total, values = empty_softmax(ROWS, WIDTH)
        table = block_table + place.to(tl.int64) * table_row
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            key = start + tl.arange(0, KEYS)
            valid = key < end
            k, v = load_tile(
                kv + group * kv_head,
                table,
                key,
                valid,
                kv_block,
                kv_plane,
                kv_slot,
                BLOCK_SIZE,
                DIM,
                WIDTH,
                True,
            )
            score = scores_of(query, k.to(query.dtype), scale, cap, HAS_CAP)
            score = tl.where(valid[None, :], score, float("-inf"))
            largest, total, values = take_in(score, v.to(query.dtype), largest, total, values)
        if SPLIT:
            cell = (place.to(tl.int64) * HEADS + head) * grid_parts + part
            tl.store(partial + cell[:, None] * DIM + lane, values, mask=mask)
            tl.store(mass + cell * 2, largest, mask=row < GROUP)
            tl.store(mass + cell * 2 + 1, total, mask=row < GROUP)
        else:
            result = rounded(normalized(values, total), out.dtype.element_ty)
            tl.store(out + (token.to(tl.int64) * HEADS + head[:, None]) * DIM + lane, result, mask=mask)
    if not SPLIT:
        for i in tl.static_range(GROUP):
            _zero_padding(
                out, query_start_loc, place, group * GROUP + i, num_reqs, num_tokens, HEADS, DIM, WIDTH
            )


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def _join(
    out, partial, mass, query_start_loc, seq_lens, num_reqs, num_tokens, parts, grid_parts, table_columns,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    head, place = tl.program_id(0), tl.program_id(1)
    token, length = _query_of(query_start_loc, seq_lens, place, num_reqs, table_columns * BLOCK_SIZE)
    first, share = _share(length, parts, KEYS, WINDOW)
    used = tl.minimum(tl.cdiv(length - first, share), grid_parts)
    lane = tl.arange(0, WIDTH)
    if token >= 0:
        largest, total, values = empty_softmax(1, WIDTH)
        for start in range(0, used, PARTS):
            part = start + tl.arange(0, PARTS)
            cell = (place.to(tl.int64) * HEADS + head) * grid_parts + part
            peak = tl.load(mass + cell * 2, mask=part < used, other=float("-inf"))
            weight = tl.load(mass + cell * 2 + 1, mask=part < used, other=0.0)
            mask = (part < used)[:, None] & (lane < DIM)[None, :]
            piece = tl.load(partial + cell[:, None] * DIM + lane[None, :], mask=mask, other=0.0)
            now = tl.maximum(largest, tl.max(peak, 0))
            base = tl.where(now == float("-inf"), 0.0, now)
            scale = tl.exp2(peak - base)
            shrink = tl.exp2(largest - base)
            total = total * shrink + tl.sum(weight * scale, 0)
            values = values * shrink[:, None] + tl.sum(piece * scale[:, None], 0)[None, :]
            largest = now
        result = rounded(normalized(values, total), out.dtype.element_ty)
        row = out + (token.to(tl.int64) * HEADS + head) * DIM
        tl.store(row + lane[None, :], result, mask=(lane < DIM)[None, :])
    _zero_padding(out, query_start_loc, place, head, num_reqs, num_tokens, HEADS, DIM, WIDTH)
