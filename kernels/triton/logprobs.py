"""Reading log-probabilities (or logits) of chosen and of likely tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.reference import logprobs as by_sorting
from purestep.kernels.triton.select import (
    INFINITY_KEY,
    candidates,
    entries,
    finite,
    reached_by,
    smallest_reaching,
    survey,
    weigh,
)
from purestep.kernels.triton.shared import (
    LARGEST_KEY,
    SMALLEST_KEY,
    check_floats,
    check_rows,
    next_power_of_2,
    order_key,
)

SUB_BLOCK = 128
CAPACITY = 2048  # candidates of a row; with more, the largest are looked for in the whole row
MOST = 1024  # that are sorted in registers; more are left to torch's sort of whole rows


def gather_logprobs(logprobs: Tensor, ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the tokens `ids` and of the `num_logprobs` largest, of logprobs [reqs, vocab]; and ranks.

    More than 1,024 are read by the reference.
    """
    if num_logprobs > MOST:
        return by_sorting.gather_logprobs(logprobs, ids, num_logprobs)
    return gather_by(logprobs, ids, num_logprobs, sub_block=SUB_BLOCK, capacity=CAPACITY)


def score(logits: Tensor, ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of logits [reqs, vocab], whose values come back as log-probabilities: rows are read once for both.

    They and what logits were lowered by, [reqs, 2], are float32. More than 1,024 are sorted by the reference, and
    lowered by the same numbers.
    """
    by = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    num_here = num_logprobs if num_logprobs <= MOST else 0
    table = gather_by(logits, ids, num_here, sub_block=SUB_BLOCK, capacity=CAPACITY, by=by)
    if num_logprobs > MOST:
        tokens, values, ranks = by_sorting.gather_logprobs(logits, ids, num_logprobs)
        table = tokens, by_sorting.lowered(values.float(), by), ranks
    return *table, by


def gather_by(
    logprobs: Tensor,
    ids: Tensor,
    num_logprobs: int,
    *,
    sub_block: int,
    capacity: int,
    by: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gather_logprobs` with another size of sub-blocks and of lists: they change the way, not the result.

    Values are lowered to log-probabilities if there is a `by` [reqs, 2] to be filled with by what.
    """
    name = "gather_logprobs" if by is None else "score"
    check_floats(name, logprobs)
    check_rows(name, logprobs=logprobs)
    (reqs, vocab), n, device = logprobs.shape, num_logprobs, logprobs.device
    peaks, counts, totals = survey(logprobs, sub_block, than=ids, sums=by is not None)
    assert counts is not None
    out_ids = torch.empty(reqs, n + 1, dtype=torch.int32, device=device)
    kind = logprobs.dtype if by is None else torch.float32
    out_values = torch.empty(reqs, n + 1, dtype=kind, device=device)
    ranks = torch.empty(reqs, dtype=torch.int64, device=device)
    if reqs:
        subs, most = next_power_of_2(peaks.shape[1]), max(next_power_of_2(n), 16)
        scratch = torch.empty(reqs, subs + capacity, dtype=torch.int32, device=device)
        values = torch.empty(reqs, capacity, dtype=torch.float32, device=device)
        winners = torch.empty(reqs, most, dtype=torch.int64, device=device)
        _gather[(reqs,)](
            logprobs, ids, peaks, counts, totals, by, scratch, values, winners, out_ids, out_values, ranks,
            logprobs.stride(0), ids.stride(0), vocab, peaks.shape[1], counts.shape[1], reqs, N=n, MOST=most,
            SUB=sub_block, SUBS=subs, CAPACITY=capacity, CHUNKS=next_power_of_2(counts.shape[1]), num_warps=8,
        )  # fmt: skip
    return out_ids, out_values, ranks


@triton.jit
def _collect(values, ids, count, highest, winners, N: tl.constexpr, HAS_IDS: tl.constexpr):
    """Puts the N largest of a list, of equal ones those of lower id, into `winners`: as numbers that sort like them."""
    lowest = highest * 0 - INFINITY_KEY - 1
    cut = smallest_reaching(values, count, lowest, highest, (count - N).to(tl.float32), 0.0, False)
    spare = (
        weigh(values, count, lowest, cut, 0.0, False).to(tl.int32) - count + N
    )  # of those that equal the cut
    taken = count * 0
    ties = count * 0
    for at in range(0, count, 1024):
        place, _, key = entries(values, count, at)
        equal = ((key == cut) & (place < count)).to(tl.int32)
        wins = (key > cut) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= spare))
        own = tl.load(ids + place, mask=place < count, other=0) if HAS_IDS else place
        number = (key.to(tl.int64) << 32) | (own ^ 0x7FFFFFFF).to(tl.int64)
        tl.store(winners + taken + tl.cumsum(wins.to(tl.int32), 0) - 1, number, mask=wins)
        taken += tl.sum(wins.to(tl.int32), 0)
        ties += tl.sum(equal, 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["subs", "reqs"], do_not_specialize_on_alignment=["ids"])
def _gather(
    logprobs, ids, peaks, counts, totals, by, scratch, values, winners, out_ids, out_values, ranks, step, ids_step,
    vocab, subs, chunks, reqs, N: tl.constexpr, MOST: tl.constexpr, SUB: tl.constexpr, SUBS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    count = tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0)
    tl.store(ranks + row, tl.sum(count, 0).to(tl.int64))
    logprobs += row * step
    out_ids += row * (N + 1)
    out_values += row * (N + 1)
    own = tl.load(ids + row * ids_step)
    tl.store(out_ids, own.to(tl.int32))
    peak = 0.0
    log_sum = 0.0
    if totals is not None:
        peak, log_sum = normalizer(totals + row * chunks, totals + (reqs + row) * chunks, chunks, CHUNKS)
        tl.store(by + row * 2, peak)
        tl.store(by + row * 2 + 1, log_sum)
    tl.store(out_values, (tl.load(logprobs + own) - peak) - log_sum)
    sub = tl.arange(0, SUBS)
    keys = tl.load(peaks + row * subs + sub, mask=sub < subs, other=SMALLEST_KEY)
    highest = tl.max(keys, 0)
    if N == 1:
        place = tl.min(tl.where(keys == highest, sub, LARGEST_KEY), 0) * SUB + tl.arange(0, SUB)
        value = tl.load(logprobs + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
        is_first = (order_key(value) == highest) & (place < vocab)
        token = tl.min(tl.where(is_first, place, LARGEST_KEY), 0)
        tl.store(out_ids + 1, token)
        tl.store(out_values + 1, (tl.load(logprobs + token) - peak) - log_sum)
    elif N > 1:
        listed, list_ids = scratch + row * (SUBS + CAPACITY), scratch + row * (SUBS + CAPACITY) + SUBS
        values += row * CAPACITY
        winners += row * MOST
        fits = subs >= N
        length = subs * 0
        if fits:
            floor = reached_by(keys, subs * 0 + N)
            length = candidates(
                logprobs, vocab, keys, subs, floor, listed, values, list_ids, SUB, SUBS, CAPACITY
            )
            fits = length <= CAPACITY
        if fits:
            _collect(values, list_ids, length, highest, winners, N, True)
        else:
            _collect(logprobs, list_ids, vocab, highest, winners, N, False)
        place = tl.arange(0, MOST)
        number = tl.load(winners + place, mask=place < N, other=-9223372036854775808)
        token = (tl.sort(number, descending=True) & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
        tl.store(out_ids + 1 + place, token, mask=place < N)
        value = tl.load(logprobs + token, mask=place < N, other=0.0)
        tl.store(out_values + 1 + place, (value - peak) - log_sum, mask=place < N)


@triton.jit
def normalizer(peaks, sums, chunks, CHUNKS: tl.constexpr):
    """The largest entry of a row (0 if that is infinite) and the logarithm of the sum of exp(entry - that).

    Of each chunk the largest entry is known, and its sum of exp(entry - that).
    """
    chunk = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + chunk, mask=chunk < chunks, other=float("-inf"))
    total = tl.load(sums + chunk, mask=chunk < chunks, other=0.0)
    base = finite(tl.max(peak, 0))
    # A sum of 0 may not be scaled by infinity.
    above = tl.where(peak == float("-inf"), 0.0, finite(peak) - base)
    return base, tl.log(tl.sum(total * tl.exp(above), 0))
