"""Finding the place of a cut in an unsorted row, exactly and without a sort.

Every function looks at a list: `values` in order of id, `count` of them. A list is a whole row, or the few candidates
of it that can matter: entries not below a floor that is sure to lie under the cut. Sums are made in one fixed order.
Where a `peak` and a `divisor` are given, the entries are those of the list as temperature leaves them (`scaled`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.triton.shared import (
    INTERPRETED,
    LARGEST_KEY,
    SMALLEST_KEY,
    cdiv,
    check_floats,
    check_rows,
    float_of,
    order_key,
)

CHUNK = 4096  # of a row, per program of the survey
INFINITY_KEY = tl.constexpr(0x7F800000)  # order_key of infinity
ENTRIES = tl.constexpr(1024)  # of a list, looked at together
GATHERED = tl.constexpr(2048)  # of a row, looked at together for a list
NEAR_KEYS = tl.constexpr(2**14)  # a thousandth of a number's size, or two
NEAR = tl.constexpr(1 / 64)  # as a number
PROBES = tl.constexpr(8)  # places that one pass tries


@record
class MassesFor:
    """Whose masses are wanted: those of rows that top-p cuts and top-k does not; [rows] each."""

    top_k: Tensor
    top_p: Tensor
    temperature: Tensor | None = None  # by which entries are to be divided


def survey(
    values: Tensor,
    sub_block: int,
    than: Tensor | None = None,
    *,
    sums: bool = False,
    masses: MassesFor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The largest key of every `sub_block` entries of each row, int32 [rows, sub_blocks]; one pass.

    With `than` [rows], ids: also how many entries of a chunk are at least as large as that one, int32 [rows, chunks].
    With `sums`: also the largest of a chunk and the sum of exp(entry - that), float32 [2, rows, chunks]. With `masses`:
    the same of entries divided by temperature, which the largest is not, for the rows that need it; else anything.
    """
    check_floats("survey", values)
    check_rows("survey", values=values)
    rows, width = values.shape
    chunks, subs = cdiv(width, CHUNK), cdiv(width, sub_block)
    peaks = torch.empty(rows, subs, dtype=torch.int32, device=values.device)
    counts = None if than is None else torch.empty(rows, chunks, dtype=torch.int32, device=values.device)
    has_totals = sums or masses is not None
    totals = torch.empty(2, rows, chunks, dtype=torch.float32, device=values.device) if has_totals else None
    per_row = (than, *((None,) * 3 if masses is None else (masses.top_k, masses.top_p, masses.temperature)))
    if peaks.numel():
        _survey[(rows, chunks)](
            values, *per_row, peaks, counts, totals, values.stride(0),
            *(0 if x is None else x.stride(0) for x in per_row), width, subs, chunks, rows, SUB=sub_block,
            SUBS=CHUNK // sub_block,
        )  # fmt: skip
    return peaks, counts, totals


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["than", "top_k", "top_p", "temperature"]
)
def _survey(
    values, than, top_k, top_p, temperature, peaks, counts, totals, step, than_step, k_step, p_step, t_step, width,
    subs, chunks, rows, SUB: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sub = chunk * SUBS + tl.arange(0, SUBS)
    place = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    value = tl.load(values + row * step + place, mask=place < width, other=float("-inf")).to(tl.float32)
    # The largest float, then its key, is a seventh of the instructions; the interpreter has no such maximum.
    keys = tl.max(order_key(value), 1) if INTERPRETED else order_key(tl.reduce(value, 1, larger))
    tl.store(peaks + row * subs + sub, keys, mask=sub < subs)
    if than is not None:
        own = tl.load(values + row * step + tl.load(than + row * than_step)).to(tl.float32)
        reached = ((value >= own) & (place < width)).to(tl.int32)
        tl.store(counts + row * chunks + chunk, tl.sum(tl.sum(reached, 1), 0))
    if totals is not None:
        is_wanted = rows > 0
        divisor = 1.0
        if top_p is not None:
            k = tl.load(top_k + row * k_step).to(tl.int32)
            is_wanted = (tl.load(top_p + row * p_step) < 1.0) & ((k <= 0) | (k >= width))
            if temperature is not None:
                divisor = tl.load(temperature + row * t_step).to(tl.float32)
        if is_wanted:
            peak = float_of(tl.max(keys, 0))
            below = value - finite(peak)
            if top_p is not None:
                below = scaled(below, 0.0, divisor)
            tl.store(totals + row * chunks + chunk, peak)
            tl.store(totals + (rows + row) * chunks + chunk, tl.sum(tl.sum(tl.exp(below), 1), 0))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite(x):
    """0 for infinities, from which no difference can be taken."""
    return tl.where((x == float("inf")) | (x == float("-inf")), 0.0, x)


@triton.jit
def reached_by(keys, n):
    """A key that n of a tile of keys reach, n at least 1: the largest such key, or one below it that is near both as a
    key and as a number."""
    low = n.to(tl.int64) * 0 + SMALLEST_KEY
    high = low + 4294967295
    is_far = low < high
    while is_far:
        middle = (low + high + 1) >> 1
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= n:
            low = middle
        else:
            high = middle - 1
        distance = float_of(high.to(tl.int32)) - float_of(low.to(tl.int32))
        is_far = (low < high) & ((high - low > NEAR_KEYS) | (distance > NEAR))
    return low.to(tl.int32)


@triton.jit
def scaled(value, peak, divisor):
    """(value - peak) / divisor, rounded as the reference rounds it; the value itself where the divisor is 1."""
    return tl.where(divisor == 1.0, value, tl.div_rn(value - peak, tl.zeros_like(value) + divisor))


@triton.jit
def mass_of_row(totals, row, chunks, rows, top, CHUNKS: tl.constexpr, peak=0.0, divisor=1.0):
    """What all entries of a row weigh, relative to its largest one `top`, by its chunks as `survey` found them."""
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    own = tl.load(totals + row * chunks + chunk, mask=there, other=float("-inf"))
    total = tl.load(totals + (rows + row) * chunks + chunk, mask=there, other=0.0)
    weight = tl.exp(scaled(own, peak, divisor) - top)
    # A chunk that is -inf throughout has summed exp(-inf) of 0 below it: nothing.
    return tl.sum(tl.where(own > float("-inf"), total * weight, 0.0), 0)


@triton.jit
def candidates(
    row, width, keys, subs, floor, listed, values, ids, SUB: tl.constexpr, SUBS: tl.constexpr, CAPACITY: tl.constexpr,
    peak=0.0, divisor=1.0,
):  # fmt: skip
    """Lists the entries of `row` from `floor` up, in order of id; how many there are, of which CAPACITY are kept.

    `keys` [SUBS] are the largest keys of the row's sub-blocks; `listed` has room for as many ids of sub-blocks.
    """
    sub = tl.arange(0, SUBS)
    chosen = ((keys >= floor) & (sub < subs)).to(tl.int32)
    tl.store(listed + tl.cumsum(chosen, 0) - 1, sub, mask=chosen > 0)
    num_chosen = tl.sum(chosen, 0)
    tl.debug_barrier()
    ROWS: tl.constexpr = GATHERED // SUB
    count = num_chosen * 0
    for at in range(0, num_chosen, ROWS):
        i = at + tl.arange(0, ROWS)
        own = tl.load(listed + i, mask=i < num_chosen, other=subs)
        place = tl.reshape(own[:, None] * SUB + tl.arange(0, SUB)[None, :], [ROWS * SUB])
        value = tl.load(row + place, mask=place < width, other=float("-inf")).to(tl.float32)
        value = scaled(value, peak, divisor)
        hit = ((order_key(value) >= floor) & (place < width)).to(tl.int32)
        target = count + tl.cumsum(hit, 0) - 1
        tl.store(values + target, value, mask=(hit > 0) & (target < CAPACITY))
        tl.store(ids + target, place, mask=(hit > 0) & (target < CAPACITY))
        count += tl.sum(hit, 0)
    tl.debug_barrier()
    return count


@triton.jit
def entries(values, count, at, peak=0.0, divisor=1.0, SIZE: tl.constexpr = ENTRIES):
    """Places, values and keys of the entries from `at` on; SMALLEST_KEY past the end."""
    place = at + tl.arange(0, SIZE)
    value = tl.load(values + place, mask=place < count, other=float("-inf")).to(tl.float32)
    value = scaled(value, peak, divisor)
    return place, value, tl.where(place < count, order_key(value), SMALLEST_KEY)


@triton.jit
def weigh(values, count, low, high, top, WEIGHTED: tl.constexpr, peak=0.0, divisor=1.0):
    """What the entries from key `low` to key `high` weigh: exp(value - top) each, or 1 each."""
    total = tl.zeros([ENTRIES], tl.float32)
    for at in range(0, count, ENTRIES):
        _, value, key = entries(values, count, at, peak, divisor)
        weight = tl.exp(value - top) if WEIGHTED else tl.full([ENTRIES], 1.0, tl.float32)
        total += tl.where((key >= low) & (key <= high), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def probes_between(low, high):
    """Keys in [low, high): half of them evenly spread as integers, which always gets on, half as floats."""
    probe = tl.arange(0, PROBES)
    part = probe // 2 + 1
    PARTS: tl.constexpr = PROBES // 2 + 1
    span = high.to(tl.int64) - low.to(tl.int64)
    by_key = low + (span * part // PARTS).to(tl.int32)
    low_value, high_value = float_of(low), float_of(high)
    by_value = order_key(low_value + (high_value - low_value) * (part.to(tl.float32) / PARTS))
    by_value = tl.minimum(tl.maximum(by_value, low), high - 1)
    return tl.where(probe % 2 == 0, by_key, by_value)


@triton.jit
def smallest_reaching(
    values, count, low, high, target, top, WEIGHTED: tl.constexpr, peak=0.0, divisor=1.0
):  # fmt: skip
    """The key of the smallest entry such that the entries from `low` up to it weigh more than `target`.

    `high`, the key of the largest entry, if none does. Every pass narrows the interval by several probes and to the
    entries at its ends, so it ends as soon as one value is left in it.
    """
    floor = low
    while low < high:
        probe = probes_between(low, high)
        weights = tl.zeros([ENTRIES, PROBES], tl.float32)
        lowest = tl.full([ENTRIES], LARGEST_KEY, tl.int32)
        highest = tl.full([ENTRIES], SMALLEST_KEY, tl.int32)
        for at in range(0, count, ENTRIES):
            _, value, key = entries(values, count, at, peak, divisor)
            weight = tl.exp(value - top) if WEIGHTED else tl.full([ENTRIES], 1.0, tl.float32)
            weight = tl.where(key >= floor, weight, 0.0)
            weights += tl.where(key[:, None] <= probe[None, :], weight[:, None], 0.0)
            lowest = tl.minimum(lowest, tl.where(key >= low, key, LARGEST_KEY))
            highest = tl.maximum(highest, tl.where(key <= high, key, SMALLEST_KEY))
        reached = tl.sum(weights, 0) > target
        next_low = tl.maximum(low, tl.max(tl.where(reached, low, probe + 1), 0))
        next_high = tl.minimum(high, tl.min(tl.where(reached, probe, high), 0))
        low = tl.maximum(next_low, tl.min(lowest, 0))
        high = tl.minimum(next_high, tl.max(highest, 0))
    return high


@triton.jit
def id_of_tie(values, ids, count, cut, n, HAS_IDS: tl.constexpr, peak=0.0, divisor=1.0):
    """The id of the n-th entry whose key is `cut`; LARGEST_KEY if there are fewer."""
    seen = n * 0
    found = n * 0 + LARGEST_KEY
    for at in range(0, count, ENTRIES):
        place, _, key = entries(values, count, at, peak, divisor)
        hit = (key == cut) & (place < count)
        number = seen + tl.cumsum(hit.to(tl.int32), 0)
        own = tl.load(ids + place, mask=place < count, other=LARGEST_KEY) if HAS_IDS else place
        found = tl.minimum(found, tl.min(tl.where(hit & (number == n), own, LARGEST_KEY), 0))
        seen += tl.sum(hit.to(tl.int32), 0)
    return found
