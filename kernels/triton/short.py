"""Paged attention of a few queries a request, as the verification of drafts has them: keys are split as in `decode`.

A program takes all queries of a request, times the heads that share a key head, and every so many-th tile of its keys,
which are in the cache already. So few requests keep a large chip busy, which `mixed` can not do. Whether a request is
treated so depends on its own number of queries and on the shape of the batch, never on bounds.
Source: https://pytorch.org/blog/flash-decoding/.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.decode import LONGEST_PART, join_parts, num_parts, parts_of
from purestep.kernels.triton.shared import early_launch, next_power_of_2, take_turn
from purestep.kernels.triton.softmax import (
    ScoreForm,
    Tile,
    empty_softmax,
    finished,
    fitting,
    is_wide,
    lanes,
    load_tile,
    score_scale,
    scores_of,
    take_in,
)

SMALLEST_TILE = 16  # rows that tensor cores take
MOST_ROWS = 64  # queries times heads of a group
MOST_QUERIES = 8
FEWEST_PARTS = 8  # that keys are split into, if at all: else one pass over them is faster


def few_queries(group: int) -> int:
    """How many queries of a request are few, where so many heads share a key head."""
    rows: int = next_power_of_2(group)
    return max(1, min(MOST_QUERIES, MOST_ROWS // rows))


def is_short(num_tokens: int, num_reqs: int, num_kv_heads: int, group: int) -> bool:
    """Whether requests with few queries are `short`'s in a batch of this shape: few queries on average, and so small
    that keys are split, or so large that they are not and a group's queries fill the smallest tile."""
    if num_tokens > num_reqs * few_queries(group):
        return False
    parts = num_parts(num_reqs, num_kv_heads)
    return parts >= FEWEST_PARTS or (parts == 1 and group * few_queries(group) <= SMALLEST_TILE)


def short_tile(dtype: torch.dtype, head_dim: int, group: int, *, eight_bits: bool = False) -> Tile:
    """The tile for a head size: rows for all queries that are few; two warps were fastest for small heads of a cache of
    `eight_bits` (tests/bench/results/h200_attention.json)."""
    rows = max(SMALLEST_TILE, next_power_of_2(group * few_queries(group)))
    if is_wide(dtype):
        return Tile(rows, keys=32 if head_dim <= 64 else 16, num_warps=4, num_stages=2)
    num_warps = 2 if eight_bits and head_dim <= 64 and rows <= 32 else 4
    keys, num_stages = 64 if head_dim <= 128 else 32, 3 if head_dim <= 256 else 2
    return Tile(rows, keys, num_warps, num_stages)


def short(
    q: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    max_seq_len: int,
    form: ScoreForm,
    tile: Tile,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens of requests with few queries: [tokens, heads, dim]. The cache is read only.

    Given an `out`, it writes those in there; else there are no others, and padding tokens get 0.
    """
    num_tokens, num_heads, dim = q.shape
    num_reqs, num_kv_heads = seq_lens.shape[0], kv.shape[3]
    group = num_heads // num_kv_heads
    few, parts = few_queries(group), num_parts(num_reqs, num_kv_heads)
    span = min(max_seq_len, form.window + few - 1) if form.window else max_seq_len
    splits, places = parts_of(span, parts, tile.keys), num_reqs * few
    shape = (num_tokens, num_heads, splits) if splits > 1 else (1, 1, 1)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
    mass = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    end = 0  # of the padding that is zeroed
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        places, end = max(places, num_tokens), num_tokens
    fixed = dict(HEADS=num_heads, DIM=dim, WIDTH=lanes(dim), FEW=few, **early_launch())  # fmt: skip
    _short[(num_kv_heads, splits, num_reqs + 1)](
        q, kv, out, partial, mass, kv_scales, query_start_loc, seq_lens, block_table, form.scale, form.cap, num_reqs,
        end, parts, splits, block_table.shape[1], *q.stride()[:2], *kv.stride()[:4], block_table.stride(0), **fixed,
        BLOCK_SIZE=kv.shape[2], KEYS=tile.keys, WINDOW=form.window, GROUP=group, ROWS=tile.rows,
        HAS_CAP=form.cap > 0, STAGES=tile.num_stages, SPLIT=splits > 1, num_warps=tile.num_warps,
    )  # fmt: skip
    if splits > 1:
        _join_tokens[(num_heads, places)](
            out, partial, mass, kv_scales, query_start_loc, num_reqs, end, splits, **fixed, num_warps=4
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "parts", "splits", "table_columns", "table_row"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "scales"],
)
def _short(
    q, kv, out, partial, mass, scales, query_start_loc, seq_lens, block_table, scale, cap, num_reqs, num_tokens, parts,
    splits, table_columns, q_token, q_head, kv_block, kv_plane, kv_slot, kv_head, table_row, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HAS_CAP: tl.constexpr, STAGES: tl.constexpr, FEW: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    group, part, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_request = request < num_reqs
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1, mask=is_request, other=start) - start
    length = tl.load(seq_lens + request, mask=is_request, other=0)
    length = tl.minimum(length, table_columns * BLOCK_SIZE)
    row = tl.arange(0, ROWS)
    query = row // GROUP
    lane = tl.arange(0, WIDTH)[None, :]
    exists = query < tl.where(num_queries <= FEW, num_queries, 0)
    token = (start + query).to(tl.int64)
    head = group * GROUP + row % GROUP
    position = length - num_queries + query
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - num_queries - WINDOW + 1, 0)
    used = tl.minimum(parts, tl.cdiv(length - first, KEYS))
    used = tl.maximum(tl.maximum(used, tl.cdiv(length - first, LONGEST_PART)), 1)
    largest, total, values = empty_softmax(ROWS, WIDTH)
    if (part < used) & (num_queries > 0) & (num_queries <= FEW):
        place = token[:, None] * q_token + head[:, None] * q_head + lane
        x = tl.load(q + place, mask=exists[:, None] & (lane < DIM), other=0.0)
        x, own_scale = fitting(x, score_scale(scale, scales), out.dtype.element_ty, kv.dtype.element_ty)
        heads = kv + group * kv_head
        table = block_table + request.to(tl.int64) * table_row
        for tile in tl.range(first // KEYS + part, tl.cdiv(length, KEYS), used, num_stages=STAGES):
            at = tile * KEYS + tl.arange(0, KEYS)
            there = (at >= first) & (at < length)
            k, v = load_tile(
                heads, table, at, there, kv_block, kv_plane, kv_slot, BLOCK_SIZE, DIM, WIDTH, True
            )
            seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, scores_of(x, k.to(x.dtype), own_scale, cap, HAS_CAP), float("-inf"))
            largest, total, values = take_in(score, v.to(x.dtype), largest, total, values)
    cell = (token * HEADS + head) * splits + part
    if SPLIT:  # parts that had nothing to see say so
        tl.store(partial + cell[:, None] * DIM + lane, values, mask=exists[:, None] & (lane < DIM))
        tl.store(mass + cell * 2, largest, mask=exists)
        tl.store(mass + cell * 2 + 1, total, mask=exists)
    else:
        result = finished(values, total, scales, out.dtype.element_ty)
        tl.store(out + cell[:, None] * DIM + lane, result, mask=exists[:, None] & (lane < DIM))
        heads = (group * GROUP + row)[:, None] * DIM + lane
        for padding in range(start, tl.where(is_request, start, num_tokens)):
            nothing = tl.zeros([ROWS, WIDTH], out.dtype.element_ty)
            row_of_out = out + tl.cast(padding, tl.int64) * HEADS * DIM
            tl.store(row_of_out + heads, nothing, mask=(row < GROUP)[:, None] & (lane < DIM))


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "splits"],
    do_not_specialize_on_alignment=["query_start_loc", "scales"],
)
def _join_tokens(
    out, partial, mass, scales, query_start_loc, num_reqs, num_tokens, splits, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one query and head, joined; and 0 for the place-th token past the last request, below num_tokens."""
    take_turn(EARLY)
    head, place = tl.program_id(0), tl.program_id(1)
    request = tl.minimum(place // FEW, num_reqs - 1)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    exists = (place < num_reqs * FEW) & (place % FEW < num_queries) & (num_queries <= FEW)
    token = (start + place % FEW).to(tl.int64)
    there = tl.where(exists, splits, 0)
    cell = (token * HEADS + head) * splits
    total, values = join_parts(partial, mass, cell, splits, there, there, DIM, WIDTH)
    result = finished(values, total, scales, out.dtype.element_ty)
    lane = tl.arange(0, WIDTH)[None, :]
    tl.store(out + (token * HEADS + head) * DIM + lane, result, mask=lane < tl.where(exists, DIM, 0))
    padding = tl.load(query_start_loc + num_reqs) + place
    row = out + (padding.to(tl.int64) * HEADS + head) * DIM
    nothing = tl.zeros([1, WIDTH], out.dtype.element_ty)
    tl.store(row + lane, nothing, mask=lane < tl.where(padding < num_tokens, DIM, 0))
