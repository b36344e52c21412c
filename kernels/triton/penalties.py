"""Penalties on tokens that have occurred: count the histories, then one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import cdiv, check_floats, check_rows, rounded

COLUMNS = 1024  # of a history, per program
CHUNK = 4096  # of the vocabulary, per program
IN_PROMPT = tl.constexpr(1 << 30)  # a bit above every count of outputs


def penalize(
    logits: Tensor,
    history: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Logits [reqs, vocab] less what their requests' histories [reqs, columns] cost them.

    Occurrences are counted by integer atomics, whose order changes nothing.
    """
    check_floats("penalize", logits)
    check_rows("penalize", logits=logits, history=history)
    reqs, vocab = logits.shape
    out = torch.empty(reqs, vocab, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    seen = torch.zeros(reqs, vocab, dtype=torch.int32, device=logits.device)
    columns = history.shape[1]
    if columns:
        _count[(reqs, cdiv(columns, COLUMNS))](
            seen, history, prompt_lengths, lengths, history.stride(0), prompt_lengths.stride(0), lengths.stride(0),
            vocab, columns, COLUMNS=COLUMNS,
        )  # fmt: skip
    weights = (repetition, frequency, presence)
    _penalize[(reqs, cdiv(vocab, CHUNK))](
        logits, seen, out, *weights, logits.stride(0), *(w.stride(0) for w in weights), vocab, CHUNK=CHUNK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["columns", "history_step"],
    do_not_specialize_on_alignment=["history", "prompt_lengths", "lengths"],
)
def _count(
    seen, history, prompt_lengths, lengths, history_step, prompt_step, length_step, vocab, columns,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.minimum(tl.load(lengths + row * length_step), columns)
    prompt_length = tl.load(prompt_lengths + row * prompt_step)
    token = tl.load(history + row * history_step + column, mask=column < length, other=-1)
    known = (token >= 0) & (token < vocab)
    cell = seen + row * vocab + token
    tl.atomic_or(cell, IN_PROMPT, mask=known & (column < prompt_length), sem="relaxed")
    tl.atomic_add(cell, 1, mask=known & (column >= prompt_length), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["repetition", "frequency", "presence"])
def _penalize(
    logits, seen, out, repetition, frequency, presence, step, repetition_step, frequency_step, presence_step, vocab,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    exists = token < vocab
    logit = tl.load(logits + row * step + token, mask=exists, other=0.0).to(tl.float32)
    word = tl.load(seen + row * vocab + token, mask=exists, other=0)
    factor = tl.load(repetition + row * repetition_step).to(tl.float32)
    per_output = tl.load(frequency + row * frequency_step).to(tl.float32)
    once = tl.load(presence + row * presence_step).to(tl.float32)
    neutral = (factor == 1.0) & (per_output == 0.0) & (once == 0.0)
    scale = tl.where(word != 0, tl.where(logit > 0, tl.div_rn(1.0, factor), factor), 1.0)
    count = (word & (IN_PROMPT - 1)).to(tl.float32)
    penalized = logit * scale - per_output * count - once * (count > 0).to(tl.float32)
    tl.store(
        out + row * vocab + token,
        rounded(tl.where(neutral, logit, penalized), out.dtype.element_ty),
        mask=exists,
    )
