"""Rules that name tokens: allowed ids, biases, banned ids, bad words.

Lists of (index, id) are sparse matrices in coordinate form: `index` is a place in the batch. An entry whose
index lies outside the batch is ignored, which is how padding and requests that do not run are written. Logits
without an entry keep every bit. Shapes: logits [reqs, vocab].
"""

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


def allow_only(logits: Tensor, row_mask: Tensor, index: Tensor, ids: Tensor) -> Tensor:
    """Logits with -inf at every id that its request does not allow.

    row_mask bool [reqs]: which requests are restricted, each to the `ids` int [entries] listed under its
    `index` int [entries]. A restricted request without a list allows nothing.
    """
    allowed = _marked(logits, index, ids)
    return torch.where(allowed | ~row_mask[:, None], logits, NEGATIVE_INFINITY)


def add_bias(logits: Tensor, index: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Logits plus `values` float [entries] at (index, ids) int [entries]; repeated places add up."""
    cell, valid = _cells(logits, index, ids)
    # -0.0 is the one number that adds to every other, 0.0 and -0.0 included, without a change of bits.
    bias = torch.where(valid, values.to(logits.dtype), -0.0)
    return logits.flatten().scatter_add(0, torch.where(valid, cell, 0), bias).view(logits.shape)


def ban_tokens(logits: Tensor, ids: Tensor, active: Tensor) -> Tensor:
    """Logits with -inf at `ids` int [reqs, n] of the requests that are `active` bool [reqs].

    Ids outside the vocabulary are padding. min_tokens is this rule with a request's stop ids, the model's
    end-of-sequence ids among them, while it has fewer outputs.
    """
    reqs, vocab = logits.shape
    valid = active[:, None] & (ids >= 0) & (ids < vocab)
    place = torch.where(valid, ids, vocab).to(torch.int64)
    banned = torch.zeros(reqs, vocab + 1, dtype=torch.bool, device=logits.device).scatter(1, place, True)
    return torch.where(banned[:, :vocab], NEGATIVE_INFINITY, logits)


def ban_bad_words(
    logits: Tensor, history: Tensor, prompt_lengths: Tensor, lengths: Tensor, index: Tensor, words: Tensor
) -> Tensor:
    """Logits with -inf at the last id of every bad word whose other ids a request has just produced.

    history int [reqs, columns], columns >= 1, begins at the left; request r's outputs are its columns
    prompt_lengths[r] up to lengths[r], both int [reqs]. words int [words, length], length >= 1, are padded
    with -1 behind their end; index int [words] says whose they are. A word of one id is always banned, a word
    that begins in the prompt never is.
    Source: vllm/v1/sample/ops/bad_words.py.
    """
    word_lengths = (words >= 0).sum(-1)
    row = index.clamp(0, logits.shape[0] - 1).to(torch.int64)
    column = torch.arange(words.shape[1], device=words.device)
    position = (lengths[row] - word_lengths + 1)[:, None] + column
    past = history[row[:, None], position.clamp(0, history.shape[1] - 1)]
    matches = (past == words) & (position >= prompt_lengths[row][:, None])
    complete = (matches | (column >= word_lengths[:, None] - 1)).all(-1)
    last = words.gather(1, (word_lengths - 1).clamp(min=0)[:, None])[:, 0]
    banned = _marked(logits, torch.where(complete, index, -1), last)
    return torch.where(banned, NEGATIVE_INFINITY, logits)


def _cells(logits: Tensor, index: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Places of (index, ids) in the flattened logits, and which of them exist."""
    reqs, vocab = logits.shape
    valid = (index >= 0) & (index < reqs) & (ids >= 0) & (ids < vocab)
    return index.to(torch.int64) * vocab + ids, valid


def _marked(logits: Tensor, index: Tensor, ids: Tensor) -> Tensor:
    """Bool [reqs, vocab], True at (index, ids)."""
    cell, valid = _cells(logits, index, ids)
    size = logits.shape[0] * logits.shape[1]
    # One place more than there are logits takes what is ignored.
    marks = torch.zeros(size + 1, dtype=torch.bool, device=logits.device)
    return marks.scatter(0, torch.where(valid, cell, size), True)[:size].view(logits.shape)
