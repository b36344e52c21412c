"""Reading log-probabilities (or logits) of chosen and of likely tokens."""

import torch
from torch import Tensor


def gather_logprobs(logprobs: Tensor, ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the tokens `ids` and of the `num_logprobs` largest, of logprobs [reqs, vocab].

    ids int [reqs]. Returns token ids int32 [reqs, n+1] and their values [reqs, n+1], column 0 being `ids` and
    the others descending, equal ones by ascending id; and ranks int64 [reqs]: how many tokens are at least as
    likely as `ids`, so that 1 is the only largest. n is num_logprobs, at most vocab.
    Source: vllm/v1/sample/sampler.py gather_logprobs.
    """
    ids = ids.to(torch.int64)[:, None]
    values = logprobs.gather(-1, ids)
    ranks = (logprobs >= values).sum(-1)
    if num_logprobs > 0:
        top_values, top_ids = logprobs.sort(dim=-1, descending=True, stable=True)
        ids = torch.cat([ids, top_ids[:, :num_logprobs]], -1)
        values = torch.cat([values, top_values[:, :num_logprobs]], -1)
    return ids.to(torch.int32), values, ranks


def score(logits: Tensor, ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gather_logprobs` of logits [reqs, vocab], whose values come back as log-probabilities; and what lowers a row's
    logits to those: its logsumexp [reqs].

    So values are NaN, or -inf, in a row of -inf alone, one with +inf and one with NaN.
    """
    tokens, values, ranks = gather_logprobs(logits, ids, num_logprobs)
    lowered = logits.logsumexp(-1)
    return tokens, values - lowered[:, None], ranks, lowered


def gather_ids(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Values of logprobs [reqs, vocab] at `ids` int [reqs, n]: [reqs, n], -inf where an id is negative."""
    values = logprobs.gather(-1, ids.clamp(min=0).to(torch.int64))
    return torch.where(ids >= 0, values, float("-inf"))
