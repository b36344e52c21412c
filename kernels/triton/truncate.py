"""Cutting a distribution's tail: min-p, then top-k, then top-p, by the rules of `kernels/reference/truncate.py`.

One pass surveys the rows, a program a row finds its cut, one pass applies it. A cut is a key and an id: what is above
the key stays, and what equals it up to that id.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.bracket import list_around_cut
from purestep.kernels.triton.select import (
    INFINITY_KEY,
    MassesFor,
    candidates,
    entries,
    id_of_tie,
    mass_of_row,
    reached_by,
    smallest_reaching,
    survey,
    weigh,
)
from purestep.kernels.triton.shared import (
    LARGEST_KEY,
    SMALLEST_KEY,
    cdiv,
    check_floats,
    check_rows,
    float_of,
    next_power_of_2,
    order_key,
)

CHUNK = 4096
SUB_BLOCK = 128
CAPACITY = 2048  # candidates of a row; with more, its cut is looked for in the whole row
FEW = tl.constexpr(128)  # candidates that are compared each with each, so many at a time:
BESIDE = tl.constexpr(32)
RANK = tl.constexpr(256)  # top-p without top-k: candidates are what reaches the so many-th largest sub-block


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [reqs, vocab] with -inf where cut; top_k int, top_p and min_p float, all [reqs]."""
    return truncate_by(logits, top_k, top_p, min_p, sub_block=SUB_BLOCK, capacity=CAPACITY)


def truncate_by(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, sub_block: int, capacity: int
) -> Tensor:
    """`truncate` with another size of sub-blocks and of lists, powers of two: they change the way, not the result."""
    check_floats("truncate", logits)
    check_rows("truncate", logits=logits)
    reqs, vocab = logits.shape
    out = torch.empty(reqs, vocab, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    peaks, _, totals = survey(logits, sub_block, masses=MassesFor(top_k, top_p))
    assert totals is not None
    subs = next_power_of_2(peaks.shape[1])
    scratch = torch.empty(reqs, subs + capacity, dtype=torch.int32, device=logits.device)
    values = torch.empty(reqs, capacity, dtype=torch.float32, device=logits.device)
    cuts = torch.empty(reqs, 2, dtype=torch.int32, device=logits.device)
    parameters = (top_k, top_p, min_p)
    _find_cut[(reqs,)](
        logits, peaks, totals, scratch, values, cuts, *parameters, logits.stride(0), *(x.stride(0) for x in parameters),
        vocab, peaks.shape[1], totals.shape[2], reqs, SUB=sub_block, SUBS=subs, CAPACITY=capacity,
        CHUNKS=next_power_of_2(totals.shape[2]), num_warps=8,
    )  # fmt: skip
    _apply_cut[(reqs, cdiv(vocab, CHUNK))](logits, cuts, out, logits.stride(0), vocab, CHUNK=CHUNK)
    return out


@triton.jit
def _apply_cut(logits, cuts, out, step, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cut, last = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * step + token, mask=token < vocab, other=0.0)
    key = order_key(logit.to(tl.float32))
    kept = (key > cut) | ((key == cut) & (token <= last))
    tl.store(out + row * vocab + token, tl.where(kept, logit, float("-inf")), mask=token < vocab)


@triton.jit
def _lowest_within(top, distance):
    """The smallest key whose float lies at most -distance below `top`."""
    low = (top * 0).to(tl.int64) - INFINITY_KEY - 1
    high = order_key(top).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if float_of(middle.to(tl.int32)) - top >= distance:
            high = middle
        else:
            low = middle + 1
    return high.to(tl.int32)


@triton.jit
def _cut_of_few(values, ids, count, k, p, top, total):
    """`_cut_of_list` of a list of at most FEW entries, and not of a whole row; `values` has room for twice as many."""
    place, value, key = entries(values, count, 0, SIZE=FEW)
    exists = place < count
    num_larger = tl.zeros([FEW], tl.int32)
    for at in range(0, count, BESIDE):
        _, _, other_key = entries(values, count, at, SIZE=BESIDE)
        num_larger += tl.sum((other_key[None, :] > key[:, None]).to(tl.int32), 1)
    is_within = exists & (num_larger < tl.where(k > 0, k, LARGEST_KEY))
    weight = tl.where(is_within, tl.exp(value - top), 0.0)
    tl.store(values + FEW + place, weight)
    tl.debug_barrier()
    num_before = tl.zeros([FEW], tl.int32)  # in order of value and id
    from_here_down = tl.zeros([FEW], tl.float32)
    for at in range(0, count, BESIDE):
        other, _, other_key = entries(values, count, at, SIZE=BESIDE)
        other_weight = tl.load(values + FEW + other, mask=other < count, other=0.0)
        is_before = (other_key[None, :] > key[:, None]) | (
            (other_key[None, :] == key[:, None]) & (other[None, :] < place[:, None])
        )
        num_before += tl.sum(is_before.to(tl.int32), 1)
        from_here_down += tl.sum(tl.where(is_before, 0.0, other_weight[None, :]), 1)
    listed = tl.sum(weight, 0)
    everything = tl.where(k > 0, listed, total)
    may_go = (1.0 - p) * everything - (everything - listed)
    # Where top-p is off, weights may be NaN: the largest entry may be infinite.
    spare = tl.where(p < 1.0, from_here_down - may_go, 1.0)
    spare = tl.where(k == 1, 0.0, spare)
    stays = exists & ((num_before == 0) | (is_within & (spare > 0.0)))
    cut = tl.min(tl.where(stays, key, LARGEST_KEY), 0)
    own = tl.load(ids + place, mask=exists, other=-1)
    return cut, tl.max(tl.where(stays & (key == cut), own, -1), 0)


@triton.jit
def _cut_by_mass(values, count, start, highest, may_go, top, peak=0.0, divisor=1.0):
    """The key at which a list is cut whose lowest entries, from key `start` up, are to go while they weigh `may_go`;
    and how many of the entries with that key stay, 0 for all."""
    cut = smallest_reaching(values, count, start, highest, may_go, top, True, peak, divisor)
    below = weigh(values, count, start, cut - 1, top, True, peak, divisor)
    ties = weigh(values, count, cut, cut, top, False, peak, divisor)
    gone = tl.floor((may_go - below) / tl.exp(float_of(cut) - top))
    kept = tl.minimum(tl.maximum(ties - tl.maximum(gone, 0.0), 1.0), ties).to(tl.int32)
    return cut, tl.where(kept < ties, kept, 0)


@triton.jit
def _cut_around(
    logits, vocab, floor, p, top, total, values, ids, CAPACITY: tl.constexpr, peak, divisor
):  # fmt: skip
    """The cut of a row by top-p alone, and whether it was found: not if too many entries lie around it."""
    may_go = (1.0 - p) * total
    tl.debug_barrier()  # the room that is written to may still be read
    count, under = list_around_cut(logits, vocab, floor, may_go, top, values, ids, CAPACITY, peak, divisor)
    cut = floor
    last = floor * 0 + LARGEST_KEY
    is_found = (count > 0) & (count <= CAPACITY)
    if is_found:
        lowest = tl.maximum(floor, -INFINITY_KEY - 1)
        rest = tl.maximum(may_go - under, 0.0)
        cut, kept = _cut_by_mass(values, count, lowest, order_key(top), rest, top)
        if kept > 0:
            last = id_of_tie(values, ids, count, cut, kept, True)
    return cut, last, is_found


@triton.jit
def _cut_of_list(
    values, ids, count, floor, k, p, top, total, HAS_IDS: tl.constexpr, peak=0.0, divisor=1.0
):  # fmt: skip
    """The cut of a list that holds every entry that may stay, and none below `floor`.

    `total` is what everything weighs that min-p leaves, in the list or not. k is 0 and p is 1 where they are off.
    """
    highest = order_key(top)
    cut = floor
    kept = floor * 0  # of those equal to the cut; 0 for all
    if k == 1:
        cut = highest
        kept = kept + 1
    else:
        lowest = tl.maximum(floor, -INFINITY_KEY - 1)
        if k > 0:
            eligible = weigh(values, count, lowest, highest, top, False, peak, divisor)
            if eligible > k:
                cut = smallest_reaching(
                    values, count, lowest, highest, eligible - k, top, False, peak, divisor
                )
        if p < 1.0:
            listed = weigh(values, count, cut, highest, top, True, peak, divisor)
            everything = listed
            # Without ids the list is everything, and its own sum as exact as what is taken from it.
            if HAS_IDS and k == 0:
                everything = total
            may_go = (1.0 - p) * everything - (everything - listed)
            cut, kept = _cut_by_mass(
                values, count, tl.maximum(cut, lowest), highest, may_go, top, peak, divisor
            )
    last = floor * 0 + LARGEST_KEY
    if kept > 0:
        last = id_of_tie(values, ids, count, cut, kept, HAS_IDS, peak, divisor)
    return cut, last


@triton.jit
def cut_of_row(
    logits, keys, mass, k, p, ratio, listed, ids, values, vocab, subs, SUB: tl.constexpr, SUBS: tl.constexpr,
    CAPACITY: tl.constexpr, peak=0.0, divisor=1.0,
):  # fmt: skip
    """The cut of a row, key and id, and how many entries are listed, all that stay among them; -1: there is no list.

    `keys` [SUBS] are the largest of the row's sub-blocks, scaled as its entries are to be; `mass` is what all of them
    weigh, if top-p cuts them and top-k does not; `listed` [SUBS], `ids` and `values` [CAPACITY] are room to work in.
    """
    top_key = tl.max(keys, 0)
    top = float_of(top_key)
    is_number = top_key < LARGEST_KEY
    has_masses = tl.abs(top) < float("inf")
    k = tl.where((k > 0) & (k < vocab) & is_number, k, 0)
    p = tl.where(has_masses, p, 1.0)
    cut = top_key * 0 + SMALLEST_KEY
    last = top_key * 0 + LARGEST_KEY
    count = top_key * 0 - 1
    if has_masses & (ratio > 0.0):
        cut = _lowest_within(top, tl.log(ratio))
    if (k > 0) | (p < 1.0):
        rank = tl.where(k > 0, k, tl.minimum(RANK, subs))
        total = mass
        if (k == 0) & (ratio > 0.0):
            total = weigh(logits, vocab, cut, top_key, top, True, peak, divisor)
        fits = rank <= subs
        floor = cut
        if fits:
            floor = tl.maximum(reached_by(keys, rank), cut)
            count = candidates(
                logits, vocab, keys, subs, floor, listed, values, ids, SUB, SUBS, CAPACITY, peak, divisor
            )  # fmt: skip
            fits = count <= CAPACITY
            if fits & (k == 0):
                # What is not listed has to be within what top-p cuts.
                fits = total - weigh(values, count, floor, top_key, top, True) <= (1.0 - p) * total
        if fits & (count <= (FEW if CAPACITY >= 2 * FEW else 0)):
            cut, last = _cut_of_few(values, ids, count, k, p, top, total)
        elif fits:
            cut, last = _cut_of_list(values, ids, count, floor, k, p, top, total, True)
        else:
            is_found = top_key != top_key
            least = cut
            if k == 0:
                cut, last, is_found = _cut_around(
                    logits, vocab, least, p, top, total, values, ids, CAPACITY, peak, divisor
                )
            if is_found == 0:
                cut, last = _cut_of_list(logits, ids, vocab, least, k, p, top, total, False, peak, divisor)
            count = top_key * 0 - 1
    return cut, last, count


@triton.jit(do_not_specialize=["reqs"], do_not_specialize_on_alignment=["top_k", "top_p", "min_p"])
def _find_cut(
    logits, peaks, totals, scratch, values, cuts, top_k, top_p, min_p, step, k_step, p_step, min_step, vocab, subs,
    chunks, reqs, SUB: tl.constexpr, SUBS: tl.constexpr, CAPACITY: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sub = tl.arange(0, SUBS)
    keys = tl.load(peaks + row * subs + sub, mask=sub < subs, other=SMALLEST_KEY)
    k = tl.load(top_k + row * k_step).to(tl.int32)
    p = tl.load(top_p + row * p_step).to(tl.float32)
    ratio = tl.load(min_p + row * min_step).to(tl.float32)
    listed = scratch + row * (SUBS + CAPACITY)
    mass = mass_of_row(totals, row, chunks, reqs, float_of(tl.max(keys, 0)), CHUNKS)
    cut, last, _ = cut_of_row(
        logits + row * step, keys, mass, k, p, ratio, listed, listed + SUBS, values + row * CAPACITY, vocab, subs, SUB,
        SUBS, CAPACITY,
    )  # fmt: skip
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, last)
