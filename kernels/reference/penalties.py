"""Penalties on tokens that have occurred."""

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    history: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Logits [reqs, vocab], float32 or float64, less what their requests' histories cost them.

    history int [reqs, columns] begins at the left: the prompt up to prompt_lengths, the outputs up to
    lengths, both int [reqs]; what lies beyond, and ids outside the vocabulary, do not count. A token of
    prompt or outputs is divided by `repetition` if its logit is positive and multiplied if not; each
    occurrence in the outputs costs `frequency`, the first one `presence`; all float [reqs]. A request with
    (1, 0, 0) keeps every bit.
    Source: vllm/model_executor/layers/utils.py apply_penalties.
    """
    reqs, vocab = logits.shape
    column = torch.arange(history.shape[1], device=history.device)
    known = (column < lengths[:, None]) & (history >= 0) & (history < vocab)
    token = torch.where(known, history, vocab).to(torch.int64)  # column `vocab` takes what does not count
    is_output = (known & (column >= prompt_lengths[:, None])).to(logits.dtype)
    empty = torch.zeros(reqs, vocab + 1, dtype=logits.dtype, device=logits.device)
    counts = empty.scatter_add(1, token, is_output)[:, :vocab]
    seen = empty.scatter(1, token, 1.0)[:, :vocab] > 0

    factor = torch.where(seen, repetition[:, None], 1.0).to(logits.dtype)
    penalized = logits * torch.where(logits > 0, 1.0 / factor, factor)
    penalized = penalized - frequency[:, None] * counts
    penalized = penalized - presence[:, None] * (counts > 0)
    neutral = (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0)
    return torch.where(neutral[:, None], logits, penalized.to(logits.dtype))
