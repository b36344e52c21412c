"""Verification of drafts: which of them stand, and the token behind the last that does.

Row j of a request's target logits is the distribution of its token j of this step, given the drafts before it. So a
request with n drafts has rows 0 to n that mean something, and gets 1 to n + 1 tokens. Shapes: drafts int32 [reqs, k],
num_drafts int [reqs] of at most k, target logits float [reqs, k + 1, vocab], made for sampling: constrained, at
temperature, cut. Source: Leviathan et al., https://arxiv.org/abs/2211.17192; vllm/v1/sample/rejection_sampler.py.
"""

import torch
from torch import Tensor

from purestep.kernels.reference.draw import draw


def verify_greedy(best: Tensor, drafts: Tensor, is_unsound: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of greedy requests, int32 [reqs, k + 1], -1 behind the last, and who got none behind the drafts.

    best int [reqs, k + 1] are the largest logits' ids, 0 or more; drafts are -1 behind a request's last; is_unsound
    bool [reqs, k + 1] are the rows of logits that have no distribution. A draft stands while it and all before it are
    the best of sound rows; the token behind them is the best there, or none, bool [reqs], if that row is unsound.
    """
    place = torch.arange(best.shape[1], device=best.device)
    agrees = (best[:, :-1] == drafts) & ~is_unsound[:, :-1]
    behind = agrees.to(torch.int64).cumprod(-1).sum(-1)[:, None]
    told = torch.where((place <= behind) & ~is_unsound, best, -1)
    return told.to(torch.int32), is_unsound.gather(1, behind)[:, 0]


def count_accepted(
    logits: Tensor, drafts: Tensor, num_drafts: Tensor, draft_probs: Tensor | None, uniform: Tensor
) -> Tensor:
    """How many drafts stand where tokens are drawn: int64 [reqs].

    Draft d stands, if all before it do, with probability min(1, p(d) / q(d)): p is the target's, q the one that it was
    drawn from, draft_probs float [reqs, k, vocab]; without those q is 1, a guess that stands for itself. uniform float
    [reqs, k] in (0, 1) decides. A draft of -1, and one that q forbids, falls.
    """
    ids = drafts.clamp(min=0).to(torch.int64)[:, :, None]
    p = logits[:, :-1].softmax(-1).gather(-1, ids)[:, :, 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, ids)[:, :, 0]
    place = torch.arange(drafts.shape[1], device=drafts.device)
    stands = (place < num_drafts[:, None]) & (drafts >= 0) & (q > 0) & (p / q >= uniform)
    return stands.to(torch.int64).cumprod(-1).sum(-1)


def draw_last(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    draft_probs: Tensor | None,
    exponential: Tensor,
) -> Tensor:
    """The token behind the `accepted` drafts [reqs]: int64 [reqs], one for each request.

    Where all drafts stand it is drawn from the target as `draw` does it, to the bit. Where one fell it is drawn from
    what the target has more of than the draft's distribution, max(p - q, 0); without draft_probs from all ids but the
    fallen one. exponential [reqs, vocab] from Exp(1), of its own for each output. Where rounding leaves no difference
    at all, the target itself is drawn from: an id that it forbids is never returned.
    """
    row = _at(logits, accepted)
    if drafts.shape[1] == 0:
        return draw(row, exponential)
    fallen = accepted.clamp(max=drafts.shape[1] - 1)
    if draft_probs is None:
        token = torch.arange(row.shape[-1], device=row.device)
        draft = drafts.gather(1, fallen[:, None].to(torch.int64))
        left = torch.where(token == draft, float("-inf"), row)
    else:
        left = (row.softmax(-1) - _at(draft_probs, fallen)).clamp(min=0).log()
    differs = (accepted < num_drafts) & (left > float("-inf")).any(-1)
    return draw(torch.where(differs[:, None], left, row), exponential)


def _at(rows: Tensor, place: Tensor) -> Tensor:
    """Of rows [reqs, places, vocab] each request's one at `place` [reqs]."""
    index = place.to(torch.int64)[:, None, None].expand(-1, 1, rows.shape[-1])
    return rows.gather(1, index)[:, 0]
