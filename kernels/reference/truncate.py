"""Cutting a distribution's tail: min-p, then top-k, then top-p.

Where a cut falls among equal logits the result must not depend on the device, the batch or the algorithm, so
it is a rule: top-k keeps every logit equal to the k-th, except that k = 1 is greedy and keeps the lowest id;
top-p keeps lower ids first. Upstream's rule for top-p is whatever order its sort leaves.
"""

import torch
from torch import Tensor


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits with -inf where cut: float [reqs, vocab], scaled by temperature beforehand.

    min_p float [reqs] cuts tokens less probable than min_p times the most probable one; top_k int [reqs]
    keeps the k largest of the rest; top_p float [reqs] keeps, from the largest down, what it takes to reach a
    mass of top_p in the distribution of those. min_p <= 0, top_k outside [1, vocab) and top_p >= 1 are off,
    and a request with all three off keeps every bit. One token at least is kept. A row with NaN is returned
    as it is.
    Source: vllm/v1/sample/ops/topk_topp_sampler.py apply_top_k_top_p,
    vllm/v1/sample/logits_processor/builtin.py MinP.
    """
    kept = _within_min_p(logits, min_p)
    values, ids = torch.where(kept, logits, float("-inf")).sort(dim=-1, descending=True, stable=True)
    within_k = _within_top_k(values, top_k)
    within = within_k & _within_top_p(torch.where(within_k, values, float("-inf")), top_p)
    kept = kept & torch.zeros_like(kept).scatter(-1, ids, within)
    return torch.where(kept | logits.isnan().any(-1, keepdim=True), logits, float("-inf"))


def _within_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Which logits min-p keeps: all of them for 0, no probability being less."""
    probabilities = logits.softmax(-1)
    threshold = min_p[:, None] * probabilities.amax(-1, keepdim=True)
    return ~(probabilities < threshold)


def _within_top_k(values: Tensor, top_k: Tensor) -> Tensor:
    """Which of the descending `values` [reqs, vocab] top-k keeps."""
    vocab = values.shape[-1]
    top_k = top_k[:, None]
    kth = values.gather(-1, (top_k.clamp(1, vocab) - 1).to(torch.int64))
    is_first = torch.arange(vocab, device=values.device) == 0
    kept = torch.where(top_k == 1, is_first, values >= kth)
    return kept | (top_k <= 0) | (top_k >= vocab)


def _within_top_p(values: Tensor, top_p: Tensor) -> Tensor:
    """Which of the descending `values` [reqs, vocab] top-p keeps: all but the smallest that share 1 - p.

    The mass is summed upwards from the smallest, as upstream does it, so that roundings agree.
    """
    top_p = top_p[:, None]
    mass = values.flip(-1).softmax(-1).cumsum(-1).flip(-1)
    is_first = torch.arange(values.shape[-1], device=values.device) == 0
    return ~(mass <= 1 - top_p) | is_first | (top_p >= 1)
