"""Verification of drafts: which of them stand, and the token behind the last, by `kernels/reference/verify.py`.

Rows of the vocabulary are cut into chunks that a program each looks through; one program a request joins what they
found. Rows that no draft needs are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.select import INFINITY_KEY
from purestep.kernels.triton.shared import (
    LARGEST_KEY,
    SMALLEST_KEY,
    cdiv,
    check_floats,
    check_rows,
    next_power_of_2,
    order_key,
)

CHUNK = 4096


def verify_greedy(best: Tensor, drafts: Tensor, is_unsound: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of greedy requests, int32 [reqs, k + 1], -1 behind the last, and who got none behind the drafts."""
    check_rows("verify_greedy", best=best, drafts=drafts, is_unsound=is_unsound)
    reqs, width = best.shape
    out = torch.empty(reqs, width, dtype=torch.int32, device=best.device)
    has_nan = torch.empty(reqs, dtype=torch.bool, device=best.device)
    if reqs:
        _verify_greedy[(reqs,)](
            best, drafts, is_unsound, out, has_nan, best.stride(0), drafts.stride(0), is_unsound.stride(0),
            WIDTH=width, LANES=next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return out, has_nan


@triton.jit(do_not_specialize_on_alignment=["best", "drafts", "is_unsound"])
def _verify_greedy(
    best,
    drafts,
    is_unsound,
    out,
    has_nan,
    step,
    drafts_step,
    unsound_step,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, LANES)
    exists = place < WIDTH
    token = tl.load(best + row * step + place, mask=exists, other=-1).to(tl.int32)
    is_sound = tl.load(is_unsound + row * unsound_step + place, mask=exists, other=0) == 0
    draft = tl.load(drafts + row * drafts_step + place, mask=place < WIDTH - 1, other=-1)
    behind = tl.min(tl.where((draft == token) & is_sound & (place < WIDTH - 1), LANES, place), 0)
    tl.store(out + row * WIDTH + place, tl.where((place <= behind) & is_sound, token, -1), mask=exists)
    tl.store(has_nan + row, tl.sum(((place == behind) & ~is_sound).to(tl.int32), 0) > 0)


def count_accepted(
    logits: Tensor, drafts: Tensor, num_drafts: Tensor, draft_probs: Tensor | None, uniform: Tensor
) -> Tensor:
    """How many drafts stand where tokens are drawn: int64 [reqs]; logits [reqs, k + 1, vocab]."""
    _check("count_accepted", logits, drafts, draft_probs, uniform=uniform)
    reqs, k, vocab = logits.shape[0], drafts.shape[1], logits.shape[2]
    accepted = torch.zeros(reqs, dtype=torch.int64, device=logits.device)
    if reqs == 0 or k == 0:
        return accepted
    chunks = cdiv(vocab, CHUNK)
    peaks = torch.empty(reqs, k, chunks, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(peaks)
    _weigh_rows[(reqs, k, chunks)](
        logits, None, num_drafts, peaks, masses, *logits.stride()[:2], 0, num_drafts.stride(0), vocab, k, chunks,
        CHUNK=CHUNK,
    )  # fmt: skip
    _count_accepted[(reqs,)](
        logits, drafts, num_drafts, draft_probs, uniform, peaks, masses, accepted, *logits.stride()[:2],
        drafts.stride(0), num_drafts.stride(0), *_strides(draft_probs), uniform.stride(0), chunks, K=k,
        BLOCK=next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return accepted


@triton.jit(do_not_specialize_on_alignment=["places", "num_drafts"])
def _weigh_rows(
    logits, places, num_drafts, peaks, masses, req_step, place_step, places_step, count_step, vocab, k, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk, and the sum of exp(logit - it): of a row for every draft, or of that at `places`
    where one fell."""
    request, own, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = own
    if places is not None:
        place = tl.load(places + request * places_step).to(tl.int32)
    if place < tl.load(num_drafts + request * count_step):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        row = logits + request * req_step + place.to(tl.int64) * place_step
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        peak = tl.max(logit, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        at = (request * k + own) * chunks + chunk
        tl.store(peaks + at, peak)
        tl.store(masses + at, tl.sum(tl.exp(logit - base), 0))


@triton.jit
def _joined(peaks, masses, chunks, BLOCK: tl.constexpr):
    """The largest logit of a row, and the sum of exp(logit - it), from those of its chunks."""
    chunk = tl.arange(0, BLOCK)
    peak = tl.load(peaks + chunk, mask=chunk < chunks, other=float("-inf"))
    mass = tl.load(masses + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base, tl.sum(mass * tl.exp(peak - base), 0)


@triton.jit(do_not_specialize_on_alignment=["drafts", "num_drafts", "uniform"])
def _count_accepted(
    logits, drafts, num_drafts, draft_probs, uniform, peaks, masses, accepted, req_step, place_step, drafts_step,
    count_step, probs_req_step, probs_place_step, uniform_step, chunks, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(num_drafts + request * count_step)
    stands = count == count
    num_accepted = tl.zeros([], tl.int64)
    for place in range(K):
        draft = tl.load(drafts + request * drafts_step + place).to(tl.int64)
        stands = stands & (place < count) & (draft >= 0)
        if stands:
            at = (request * K + place) * chunks
            top, total = _joined(peaks + at, masses + at, chunks, BLOCK)
            logit = tl.load(logits + request * req_step + place * place_step + draft).to(tl.float32)
            ratio = tl.exp(logit - top) / total
            if draft_probs is not None:
                q = tl.load(draft_probs + request * probs_req_step + place * probs_place_step + draft)
                stands = stands & (q > 0)
                ratio = ratio / q.to(tl.float32)
            u = tl.load(uniform + request * uniform_step + place).to(tl.float32)
            stands = stands & (ratio >= u)
            num_accepted += stands.to(tl.int64)
    tl.store(accepted + request, num_accepted)


def draw_last(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    draft_probs: Tensor | None,
    exponential: Tensor,
) -> Tensor:
    """The token behind the `accepted` drafts [reqs], int64 [reqs]; exponential [reqs, vocab] from Exp(1)."""
    _check("draw_last", logits, drafts, draft_probs, exponential=exponential)
    reqs, vocab, device = logits.shape[0], logits.shape[2], logits.device
    out = torch.empty(reqs, dtype=torch.int64, device=device)
    if reqs == 0:
        return out
    chunks = cdiv(vocab, CHUNK)
    peaks = torch.empty(reqs, chunks, dtype=torch.float32, device=device)
    masses = torch.empty_like(peaks)
    keys = torch.empty(2, reqs, chunks, dtype=torch.int32, device=device)
    ids = torch.empty_like(keys)
    block = next_power_of_2(chunks)
    if draft_probs is not None:
        _weigh_rows[(reqs, 1, chunks)](
            logits, accepted, num_drafts, peaks, masses, *logits.stride()[:2], accepted.stride(0),
            num_drafts.stride(0), vocab, 1, chunks, CHUNK=CHUNK,
        )  # fmt: skip
    _last_of_chunk[(reqs, chunks)](
        logits, drafts, num_drafts, accepted, draft_probs, exponential, peaks, masses, keys, ids,
        *logits.stride()[:2], drafts.stride(0), num_drafts.stride(0), accepted.stride(0), *_strides(draft_probs),
        exponential.stride(0), reqs, vocab, chunks, CHUNK=CHUNK, BLOCK=block,
    )  # fmt: skip
    _last_of_row[(reqs,)](keys, ids, out, reqs, chunks, BLOCK=block, num_warps=1)
    return out


@triton.jit(do_not_specialize=["reqs"], do_not_specialize_on_alignment=["drafts", "num_drafts", "accepted"])
def _last_of_chunk(
    logits, drafts, num_drafts, accepted, draft_probs, exponential, peaks, masses, keys, ids, req_step, place_step,
    drafts_step, count_step, accepted_step, probs_req_step, probs_place_step, noise_step, reqs, vocab, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The winner of each chunk's race, in what a fallen draft leaves and in the target itself."""
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(accepted + request * accepted_step).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < vocab
    row = logits + request * req_step + place * place_step
    logit = tl.load(row + token, mask=exists, other=float("-inf")).to(tl.float32)
    clock = tl.load(exponential + request * noise_step + token, mask=exists, other=1.0).to(tl.float32)
    lead = tl.log(clock)
    whole = tl.where(logit == float("-inf"), logit, logit - lead)
    left = whole
    if place < tl.load(num_drafts + request * count_step):
        if draft_probs is None:
            draft = tl.load(drafts + request * drafts_step + place)
            left = tl.where(token == draft, float("-inf"), whole)
        else:
            top, total = _joined(peaks + request * chunks, masses + request * chunks, chunks, BLOCK)
            q_row = draft_probs + request * probs_req_step + place * probs_place_step
            q = tl.load(q_row + token, mask=exists, other=0.0).to(tl.float32)
            more = tl.exp(logit - top) / total - q
            left = tl.where(more > 0, tl.log(tl.where(more > 0, more, 1.0)) - lead, float("-inf"))
    at = request * chunks + chunk
    _store_best(left, exists, token, keys + at, ids + at)
    at += reqs.to(tl.int64) * chunks
    _store_best(whole, exists, token, keys + at, ids + at)


@triton.jit
def _store_best(score, exists, token, key_at, id_at):
    key = tl.where(exists, order_key(score), SMALLEST_KEY)
    best = tl.max(key, 0)
    tl.store(key_at, best)
    tl.store(id_at, tl.min(tl.where(key == best, token, LARGEST_KEY), 0))


@triton.jit(do_not_specialize=["reqs"])
def _last_of_row(keys, ids, out, reqs, chunks, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    at = request * chunks + chunk
    key = tl.load(keys + at, mask=chunk < chunks, other=SMALLEST_KEY)
    best = tl.max(key, 0)
    if best <= -INFINITY_KEY - 1:  # nothing is left
        at += reqs.to(tl.int64) * chunks
        key = tl.load(keys + at, mask=chunk < chunks, other=SMALLEST_KEY)
        best = tl.max(key, 0)
    token = tl.load(ids + at, mask=chunk < chunks, other=LARGEST_KEY)
    tl.store(out + request, tl.min(tl.where(key == best, token, LARGEST_KEY), 0).to(tl.int64))


def _check(
    function: str, logits: Tensor, drafts: Tensor, draft_probs: Tensor | None, **others: Tensor
) -> None:
    given = {"logits": logits, **others} | ({} if draft_probs is None else {"draft_probs": draft_probs})
    check_floats(function, *given.values())
    check_rows(function, drafts=drafts, **given)


def _strides(draft_probs: Tensor | None) -> tuple[int, int]:
    return (0, 0) if draft_probs is None else (draft_probs.stride(0), draft_probs.stride(1))
