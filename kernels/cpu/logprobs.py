"""Reading log-probabilities on the CPU, without sorting whole rows where a few of them are asked for."""

import torch
from torch import Tensor

from purestep.kernels.reference import logprobs as reference


def gather_logprobs(logprobs: Tensor, ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, which sorts; here the largest are selected, if no two of them are alike and none else is as
    large as the last: then there is one order."""
    if not 0 < num_logprobs < logprobs.shape[-1]:
        return reference.gather_logprobs(logprobs, ids, num_logprobs)
    top_values, top_ids = logprobs.topk(num_logprobs, dim=-1)
    apart = (top_values[:, 1:] < top_values[:, :-1]).all()
    if not (apart and ((logprobs >= top_values[:, -1:]).sum(-1) == num_logprobs).all()):
        return reference.gather_logprobs(logprobs, ids, num_logprobs)
    own = ids.to(torch.int64)[:, None]
    values = logprobs.gather(-1, own)
    ranks = (logprobs >= values).sum(-1)
    return torch.cat([own, top_ids], -1).to(torch.int32), torch.cat([values, top_values], -1), ranks


def score(logits: Tensor, ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, by the function above."""
    tokens, values, ranks = gather_logprobs(logits, ids, num_logprobs)
    by = reference.normalizer(logits)
    return tokens, reference.lowered(values, by), ranks, by
