"""Paged attention of one query a request: its keys are split among programs, whose parts a second kernel joins.

The new token's key and value, turned and normed if that is wanted, are written by the first part, which begins with
them instead of reading them back: nobody else reads that slot in this launch. A request's tiles of older keys are
dealt out to its parts in turn. How many parts there are depends on the request's own length and on the shape of the
batch, never on the bounds: so a larger bound changes no bit. The parts are joined in order, sixteen at a time.
Source: https://pytorch.org/blog/flash-decoding/.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.rotation import Rotation, load_angles, load_turned, place_of
from purestep.kernels.triton.shared import (
    early_launch,
    let_next_begin,
    next_power_of_2,
    stored,
    wait_for_previous,
)
from purestep.kernels.triton.softmax import (
    ScoreForm,
    Tile,
    capped,
    empty_softmax,
    finished,
    fitting,
    is_wide,
    lanes,
    load_slots,
    load_tile,
    score_scale,
    scores_of,
    take_in,
)

PROGRAMS = (
    528  # that keep a large chip busy: four on each of 132 processors, or half as many with eight warps
)
MOST_PARTS = 64
LONGEST_PART = tl.constexpr(4096)  # keys that one program takes at most
PARTS = tl.constexpr(16)  # joined at a time


# At most so many (request, key head) pairs: keys, warps, stages, whether the first tile is fetched first; by whether
# the cache has eight bits, whether there are more than 16 rows, and whether heads are wider than 64.
Cuts = tuple[tuple[float, int, int, int, bool], ...]
INF = math.inf
# fmt: off
TILES: dict[tuple[bool, bool, bool], Cuts] = {
    (False, False, False): ((16, 64, 4, 3, True), (127, 64, 4, 2, True),
        (1024, 32, 1, 5, False), (INF, 64, 4, 2, False)),
    (False, False, True): ((127, 64, 8, 3, True), (1024, 64, 2, 3, False), (INF, 32, 1, 3, False)),
    (False, True, False): ((16, 64, 4, 3, True), (127, 64, 4, 2, True),
        (1024, 64, 2, 5, False), (INF, 32, 1, 5, False)),
    (False, True, True): ((16, 64, 4, 3, False), (1024, 64, 2, 3, False), (INF, 32, 1, 3, False)),
    (True, False, False): ((16, 64, 4, 3, True), (127, 64, 4, 3, False),
        (1024, 128, 4, 2, False), (INF, 32, 1, 5, False)),
    (True, False, True): ((16, 64, 4, 2, False), (1024, 64, 2, 5, False), (INF, 32, 1, 5, False)),
}
# fmt: on


def decode_tile(
    dtype: torch.dtype, head_dim: int, group: int, num_pairs: int, *, eight_bits: bool = False
) -> Tile:
    """The tile for a head size and a number of (request, key head) pairs; at least 16 rows, as tensor cores want them.

    Narrow types: what was fastest on an H200, 1120 keys each (tests/bench/results/h200_products.json): within captured
    steps at 8, 64, 512 and 2048 pairs, or alone for 32 rows and for a cache of `eight_bits` with 16; still more rows
    have as many times the warps.
    """
    rows = max(16, next_power_of_2(group))
    if is_wide(dtype):
        return Tile(rows, keys=32 if head_dim <= 64 else 16, num_warps=4, num_stages=3)
    if head_dim > 128:
        return Tile(rows, keys=32, num_warps=4, num_stages=5 if head_dim <= 256 else 2)
    cuts = TILES[eight_bits, rows > 16 and not eight_bits, head_dim > 64]
    _, keys, num_warps, num_stages, fetch_first = next(cut for cut in cuts if num_pairs <= cut[0])
    return Tile(rows, keys, min(num_warps * max(1, rows // 32), 8), num_stages, fetch_first)


def num_parts(num_reqs: int, num_kv_heads: int, num_warps: int = 4) -> int:
    """Into how many parts the keys of each request are split, if it is not very long: a power of two."""
    programs = PROGRAMS if num_warps <= 4 else PROGRAMS // 2
    wanted = programs // max(num_reqs * num_kv_heads, 1)
    return min(max(1, 1 << max(wanted.bit_length() - 1, 0)), MOST_PARTS)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    max_seq_len: int,
    form: ScoreForm,
    tile: Tile,
    rotation: Rotation | None = None,
    kv_scales: Tensor | None = None,
    settled: bool = False,
) -> Tensor:
    """Attention where no request has more than one query token: [tokens, heads, dim]; writes k and v into `kv`.

    q [tokens, heads, dim] and k [tokens, kv_heads, dim] are turned by `rotation`, if it is given. `settled` as in
    `attend_qkv`: lengths, block ids and the first keys are read before the kernel's turn.
    """
    num_tokens, num_heads, dim = q.shape
    num_reqs, num_kv_heads = seq_lens.shape[0], kv.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    places = max(num_reqs, num_tokens)  # the further ones zero padding tokens
    parts = num_parts(num_reqs, num_kv_heads, tile.num_warps)
    span = min(max_seq_len, form.window) if form.window else max_seq_len
    grid_parts = parts_of(span, parts, tile.keys)
    shape = (num_reqs, num_heads, grid_parts) if grid_parts > 1 else (1, 1, 1)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
    mass = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    counts = (num_reqs, num_tokens, parts, grid_parts, block_table.shape[1])
    fixed = dict(HEADS=num_heads, DIM=dim, WIDTH=lanes(dim), BLOCK_SIZE=kv.shape[2], KEYS=tile.keys,
                 WINDOW=form.window, SETTLED=settled, **early_launch())  # fmt: skip
    turn = (None,) * 4 if rotation is None else (rotation.cos, rotation.sin, rotation.q_gain, rotation.k_gain)
    _decode[(num_kv_heads, grid_parts, places)](
        q, k, v, kv, out, partial, mass, kv_scales, *turn, query_start_loc, seq_lens, block_table, slot_mapping,
        form.scale, form.cap, 0.0 if rotation is None else rotation.eps, *counts, kv.shape[0], *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *kv.stride()[:4], block_table.stride(0),
        **fixed, GROUP=num_heads // num_kv_heads, ROWS=tile.rows, HAS_CAP=form.cap > 0, SPLIT=grid_parts > 1,
        STAGES=tile.num_stages, FETCH_FIRST=tile.fetch_first, num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    if grid_parts > 1:
        _join[(num_heads, places)](
            out, partial, mass, kv_scales, query_start_loc, seq_lens, *counts, **fixed, num_warps=1
        )
    return out


def parts_of(span: int, parts: int, keys: int) -> int:
    """Into how many parts the keys of a request that sees `span` of them are split; `_seen` on the device."""
    longest: int = LONGEST_PART.value
    return max(min(parts, -(-span // keys)), -(-span // longest), 1)


@triton.jit
def _seen(length, parts, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that the query sees, and into how many parts what it sees is split."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    span = length - first
    used = tl.maximum(tl.minimum(parts, tl.cdiv(span, KEYS)), tl.cdiv(span, LONGEST_PART))
    return first, tl.maximum(used, 1)


@triton.jit
def _query_of(query_start_loc, seq_lens, place, num_reqs, capacity):
    """The query token of a request (-1: it has none), and its length.

    What may be read before the kernel's turn is read from the cache that all processors share: what lies in a
    processor's own may be of an earlier step.
    """
    exists = place < num_reqs
    start = tl.load(query_start_loc + place, mask=exists, other=0, cache_modifier=".cg")
    end = tl.load(query_start_loc + place + 1, mask=exists, other=0, cache_modifier=".cg")
    length = tl.load(seq_lens + place, mask=exists, other=0, cache_modifier=".cg")
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


COUNTS = ["num_reqs", "num_tokens", "parts", "grid_parts", "table_columns", "num_blocks", "table_row"]
SMALL = ["query_start_loc", "seq_lens", "block_table", "slot_mapping", "scales"]


@triton.jit
def _new_token(
    q, k, v, kv, out, scales, cos, sin, q_gain, k_gain, slot_mapping, eps, scale, cap, token, length, group, part,
    num_blocks, q_token, q_head, k_token, k_head, v_token, v_head, kv_block, kv_plane, kv_slot, kv_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    """The query rows of a group, and the state of their softmax.

    The first part writes the token's own key and value, and begins as one that has seen them.
    """
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    inside = lane < DIM
    dtype: tl.constexpr = out.dtype.element_ty
    kv_dtype: tl.constexpr = kv.dtype.element_ty
    queries = q + token * q_token + (group * GROUP + row) * q_head
    keys = k + token * k_token + group * k_head
    value = tl.load(v + token * v_token + group * v_head + lane, mask=inside, other=0.0)
    place, room = place_of(slot_mapping, token, num_blocks, kv_block, kv_slot, BLOCK_SIZE, DIM)
    if cos is not None:
        cosine, sine = load_angles(cos, sin, token, lane, DIM)
        query = load_turned(queries, lane, row < GROUP, cosine, sine, q_gain, eps, DIM, dtype)
        key = load_turned(keys, lane, lane >= 0, cosine, sine, k_gain, eps, DIM, dtype)
    else:
        query = tl.load(queries + lane, mask=(row < GROUP) & inside, other=0.0)
        key = tl.load(keys + lane, mask=inside, other=0.0)
    key, value = stored(key, scales, 0, kv_dtype), stored(value, scales, 1, kv_dtype)
    if part == 0:
        target = kv + place + group * kv_head + lane
        tl.store(target, key, mask=lane < room)
        tl.store(target + kv_plane, value, mask=lane < room)
    largest, total, values = empty_softmax(ROWS, WIDTH)
    if (part == 0) & (length > 0):
        largest = capped(tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale, cap, HAS_CAP)
        total = tl.exp2(largest - tl.where(largest == float("-inf"), 0.0, largest))
        values = total[:, None] * value.to(tl.float32)
    return query, largest, total, values


@triton.jit
def _after(query, tile, seen, scale, cap, largest, total, values, HAS_CAP: tl.constexpr):
    """The state of the rows once they have also seen a tile of keys and values, where `seen` says so."""
    score = scores_of(query, tile[0].to(query.dtype), scale, cap, HAS_CAP)
    score = tl.where(seen[None, :], score, float("-inf"))
    return take_in(score, tile[1].to(query.dtype), largest, total, values)


@triton.jit
def _leave(
    out, partial, mass, scales, largest, total, values, cell, target, is_head, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The state of rows that are heads: in cells for `_join`, or finished as the results of an only part."""
    lane = tl.arange(0, WIDTH)[None, :]
    mask = is_head[:, None] & (lane < DIM)
    if SPLIT:
        tl.store(partial + cell[:, None] * DIM + lane, values, mask=mask)
        tl.store(mass + cell * 2, largest, mask=is_head)
        tl.store(mass + cell * 2 + 1, total, mask=is_head)
    else:
        result = finished(values, total, scales, out.dtype.element_ty)
        tl.store(out + target[:, None] * DIM + lane, result, mask=mask)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def _decode(
    q, k, v, kv, out, partial, mass, scales, cos, sin, q_gain, k_gain, query_start_loc, seq_lens, block_table,
    slot_mapping, scale, cap, eps, num_reqs, num_tokens, parts, grid_parts, table_columns, num_blocks, q_token, q_head,
    k_token, k_head, v_token, v_head, kv_block, kv_plane, kv_slot, kv_head, table_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, FETCH_FIRST: tl.constexpr, SETTLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    if not SETTLED:
        wait_for_previous(EARLY)
    group, part, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table = block_table + place.to(tl.int64) * table_row
    num_columns = tl.where(place < num_reqs, table_columns, 0)
    key = part * KEYS + tl.arange(0, KEYS)
    if FETCH_FIRST and WINDOW == 0:  # the first tile lies where it lies, whatever the length is
        at = key // BLOCK_SIZE
        blocks = tl.load(table + at, mask=at < num_columns, other=0, cache_modifier=".cg")
    token, length = _query_of(query_start_loc, seq_lens, place, num_reqs, table_columns * BLOCK_SIZE)
    first, used = _seen(length, parts, KEYS, WINDOW)
    row = tl.arange(0, ROWS)
    past = length - 1
    begin = first // KEYS + part
    is_used = (token >= 0) & (part < used)
    end = tl.where(is_used, past, 0)
    heads = kv + group * kv_head
    if FETCH_FIRST:
        if WINDOW > 0:
            key = begin * KEYS + tl.arange(0, KEYS)
            blocks = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0, cache_modifier=".cg")
        is_old = (key >= first) & (key < end)
        keys = load_slots(
            heads, blocks, key, is_old, kv_block, kv_plane, kv_slot, BLOCK_SIZE, DIM, WIDTH, True, True
        )  # fmt: skip
    if SETTLED:
        wait_for_previous(EARLY)
    if is_used:
        scale = score_scale(scale, scales)
        query, largest, total, values = _new_token(
            q, k, v, kv, out, scales, cos, sin, q_gain, k_gain, slot_mapping, eps, scale, cap, token.to(tl.int64),
            length, group, part, num_blocks, q_token, q_head, k_token, k_head, v_token, v_head, kv_block, kv_plane,
            kv_slot, kv_head, DIM, WIDTH, BLOCK_SIZE, GROUP, ROWS, HAS_CAP,
        )  # fmt: skip
        query, own = fitting(query, scale, out.dtype.element_ty, kv.dtype.element_ty)
        if FETCH_FIRST:
            largest, total, values = _after(query, keys, is_old, own, cap, largest, total, values, HAS_CAP)
            begin += used
        for tile in tl.range(begin, tl.cdiv(past, KEYS), used, num_stages=STAGES):
            at = tile * KEYS + tl.arange(0, KEYS)
            seen = (at >= first) & (at < past)
            old = load_tile(heads, table, at, seen, kv_block, kv_plane, kv_slot, BLOCK_SIZE, DIM, WIDTH, True)
            largest, total, values = _after(query, old, seen, own, cap, largest, total, values, HAS_CAP)
        head = group * GROUP + row
        cell = (place.to(tl.int64) * HEADS + head) * grid_parts + part
        target, is_head = token.to(tl.int64) * HEADS + head, row < GROUP
        _leave(out, partial, mass, scales, largest, total, values, cell, target, is_head, DIM, WIDTH, SPLIT)
    if not SPLIT:
        for i in tl.static_range(GROUP):
            own_head = group * GROUP + i
            _zero_padding(out, query_start_loc, place, own_head, num_reqs, num_tokens, HEADS, DIM, WIDTH)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def _join(
    out, partial, mass, scales, query_start_loc, seq_lens, num_reqs, num_tokens, parts, grid_parts, table_columns,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SETTLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    if not SETTLED:
        wait_for_previous(EARLY)
    head, place = tl.program_id(0), tl.program_id(1)
    token, length = _query_of(query_start_loc, seq_lens, place, num_reqs, table_columns * BLOCK_SIZE)
    _, used = _seen(length, parts, KEYS, WINDOW)
    lane = tl.arange(0, WIDTH)[None, :]
    row = (place.to(tl.int64) * HEADS + head) * grid_parts
    num_there = tl.where(place < num_reqs, grid_parts, 0)
    if SETTLED:
        wait_for_previous(EARLY)
    total, values = join_parts(partial, mass, row, grid_parts, num_there, used, DIM, WIDTH)
    result = finished(values, total, scales, out.dtype.element_ty)
    target = out + (token.to(tl.int64) * HEADS + head) * DIM
    tl.store(target + lane, result, mask=lane < tl.where(token >= 0, DIM, 0))
    _zero_padding(out, query_start_loc, place, head, num_reqs, num_tokens, HEADS, DIM, WIDTH)


@triton.jit
def join_parts(partial, mass, row, grid_parts, num_there, used, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The mass [1] and the weighted values [1, WIDTH] of a query and head whose `used` parts begin at `row`."""
    lane = tl.arange(0, WIDTH)[None, :]
    largest, total, values = empty_softmax(1, WIDTH)
    for start in range(0, grid_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        # What was not written is read too, and dropped: so no load waits for the length.
        there = part < num_there
        peak = tl.load(mass + (row + part) * 2, mask=there, other=0.0)
        weight = tl.load(mass + (row + part) * 2 + 1, mask=there, other=0.0)
        place_of_piece = partial + (row + part)[:, None] * DIM + lane
        piece = tl.load(place_of_piece, mask=there[:, None] & (lane < DIM), other=0.0)
        written = part < used
        peak = tl.where(written, peak, float("-inf"))
        weight = tl.where(written, weight, 0.0)
        piece = tl.where(written[:, None], piece, 0.0)
        now = tl.maximum(largest, tl.max(peak, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        scale = tl.exp2(peak - base)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weight * scale, 0)
        values = values * shrink[:, None] + tl.sum(piece * scale[:, None], 0)[None, :]
        largest = now
    return total, values
