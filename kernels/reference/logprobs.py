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
    """`gather_logprobs` of logits [reqs, vocab], whose values come back as log-probabilities; and by what the logits
    of a row are lowered to those, as `lowered` does it: [reqs, 2].

    The second is the logarithm of what the first leaves, the largest logit: so logits of any size keep their digits.
    Values are NaN, or -inf, in a row of -inf alone, one with +inf and one with NaN.
    """
    tokens, values, ranks = gather_logprobs(logits, ids, num_logprobs)
    by = normalizer(logits)
    return tokens, lowered(values, by), ranks, by


def normalizer(logits: Tensor) -> Tensor:
    """By what each row of logits [reqs, vocab] is lowered to log-probabilities, [reqs, 2].

    Its largest one, or 0 where that is infinite, and the logarithm of what all of them sum to then.
    """
    peak = logits.detach().amax(-1)
    peak = torch.where(peak.isinf(), 0.0, peak)
    return torch.stack([peak, (logits - peak[:, None]).exp().sum(-1).log()], -1)


def lowered(values: Tensor, by: Tensor) -> Tensor:
    """Log-probabilities of logits [reqs, n], by what `score` says of their rows."""
    return (values - by[:, :1]) - by[:, 1:]


def gather_ids(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Values of logprobs [reqs, vocab] at `ids` int [reqs, n]: [reqs, n], -inf where an id is negative."""
    values = logprobs.gather(-1, ids.clamp(min=0).to(torch.int64))
    return torch.where(ids >= 0, values, float("-inf"))
