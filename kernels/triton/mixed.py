"""Paged attention of any number of queries a request: prefill, chunks, and decoding requests among them.

A tile is some consecutive queries of one request, times the heads that share a key head. Tiles are numbered so that
a program finds its request from its number: request i owns those from query_start_loc[i] // QUERIES + i on. What lies
past the last request is one more, of length 0, and so is zeroed. Tiles of keys lie at multiples of their size and are
taken in order, and what a row does not see changes no bit of it: so with one tile and without fused roundings, a
query's result is the same in every batch and however its prompt is cut.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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

FEW_QUERIES = 8  # as in the verification of drafts, or with next to nothing but decoding requests
MANY_QUERIES = 256  # as in prefill


def mixed_tile(
    dtype: torch.dtype, head_dim: int, group: int, queries: int, *, eight_bits: bool = False
) -> Tile:
    """The tile for a head size and so many queries a request, on average; at least as many rows as heads share a key
    head. Narrow types: what was fastest on an H200 (tests/bench/results/h200_attention.json), of a cache of
    `eight_bits` too.
    """
    if is_wide(dtype):
        tile = Tile(32 if head_dim <= 64 else 16, 32 if head_dim <= 32 else 16, num_warps=4, num_stages=2)
    elif head_dim > 128:
        tile = Tile(64, 32, num_warps=4, num_stages=2)
    elif queries <= FEW_QUERIES and head_dim <= 64:
        tile = Tile(64, 32, num_warps=4, num_stages=5)
    elif queries <= FEW_QUERIES:
        rows = min(max(16, FEW_QUERIES * group), 256)
        tile = Tile(rows, 128 if rows <= 128 else 64, num_warps=4, num_stages=2 if eight_bits else 3)
    elif eight_bits and head_dim <= 64:
        tile = Tile(128, 64, num_warps=4, num_stages=3)
    elif queries < MANY_QUERIES or head_dim <= 64:
        tile = Tile(64, 64, num_warps=4, num_stages=3)
    else:
        tile = Tile(256, 64, num_warps=8, num_stages=3)
    rows = next_power_of_2(max(tile.rows, group))
    return Tile(rows, tile.keys, tile.num_warps, tile.num_stages)


def mixed(
    q: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    form: ScoreForm,
    tile: Tile,
    kv_scales: Tensor | None = None,
    fuses: bool = True,
) -> Tensor:
    """Attention of every query token: [tokens, heads, dim]. The cache is read only.

    Where it `fuses` products with sums, a key that needs no mask may be taken in with other roundings than one that
    does.
    """
    num_tokens, num_heads, dim = q.shape
    num_reqs, num_kv_heads = seq_lens.shape[0], kv.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = num_heads // num_kv_heads
    queries = tile.rows // group
    _mixed[(num_kv_heads, num_tokens // queries + num_reqs + 1)](
        q, kv, out, kv_scales, query_start_loc, seq_lens, block_table, form.scale, form.cap, num_reqs, num_tokens,
        block_table.shape[1], *q.stride()[:2], *kv.stride()[:4], block_table.stride(0),
        HEADS=num_heads, DIM=dim, WIDTH=lanes(dim), BLOCK_SIZE=kv.shape[2], KEYS=tile.keys,
        WINDOW=form.window, GROUP=group, ROWS=tile.rows, QUERIES=queries, HAS_CAP=form.cap > 0,
        STAGES=tile.num_stages, num_warps=tile.num_warps, enable_fp_fusion=fuses, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _request_of(query_start_loc, tile, num_reqs, QUERIES: tl.constexpr):
    """The last request whose first tile is not behind this one; num_reqs for the padding behind them all."""
    low = tile * 0
    high = low + num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "table_columns", "table_row"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "scales"],
)
def _mixed(
    q, kv, out, scales, query_start_loc, seq_lens, block_table, scale, cap, num_reqs, num_tokens, table_columns,
    q_token, q_head, kv_block, kv_plane, kv_slot, kv_head, table_row, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, HAS_CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    # Tiles with the most keys begin first.
    group, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    request = _request_of(query_start_loc, tile, num_reqs, QUERIES)
    is_request = request < num_reqs
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1, mask=is_request, other=num_tokens) - start
    length = tl.load(seq_lens + request, mask=is_request, other=0)
    length = tl.minimum(length, table_columns * BLOCK_SIZE)
    first = (tile - start // QUERIES - request) * QUERIES
    if first < num_queries:
        row = tl.arange(0, ROWS)
        query = first + row // GROUP
        lane = tl.arange(0, WIDTH)[None, :]
        mask = ((row < QUERIES * GROUP) & (query < num_queries))[:, None] & (lane < DIM)
        token = (start + query).to(tl.int64)[:, None]
        head = (group * GROUP + row % GROUP)[:, None]
        x = tl.load(q + token * q_token + head * q_head + lane, mask=mask, other=0.0)
        x, own_scale = fitting(x, score_scale(scale, scales), out.dtype.element_ty, kv.dtype.element_ty)
        largest, mass, values = empty_softmax(ROWS, WIDTH)
        position = length - num_queries + query
        lowest = length - num_queries + first
        end = lowest + tl.minimum(QUERIES, num_queries - first)
        begin = lowest * 0
        seen_by_all = tl.maximum(lowest + 1, 0) // KEYS * KEYS
        if WINDOW > 0:
            # Tiles lie alike for every query.
            begin = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
            seen_by_all = begin
        kv = kv + group * kv_head
        table = block_table + request.to(tl.int64) * table_row
        for at in tl.range(begin, seen_by_all, KEYS, num_stages=STAGES):
            key = at + tl.arange(0, KEYS)
            k, v = load_tile(kv, table, key, key, kv_block, kv_plane, kv_slot, BLOCK_SIZE, DIM, WIDTH, False)
            score = scores_of(x, k.to(x.dtype), own_scale, cap, HAS_CAP)
            largest, mass, values = take_in(score, v.to(x.dtype), largest, mass, values)
        for at in tl.range(seen_by_all, end, KEYS, num_stages=STAGES):
            key = at + tl.arange(0, KEYS)
            exists = key < end
            if WINDOW > 0:
                exists = exists & (key > lowest - WINDOW)
            k, v = load_tile(
                kv, table, key, exists, kv_block, kv_plane, kv_slot, BLOCK_SIZE, DIM, WIDTH, True
            )
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, scores_of(x, k.to(x.dtype), own_scale, cap, HAS_CAP), float("-inf"))
            largest, mass, values = take_in(score, v.to(x.dtype), largest, mass, values)
        result = finished(values, mass, scales, out.dtype.element_ty)
        tl.store(out + (token * HEADS + head) * DIM + lane, result, mask=mask)
