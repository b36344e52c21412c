"""From logits to tokens in four launches: survey, one program a row, the race of what it left, the winners.

The survey reads the logits once. A program a row finds the largest, which a greedy row takes; temperature, min-p, top-k
and top-p of the others are applied to the few entries that can stay, and the draw is made among them. Only rows that
cut nothing, or whose distribution is too flat for a list, are read again, by many programs. No noise is written to
memory. Same tokens as the reference's composition of temperature, truncation, noise and draw.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.reference.choose import choose as composed
from purestep.kernels.triton.draw import CHUNK, GREEDY_BELOW, draw, greedy, scale_by_temperature
from purestep.kernels.triton.philox import random_words, uniform_of, uniforms
from purestep.kernels.triton.select import MassesFor, entries, mass_of_row, scaled, survey
from purestep.kernels.triton.shared import (
    LARGEST_KEY,
    SMALLEST_KEY,
    cdiv,
    early_launch,
    float_of,
    next_power_of_2,
    order_key,
    take_turn,
)
from purestep.kernels.triton.truncate import CAPACITY, SUB_BLOCK, cut_of_row, truncate
from purestep.kernels.types import Kernels

RACERS = 1024  # programs of the race, if rows have chunks for them; most rows need none
FACTS = tl.constexpr(
    5
)  # of a row: its token or -1, the key and the id of its cut, bits of its peak and its divisor


def choose(
    kernels: Kernels,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    stream: Tensor,
    output_index: Tensor,
    *,
    purpose: int,
    truncated: bool,
) -> tuple[Tensor, Tensor]:
    """The token of each row of logits [reqs, vocab], and the id of its largest logit: int64 [reqs] each."""
    parts = (kernels.greedy, kernels.scale_by_temperature, kernels.truncate, kernels.uniforms, kernels.draw)
    if parts != (greedy, scale_by_temperature, truncate, uniforms, draw) or logits.dtype != torch.float32:
        return composed(
            kernels, logits, temperature, top_k, top_p, min_p, seed, stream, output_index, purpose=purpose,
            truncated=truncated,
        )  # fmt: skip
    return choose_by(
        logits, (temperature, top_k, top_p, min_p, output_index), seed, stream, purpose=purpose, truncated=truncated,
        sub_block=SUB_BLOCK, capacity=CAPACITY,
    )  # fmt: skip


def choose_by(
    logits: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    seed: Tensor,
    stream: Tensor,
    *,
    purpose: int,
    truncated: bool,
    sub_block: int,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """`choose` with another size of sub-blocks and of lists, powers of two: they change the way, not the result."""
    reqs, vocab = logits.shape
    out = torch.empty(2, reqs, dtype=torch.int64, device=logits.device)
    if out.numel() == 0:
        return out[0], out[1]
    temperature, top_k, top_p, *_ = parameters
    wanted = MassesFor(top_k, top_p, temperature) if truncated else None
    peaks, _, totals = survey(logits, sub_block, masses=wanted)
    num_masses = 0 if totals is None else totals.shape[2]
    subs, chunks = next_power_of_2(peaks.shape[1]), cdiv(vocab, CHUNK)
    size = subs + capacity if truncated else 0
    scratch = torch.empty(reqs, size + FACTS.value + 2 * chunks, dtype=torch.int32, device=logits.device)
    values = torch.empty(reqs, capacity if truncated else 0, dtype=torch.float32, device=logits.device)
    facts, keys, ids = scratch[:, size:], scratch[:, size + FACTS.value :], scratch[:, -chunks:]
    step = scratch.stride(0)
    noise = (seed, stream, parameters[-1], seed.stride(0), stream.stride(0), parameters[-1].stride(0))
    _row[(reqs,)](
        logits, peaks, totals, scratch, values, facts, out, *parameters[:-1], *noise, logits.stride(0), step,
        *(x.stride(0) for x in parameters[:-1]), vocab, peaks.shape[1], num_masses, reqs, PURPOSE=purpose,
        TRUNCATED=truncated, SUB=sub_block, SUBS=subs, CAPACITY=capacity, MASSES=next_power_of_2(num_masses),
        num_warps=8, **early_launch(),
    )  # fmt: skip
    _race_of_chunks[(reqs, min(chunks, cdiv(RACERS, reqs)))](
        logits, facts, keys, ids, *noise, logits.stride(0), step, vocab, PURPOSE=purpose, CHUNK=CHUNK, **early_launch()
    )  # fmt: skip
    _winner[(reqs,)](
        facts,
        keys,
        ids,
        out,
        step,
        chunks,
        BLOCK=next_power_of_2(chunks),
        num_warps=1,
        **early_launch(),
    )
    return out[0], out[1]


@triton.jit
def _wide(words):
    """A 64-bit number from its low and high words."""
    return (tl.load(words).to(tl.int64) & 0xFFFFFFFF) | (tl.load(words + 1).to(tl.int64) << 32)


@triton.jit
def _score(value, uniform):
    """When the clock of a token rings, as a logarithm, negated; -inf stays."""
    return tl.where(value == float("-inf"), value, value - tl.log(-tl.log(uniform)))


@triton.jit
def _drawn_of_list(values, ids, count, cut, last, seed, stream, index, PURPOSE: tl.constexpr):
    """The id that wins among the listed entries that stay."""
    best = count * 0 + SMALLEST_KEY
    token = count * 0 + LARGEST_KEY
    for at in range(0, count, 1024):
        place, value, key = entries(values, count, at)
        own = tl.load(ids + place, mask=place < count, other=0)
        a, b, c, d = random_words(seed, stream, index, own >> 2, PURPOSE)
        lane = own & 3
        word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
        stays = (place < count) & ((key > cut) | ((key == cut) & (own <= last)))
        score = tl.where(stays, order_key(_score(value, uniform_of(word))), SMALLEST_KEY)
        peak = tl.max(score, 0)
        winner = tl.min(tl.where(stays & (score == peak), own, LARGEST_KEY), 0)
        token = tl.where(peak > best, winner, tl.where(peak == best, tl.minimum(token, winner), token))
        best = tl.maximum(best, peak)
    return token


@triton.jit(
    do_not_specialize=["vocab", "reqs"],
    do_not_specialize_on_alignment=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stream",
        "output_index",
    ],
)
def _row(
    logits, peaks, totals, scratch, values, facts, out, temperature, top_k, top_p, min_p, seed, stream, output_index,
    seed_step, stream_step, index_step, step, scratch_step, t_step, k_step, p_step, min_step, vocab, subs, num_masses,
    reqs, PURPOSE: tl.constexpr, TRUNCATED: tl.constexpr, SUB: tl.constexpr, SUBS: tl.constexpr,
    CAPACITY: tl.constexpr, MASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * step
    facts += row * scratch_step
    sub = tl.arange(0, SUBS)
    keys = tl.load(peaks + row * subs + sub, mask=sub < subs, other=SMALLEST_KEY)
    top_key = tl.max(keys, 0)
    top = float_of(top_key)
    place = tl.min(tl.where(keys == top_key, sub, LARGEST_KEY), 0) * SUB + tl.arange(0, SUB)
    own = tl.load(logits + place, mask=place < vocab, other=float("-inf"))
    is_top = (order_key(own) == top_key) & (place < vocab)
    best = tl.min(tl.where(is_top, place, LARGEST_KEY), 0)
    token = best * 0 - 1
    divisor = tl.load(temperature + row * t_step).to(tl.float32)
    peak = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    cut = best * 0 + SMALLEST_KEY
    last = best * 0 + LARGEST_KEY
    if (divisor < GREEDY_BELOW) | (tl.abs(top) == float("inf")) | (top != top):  # greedy, or no distribution
        token = best
    elif TRUNCATED:
        keys = tl.where(sub < subs, order_key(scaled(float_of(keys), peak, divisor)), SMALLEST_KEY)
        k = tl.load(top_k + row * k_step).to(tl.int32)
        p = tl.load(top_p + row * p_step).to(tl.float32)
        ratio = tl.load(min_p + row * min_step).to(tl.float32)
        listed = scratch + row * scratch_step
        ids, values = listed + SUBS, values + row * CAPACITY
        mass = mass_of_row(totals, row, num_masses, reqs, float_of(tl.max(keys, 0)), MASSES, peak, divisor)
        cut, last, count = cut_of_row(
            logits, keys, mass, k, p, ratio, listed, ids, values, vocab, subs, SUB, SUBS, CAPACITY, peak, divisor
        )  # fmt: skip
        if count >= 0:
            seeds, streams = _wide(seed + row * seed_step), _wide(stream + row * stream_step)
            index = tl.load(output_index + row * index_step)
            token = _drawn_of_list(values, ids, count, cut, last, seeds, streams, index, PURPOSE)
    tl.store(out + reqs + row, best.to(tl.int64))
    tl.store(facts, token)
    tl.store(facts + 1, cut)
    tl.store(facts + 2, last)
    tl.store(facts + 3, peak.to(tl.int32, bitcast=True))
    tl.store(facts + 4, divisor.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["seed", "stream", "output_index"])
def _race_of_chunks(
    logits, facts, keys, ids, seed, stream, output_index, seed_step, stream_step, index_step, step, scratch_step, vocab,
    PURPOSE: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    facts += row * scratch_step
    if tl.load(facts) < 0:
        cut, last = tl.load(facts + 1), tl.load(facts + 2)
        peak = tl.load(facts + 3).to(tl.float32, bitcast=True)
        divisor = tl.load(facts + 4).to(tl.float32, bitcast=True)
        seeds, streams = _wide(seed + row * seed_step), _wide(stream + row * stream_step)
        index = tl.load(output_index + row * index_step)
        for chunk in range(tl.program_id(1), tl.cdiv(vocab, CHUNK), tl.num_programs(1)):
            block = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            a, b, c, d = random_words(seeds, streams, index, block, PURPOSE)
            # Interleaved twice: a, b, c, d of one block stand beside each other.
            word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            exists = token < vocab
            value = tl.load(logits + row * step + token, mask=exists, other=float("-inf"))
            value = scaled(value, peak, divisor)
            key = order_key(value)
            value = tl.where((key > cut) | ((key == cut) & (token <= last)), value, float("-inf"))
            score = tl.where(exists, order_key(_score(value, uniform_of(word))), SMALLEST_KEY)
            best = tl.max(score, 0)
            tl.store(keys + row * scratch_step + chunk, best)
            tl.store(ids + row * scratch_step + chunk, tl.min(tl.where(score == best, token, LARGEST_KEY), 0))


@triton.jit
def _winner(facts, keys, ids, out, scratch_step, chunks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(facts + row * scratch_step)
    if token < 0:
        chunk = tl.arange(0, BLOCK)
        exists = chunk < chunks
        key = tl.load(keys + row * scratch_step + chunk, mask=exists, other=SMALLEST_KEY)
        found = tl.load(ids + row * scratch_step + chunk, mask=exists, other=LARGEST_KEY)
        token = tl.min(tl.where(key == tl.max(key, 0), found, LARGEST_KEY), 0)
    tl.store(out + row, token.to(tl.int64))


def judge(
    kernels: Kernels,
    logits: Tensor,
    best: Tensor,
    processed: Tensor,
    tokens: Tensor,
    stop_ids: Tensor,
    num_stop_ids: Tensor,
    min_tokens: Tensor,
    num_output_tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens as int32, whether they stop their rows, and whether the rows had no distribution: [reqs] each."""
    reqs = tokens.shape[0]
    token_ids = torch.empty(reqs, dtype=torch.int32, device=tokens.device)
    flags = torch.empty(2, reqs, dtype=torch.bool, device=tokens.device)
    if reqs:
        given = (num_stop_ids, min_tokens, num_output_tokens)
        _judge[(reqs,)](
            logits, best, processed, tokens, stop_ids, *given, token_ids, flags, logits.stride(0), processed.stride(0),
            *stop_ids.stride(), *(x.stride(0) for x in given), reqs, IDS=stop_ids.shape[1],
            BLOCK=next_power_of_2(stop_ids.shape[1]), num_warps=1, **early_launch(),
        )  # fmt: skip
    return token_ids, flags[0], flags[1]


@triton.jit(
    do_not_specialize=["reqs"],
    do_not_specialize_on_alignment=["stop_ids", "num_stop_ids", "min_tokens", "num_output_tokens"],
)
def _judge(
    logits, best, processed, tokens, stop_ids, num_stop_ids, min_tokens, num_output_tokens, token_ids, flags, step,
    processed_step, ids_step, id_step, num_step, min_step, output_step, reqs, IDS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    peak = tl.load(logits + row * step + tl.load(best + row)).to(tl.float32)
    left = tl.load(processed + row * processed_step + token).to(tl.float32)
    place = tl.arange(0, BLOCK)
    exists = (place < IDS) & (place < tl.load(num_stop_ids + row * num_step))
    ids = tl.load(stop_ids + row * ids_step + place * id_step, mask=exists, other=-1)
    is_stop = tl.max((exists & (ids == token)).to(tl.int32), 0) > 0
    is_late = tl.load(num_output_tokens + row * output_step) + 1 >= tl.load(min_tokens + row * min_step)
    tl.store(token_ids + row, token.to(tl.int32))
    tl.store(flags + row, is_stop & is_late)
    tl.store(flags + reqs + row, ((peak < float("inf")) & (left > float("-inf"))) == 0)
