"""A list of what lies around a row's cut, where what stays is too much for a list.

Entries are counted by value, in bins so narrow that those of one weigh much the same: so the counts tell between which
bins top-p cuts; those are cut into bins in their turn, and so on, and the entries there are listed. What lies below is
weighed: so the cut is as exact as one that is looked for in the whole row, in four passes over it and not in a dozen.
"""

import triton
import triton.language as tl

from purestep.kernels.triton.select import ENTRIES, entries

BINS = tl.constexpr(128)  # counting takes as long as there are bins
REACH = tl.constexpr(32.0)  # of the bins below the largest entry; what lies lower weighs 1e-14 of it at most
SLACK = tl.constexpr(1e-3)  # of masses that follow from counts, for roundings
ROUNDINGS = tl.constexpr(1e-4)  # of masses that are summed
MARGIN = tl.constexpr(1e-5)  # of values and bins, which are rounded
TIMES = tl.constexpr(3)


@triton.jit
def _span_of_cut(row, width, floor, may_go, low, span, top, peak, divisor):
    """The part of the values from top + low on, `span` of them, in which the cut lies if that is where it lies."""
    counts = tl.zeros([BINS], tl.int32)
    under = tl.zeros([ENTRIES], tl.float32)
    under_middle = tl.zeros([ENTRIES], tl.float32)
    scale = BINS / span
    for at in range(0, width, ENTRIES):
        place, value, key = entries(row, width, at, peak, divisor)
        is_there = (key >= floor) & (place < width)
        own = (value - top - low) * scale
        weight = tl.where(is_there, tl.exp(value - top), 0.0)
        under += tl.where(own < 0.0, weight, 0.0)
        under_middle += tl.where(own < BINS // 2, weight, 0.0)
        # What is not to be counted goes to the last bin, which is where the cut is if it is in no other.
        is_inside = is_there & (own >= 0.0)
        counts += tl.histogram(
            tl.where(is_inside, tl.minimum(own, BINS - 1.0), BINS - 1.0).to(tl.int32), BINS
        )
    number = tl.arange(0, BINS)
    step = span / BINS
    weights = tl.cumsum(counts.to(tl.float32) * tl.exp(low + number.to(tl.float32) * step), 0)
    rest = may_go - tl.sum(under, 0)
    first = tl.min(tl.where(weights * tl.exp(step) > rest - SLACK * may_go, number, BINS - 1), 0)
    last = tl.min(tl.where(weights > rest + SLACK * may_go, number, BINS - 1), 0)
    # Which half it is in is known to a rounding; and it is at an entry, not between two.
    half = tl.sum(under_middle, 0)
    first = tl.where(half < may_go * (1.0 - ROUNDINGS), tl.maximum(first, BINS // 2), first)
    last = tl.where(half > may_go * (1.0 + ROUNDINGS), tl.minimum(last, BINS // 2 - 1), last)
    has_some = (counts > 0) & (number >= first) & (number <= last)
    first, last = tl.min(tl.where(has_some, number, last), 0), tl.max(tl.where(has_some, number, first), 0)
    first, last = tl.minimum(first, last), tl.maximum(first, last)
    return low + first * step - MARGIN, (last - first + 1) * step + 2.0 * MARGIN


@triton.jit
def list_around_cut(
    row, width, floor, may_go, top, values, ids, CAPACITY: tl.constexpr, peak=0.0, divisor=1.0
):  # fmt: skip
    """Lists the entries around the cut of a row whose lowest entries, from key `floor` up, are to go while they weigh
    `may_go`; in order of id. How many there are, of which CAPACITY are kept, and what those below them weigh."""
    low, span = may_go * 0.0 - REACH, may_go * 0.0 + REACH
    for _ in range(TIMES):
        low, span = _span_of_cut(row, width, floor, may_go, low, span, top, peak, divisor)
    low, high = low - MARGIN - span * 0.01, low + span * 1.01 + MARGIN
    count = (floor * 0).to(tl.int32)
    under = tl.zeros([ENTRIES], tl.float32)
    for at in range(0, width, ENTRIES):
        place, value, key = entries(row, width, at, peak, divisor)
        is_there = (key >= floor) & (place < width)
        own = value - top
        under += tl.where(is_there & (own < low), tl.exp(own), 0.0)
        hit = (is_there & (own >= low) & (own <= high)).to(tl.int32)
        target = count + tl.cumsum(hit, 0) - 1
        tl.store(values + target, value, mask=(hit > 0) & (target < CAPACITY))
        tl.store(ids + target, place, mask=(hit > 0) & (target < CAPACITY))
        count += tl.sum(hit, 0)
    tl.debug_barrier()
    return count, tl.sum(under, 0)
