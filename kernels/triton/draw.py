"""From logits to a token: temperature, the greedy choice, the random draw. Shapes: logits [reqs, vocab].

A row is cut into chunks that a program each looks through; a second kernel joins what they found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import (
    LARGEST_KEY,
    SMALLEST_KEY,
    cdiv,
    check_floats,
    check_rows,
    early_launch,
    float_of,
    next_power_of_2,
    order_key,
    rounded,
    take_turn,
)

CHUNK = 4096
GREEDY_BELOW = tl.constexpr(1e-5)  # as in the reference


def greedy(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, lowest among equal; NaN counts as the largest. int64 [reqs]."""
    return _best(logits, None)


def draw(logits: Tensor, exponential: Tensor) -> Tensor:
    """One id a row, int64 [reqs], distributed as softmax(logits); exponential [reqs, vocab] from Exp(1)."""
    check_floats("draw", exponential)
    check_rows("draw", exponential=exponential)
    return _best(logits, exponential)


def _best(logits: Tensor, exponential: Tensor | None) -> Tensor:
    check_floats("greedy", logits)
    check_rows("greedy", logits=logits)
    reqs, vocab = logits.shape
    chunks = cdiv(vocab, CHUNK)
    keys = torch.empty(reqs, chunks, dtype=torch.int32, device=logits.device)
    ids = torch.empty_like(keys)
    out = torch.empty(reqs, dtype=torch.int64, device=logits.device)
    if reqs:
        noise_step = 0 if exponential is None else exponential.stride(0)
        _best_of_chunk[(reqs, chunks)](
            logits, exponential, keys, ids, logits.stride(0), noise_step, vocab, chunks, CHUNK=CHUNK,
            **early_launch(),
        )  # fmt: skip
        _best_of_row[(reqs,)](
            keys, ids, out, chunks, BLOCK=next_power_of_2(chunks), num_warps=1, **early_launch()
        )
    return out


@triton.jit
def _best_of_chunk(
    logits, exponential, keys, ids, step, noise_step, vocab, chunks, CHUNK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    take_turn(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < vocab
    score = tl.load(logits + row * step + token, mask=exists, other=float("-inf")).to(tl.float32)
    if exponential is not None:
        clock = tl.load(exponential + row * noise_step + token, mask=exists, other=1.0).to(tl.float32)
        score = tl.where(score == float("-inf"), score, score - tl.log(clock))
    key = tl.where(exists, order_key(score), SMALLEST_KEY)
    best = tl.max(key, 0)
    tl.store(keys + row * chunks + chunk, best)
    tl.store(ids + row * chunks + chunk, tl.min(tl.where(key == best, token, LARGEST_KEY), 0))


@triton.jit
def _best_of_row(keys, ids, out, chunks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    key = tl.load(keys + row * chunks + chunk, mask=chunk < chunks, other=SMALLEST_KEY)
    token = tl.load(ids + row * chunks + chunk, mask=chunk < chunks, other=LARGEST_KEY)
    best = tl.max(key, 0)
    tl.store(out + row, tl.min(tl.where(key == best, token, LARGEST_KEY), 0).to(tl.int64))


def scale_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits with the softmax of logits / temperature [reqs], relative to each row's largest."""
    check_floats("scale_by_temperature", logits)
    check_rows("scale_by_temperature", logits=logits)
    reqs, vocab = logits.shape
    chunks = cdiv(vocab, CHUNK)
    keys = torch.empty(reqs, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(reqs, vocab, dtype=logits.dtype, device=logits.device)
    if out.numel():
        _largest_of_chunk[(reqs, chunks)](logits, keys, logits.stride(0), vocab, chunks, CHUNK=CHUNK)
        _scale[(reqs, chunks)](
            logits, temperature, keys, out, logits.stride(0), temperature.stride(0), vocab, chunks, CHUNK=CHUNK,
            BLOCK=next_power_of_2(chunks),
        )  # fmt: skip
    return out


@triton.jit
def _largest_of_chunk(logits, keys, step, vocab, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * step + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    tl.store(keys + row * chunks + chunk, tl.max(order_key(logit), 0))


@triton.jit
def _scale(
    logits, temperature, keys, out, step, temperature_step, vocab, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    key = tl.load(keys + row * chunks + place, mask=place < chunks, other=SMALLEST_KEY)
    peak = float_of(tl.max(key, 0))
    peak = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)  # NaN is not below infinity either
    divisor = tl.load(temperature + row * temperature_step).to(tl.float32)
    divisor = rounded(tl.where(divisor < GREEDY_BELOW, 1.0, divisor), out.dtype.element_ty).to(tl.float32)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * step + token, mask=token < vocab, other=0.0).to(tl.float32)
    difference = rounded(logit - peak, out.dtype.element_ty).to(tl.float32)
    scaled = tl.where(divisor == 1.0, logit, tl.div_rn(difference, divisor))
    tl.store(out + row * vocab + token, rounded(scaled, out.dtype.element_ty), mask=token < vocab)
