"""Log-probabilities of tokens straight from hidden states: each tile of the head's product is surveyed in registers.

So logits, which are in float32 more than any cache holds, are neither written nor read. Every logit is summed in order
of the columns by the same instructions, and tiles of the vocabulary are joined in one order: what is told of a row
depends on nothing but that row and the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from purestep.kernels.reference import compositions
from purestep.kernels.triton import shared
from purestep.kernels.triton.linear import MOST_TOKENS, is_own, logits
from purestep.kernels.triton.logprobs import normalizer, score
from purestep.kernels.triton.select import finite, larger
from purestep.kernels.triton.shared import (
    INTERPRETED,
    LARGEST_KEY,
    SMALLEST_KEY,
    cdiv,
    float_of,
    next_power_of_2,
    order_key,
)
from purestep.kernels.types import Kernels

ROWS, VOCAB, STEP = 128, 256, 64  # a tile: of x, of the weight, and columns that are multiplied at a time
OWN_ROWS = 64
PROGRAMS = 132  # one on each processor of an H200, which takes one tile after the other
LOG2_E = tl.constexpr(1.4426950408889634)
GROUP = 4  # tiles of the vocabulary whose weights are shared while they are in the cache
ROWS_AT_ONCE = 8192  # a tile of the vocabulary leaves 16 bytes of each


def score_hidden(
    kernels: Kernels, x: Tensor, weight: Tensor, ids: Tensor, num_logprobs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`score` of `logits`; of many rows in bfloat16, and with at most one likeliest token, without making logits."""
    if not _fits(kernels, x, weight, num_logprobs):
        return compositions.score_hidden(kernels, x, weight, ids, num_logprobs)

    def scored(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return score_by(x, weight, ids, num_logprobs, tile=(ROWS, VOCAB, STEP))

    return compositions.in_parts(scored, x, ids, ROWS_AT_ONCE)


def _fits(kernels: Kernels, x: Tensor, weight: Tensor, num_logprobs: int) -> bool:
    """Whether it is as fast as can be, and means what the set's parts mean."""
    return (
        is_own(kernels)
        and (kernels.logits, kernels.score) == (logits, score)
        and len(x) > MOST_TOKENS
        and num_logprobs <= 1
        and x.dtype == weight.dtype == torch.bfloat16
        and x.shape[1] % STEP == 0
        and len(weight) % VOCAB == 0
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
        and shared.is_hopper_or_later()
    )


def score_by(
    x: Tensor, weight: Tensor, ids: Tensor, num_logprobs: int, *, tile: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """`score_hidden` by tiles of this size; at most one likeliest token, and tiles divide width and vocabulary."""
    (rows, width), vocab, n, device = x.shape, len(weight), num_logprobs, x.device
    row_tiles, tiles = cdiv(rows, tile[0]), vocab // tile[1]
    programs = min(row_tiles * tiles, PROGRAMS)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    totals = torch.empty(2, rows, tiles, dtype=torch.float32, device=device)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    firsts = torch.empty(rows, tiles, dtype=torch.int32, device=device) if n else None
    _own_logits[(cdiv(rows, OWN_ROWS),)](
        x, weight, ids, own, x.stride(0), weight.stride(0), ids.stride(0), rows, WIDTH=width, ROWS=OWN_ROWS,
        STEP=tile[2], num_warps=4, num_stages=3,
    )  # fmt: skip
    _score_tiles[(programs,)](
        TensorDescriptor.from_tensor(x, [tile[0], tile[2]]), TensorDescriptor.from_tensor(weight, [tile[1], tile[2]]),
        ids, own, totals, counts, firsts, ids.stride(0), rows, row_tiles, tiles, programs, WIDTH=width, ROWS=tile[0],
        VOCAB=tile[1], STEP=tile[2], GROUP=GROUP, num_warps=8, num_stages=3,
    )  # fmt: skip
    out_ids = torch.empty(rows, n + 1, dtype=torch.int32, device=device)
    out_values = torch.empty(rows, n + 1, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    _join_tiles[(rows,)](
        ids, own, totals, counts, firsts, out_ids, out_values, ranks, ids.stride(0), rows, tiles, N=n,
        TILES=next_power_of_2(tiles),
    )  # fmt: skip
    return out_ids, out_values, ranks


@triton.jit
def _times(a, b, sums):
    """sums + a times the transpose of b."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids"])
def _own_logits(
    x, weight, ids, own, x_step, weight_step, ids_step, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The logit of each row's own token, to the bit what `_score_tiles` finds: the diagonal of a product."""
    place = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + place
    exists = row < rows
    token = tl.load(ids + row * ids_step, mask=exists, other=0)
    column = tl.arange(0, STEP)[None, :]
    x += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_step + column
    weight += token.to(tl.int64)[:, None] * weight_step + column
    sums = tl.zeros([ROWS, ROWS], tl.float32)
    for at in range(0, WIDTH, STEP):
        sums = _times(tl.load(x + at), tl.load(weight + at), sums)
    diagonal = tl.sum(tl.where(place[:, None] == place[None, :], sums, 0.0), 1)
    tl.store(own + row, diagonal, mask=exists)


@triton.jit(do_not_specialize=["rows", "row_tiles", "programs"], do_not_specialize_on_alignment=["ids"])
def _score_tiles(
    x, weight, ids, own, totals, counts, firsts, ids_step, rows, row_tiles, tiles, programs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, VOCAB: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of tiles of logits, by row: the largest and the sum of exp(entry - that), how many but the row's own token are
    at least as large as that one's, and the first of the largest.

    What is done to every entry counts: one instruction more is half a percent of the whole.
    """
    for number in range(tl.program_id(0), row_tiles * tiles, programs):
        group = number // (GROUP * row_tiles)
        size = tl.minimum(tiles - group * GROUP, GROUP)
        within = number % (GROUP * row_tiles)
        tile, row_tile = group * GROUP + within % size, within // size
        value = tl.zeros([ROWS, VOCAB], tl.float32)
        for at in range(0, WIDTH, STEP):
            value = _times(x.load([row_tile * ROWS, at]), weight.load([tile * VOCAB, at]), value)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        token = tile * VOCAB + tl.arange(0, VOCAB)[None, :]
        key = tl.max(order_key(value), 1) if INTERPRETED else order_key(tl.reduce(value, 1, larger))
        peak = float_of(key)
        # tl.exp takes three instructions more for results below 2**-126, which are nothing beside a sum from 1 up.
        total = tl.sum(tl.exp2((value - finite(peak)[:, None]) * LOG2_E), 1)
        least = tl.load(own + row, mask=exists, other=0.0)[:, None]
        chosen = tl.load(ids + row * ids_step, mask=exists, other=0)[:, None]
        count = tl.sum(((value >= least) & (token != chosen)).to(tl.int32), 1)
        place = row.to(tl.int64) * tiles + tile
        tl.store(totals + place, peak, mask=exists)
        tl.store(totals + tl.cast(rows, tl.int64) * tiles + place, total, mask=exists)
        tl.store(counts + place, count, mask=exists)
        if firsts is not None:
            is_largest = (value == peak[:, None]) | (value != value)
            tl.store(firsts + place, tl.min(tl.where(is_largest, token, LARGEST_KEY), 1), mask=exists)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids"])
def _join_tiles(
    ids, own, totals, counts, firsts, out_ids, out_values, ranks, ids_step, rows, tiles, N: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    at = row * tiles + tile
    value = tl.load(own + row)
    count = tl.sum(tl.load(counts + at, mask=tile < tiles, other=0), 0) + (value == value).to(tl.int32)
    tl.store(ranks + row, count.to(tl.int64))
    peak, log_sum = normalizer(totals + row * tiles, totals + (rows + row) * tiles, tiles, TILES)
    tl.store(out_ids + row * (N + 1), tl.load(ids + row * ids_step).to(tl.int32))
    tl.store(out_values + row * (N + 1), (value - peak) - log_sum)
    if N == 1:
        peaks = tl.load(totals + at, mask=tile < tiles, other=float("-inf"))
        key = tl.where(tile < tiles, order_key(peaks), SMALLEST_KEY)
        best = row * tiles + tl.min(tl.where(key == tl.max(key, 0), tile, LARGEST_KEY), 0)
        tl.store(out_ids + row * 2 + 1, tl.load(firsts + best))
        tl.store(out_values + row * 2 + 1, (tl.load(totals + best) - peak) - log_sum)
