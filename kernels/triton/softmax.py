"""Attention of some query rows to a run of one request's keys, tile by tile with a running softmax.

Scores are in units of log 2, so that `exp2` gives the weights. Source: https://arxiv.org/abs/2205.14135 (online
softmax), https://arxiv.org/abs/2309.06180 (paged keys and values).
"""

import math

import torch
import triton
import triton.language as tl

from purestep.kernels.record import record
from purestep.kernels.triton.shared import INTERPRETED, next_power_of_2, rounded

LOG2_E = math.log2(math.e)


@record(static=True)
class Tile:
    """How a kernel is cut: query rows (heads of one group count as rows), keys a step, warps, pipeline stages; and
    whether its first keys are fetched before the query, which saves a round trip where programs are few."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    fetch_first: bool = False


@record(static=True)
class ScoreForm:
    """score = scale * q.k, or cap * tanh(scale * q.k), with the factors that make it a multiple of log 2."""

    scale: float
    cap: float
    window: int  # positions that a query sees, itself included; 0 for all


def score_form(scale: float, soft_cap: float | None, sliding_window: int | None) -> ScoreForm:
    """The form of scores in units of log 2."""
    window = sliding_window or 0
    if soft_cap is None:
        return ScoreForm(scale * LOG2_E, 0.0, window)
    return ScoreForm(scale / soft_cap, soft_cap * LOG2_E, window)


def is_wide(dtype: torch.dtype) -> bool:
    """Whether tensor cores would lose bits, so that products are made by plain arithmetic."""
    return dtype == torch.float32


def lanes(head_dim: int) -> int:
    """The width of a tile that holds a head: a power of two, and enough for tensor cores."""
    return max(16, next_power_of_2(head_dim))


@triton.jit
def empty_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The state of rows that have seen no key: largest score, mass, weighted values."""
    return (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, WIDTH], tl.float32),
    )


@triton.jit
def load_tile(
    kv, table, key, valid, kv_block, kv_plane, kv_slot, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values [keys, WIDTH] at the positions `key`; 0 where not `valid`, whatever lies there.

    kv points at one head's place in the first slot, table at the block ids of the request.
    """
    block = (
        tl.load(table + key // BLOCK_SIZE, mask=valid, other=0)
        if MASKED
        else tl.load(table + key // BLOCK_SIZE)
    )
    return load_slots(kv, block, key, valid, kv_block, kv_plane, kv_slot, BLOCK_SIZE, DIM, WIDTH, MASKED)


@triton.jit
def load_slots(
    kv, block, key, valid, kv_block, kv_plane, kv_slot, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, FRESH: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of positions whose block ids are known; FRESH: past a processor's own cache, if MASKED."""
    lane = tl.arange(0, WIDTH)[None, :]
    place = kv + (block.to(tl.int64) * kv_block + (key % BLOCK_SIZE) * kv_slot)[:, None] + lane
    if MASKED:
        mask = valid[:, None] & (lane < DIM)
        if FRESH:
            keys = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
            return keys, tl.load(place + kv_plane, mask=mask, other=0.0, cache_modifier=".cg")
        else:
            return tl.load(place, mask=mask, other=0.0), tl.load(place + kv_plane, mask=mask, other=0.0)
    elif DIM < WIDTH:
        return tl.load(place, mask=lane < DIM, other=0.0), tl.load(
            place + kv_plane, mask=lane < DIM, other=0.0
        )
    else:
        return tl.load(place), tl.load(place + kv_plane)


@triton.jit
def fitting(query, scale, dtype: tl.constexpr, kv_dtype: tl.constexpr):
    """The query rows of `dtype` in the type in which they meet keys of `kv_dtype`, and the scale of their scores.

    Eight-bit floats become float16 several times faster than bfloat16, and lose nothing either way. Rows of bfloat16
    are brought to the upper end of its range by powers of two, which their scales [rows, 1] take back: so numbers down
    to 2**-28 of a row's largest keep all of their bits.
    """
    if kv_dtype == tl.float8e4nv and dtype == tl.bfloat16:
        query = query.to(tl.float32)
        largest = tl.max(tl.abs(query), 1)[:, None]
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000) - (14 << 23)
        power = tl.where(largest < float("inf"), tl.maximum(power, 1 << 23), 127 << 23)
        inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
        query = (query * inverse).to(tl.float16)
        scale *= power.to(tl.float32, bitcast=True)
    return query.to(tl.float32) if INTERPRETED else query, scale


@triton.jit
def scores_of(q, k, scale, cap, HAS_CAP: tl.constexpr):
    """Scores [rows, keys] in units of log 2."""
    return capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, HAS_CAP)


@triton.jit
def capped(score, cap, HAS_CAP: tl.constexpr):
    """cap * tanh(score), where there is a cap."""
    if HAS_CAP:
        shrunk = tl.exp(-2.0 * tl.abs(score))
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        score = tl.where(score < 0, -tanh, tanh) * cap
    return score


@triton.jit
def take_in(score, v, largest, mass, values):
    """The state of the rows after they have also seen keys with these scores (-inf: not seen)."""
    now = tl.maximum(largest, tl.max(score, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(largest - base)
    mass = mass * shrink + tl.sum(weight, 1)
    values = tl.dot(rounded(weight, v.dtype), v, values * shrink[:, None], input_precision="ieee")
    return now, mass, values


@triton.jit
def normalized(values, mass):
    """Values over mass; exactly 0 for a row that saw nothing, NaN for one that saw NaN."""
    nothing = (mass == 0.0)[:, None]
    return tl.where(nothing, 0.0, values / tl.where(nothing, 1.0, mass[:, None]))


@triton.jit
def score_scale(scale, scales):
    """The scale of scores with keys as they are stored."""
    if scales is not None:
        scale = scale * tl.load(scales)
    return scale


@triton.jit
def finished(values, mass, scales, dtype: tl.constexpr):
    """`normalized` where values are as they are stored, in the type of outputs."""
    result = normalized(values, mass)
    if scales is not None:
        result = result * tl.load(scales + 1)
    return rounded(result, dtype)
