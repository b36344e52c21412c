"""Verification of drafts: what a step keeps of them, and the token behind."""

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.records.noise import ACCEPT, DRAW, RECOVER

Uniforms = Callable[[Tensor, int, int], Tensor]
# (places of tokens [reqs, n], purpose, width) -> [reqs, n, width]
Verified = tuple[Int32[Tensor, "reqs places"], Bool[Tensor, " reqs"]]
# tokens, -1 behind a request's last; whether it got none behind its drafts, since there was no distribution


def verified_greedily(
    best: Int[Tensor, "reqs places"],
    is_unsound: Bool[Tensor, "reqs places"],
    drafts: Int[Tensor, "reqs drafts"],
    uniforms: Uniforms,
    *,
    rates: tuple[float, ...],
    kernels: Kernels,
) -> Verified:
    """The tokens of greedy requests: drafts while they are the best, and the best behind them."""
    if not rates:
        return kernels.verify_greedy(best, drafts, is_unsound)  # type: ignore[no-any-return]
    accepted = _as_told(_judged(is_unsound, drafts), rates, _chance(drafts, uniforms))
    return _sound(_tokens(drafts, accepted, best.gather(1, accepted[:, None])[:, 0]), is_unsound)


def verified_by_chance(
    final: Float[Tensor, "reqs places vocab"],
    is_unsound: Bool[Tensor, "reqs places"],
    drafts: Int[Tensor, "reqs drafts"],
    draft_probs: Float[Tensor, "reqs drafts vocab"] | None,
    uniforms: Uniforms,
    *,
    rates: tuple[float, ...],
    kernels: Kernels,
) -> Verified:
    """The tokens of requests that draw, each distributed as `final` has it: rejection sampling.

    The token behind the drafts is drawn with the noise that plain sampling draws it with, so a request without drafts
    gets the plain token. Source: Leviathan et al., https://arxiv.org/abs/2211.17192.
    """
    judged, vocab = _judged(is_unsound, drafts), final.shape[-1]
    chance = _chance(drafts, uniforms)
    if rates:
        accepted = _as_told(judged, rates, chance)
    else:
        accepted = kernels.count_accepted(final, drafts, judged, draft_probs, chance.to(final.dtype))
    behind = accepted[:, None]
    recover, draw = (uniforms(behind, purpose, vocab)[:, 0] for purpose in (RECOVER, DRAW))
    noise = -torch.where(behind < judged[:, None], recover, draw).log()
    last = kernels.draw_last(final, drafts, judged, accepted, draft_probs, noise.to(final.dtype))
    return _sound(_tokens(drafts, accepted, last), is_unsound)


def _sound(tokens: Tensor, is_unsound: Tensor) -> Verified:
    """The tokens without those of rows of logits that have no distribution, and which requests had such a last one."""
    return torch.where(is_unsound, -1, tokens), ((tokens >= 0) & is_unsound).any(-1)


def _judged(is_unsound: Tensor, drafts: Tensor) -> Tensor:
    """How many drafts of each request are judged: up to the first row of logits that has no distribution."""
    num_sound = (~is_unsound).to(torch.int32).cumprod(-1).sum(-1)
    return torch.minimum((drafts >= 0).sum(-1), num_sound)


def _chance(drafts: Tensor, uniforms: Uniforms) -> Float[Tensor, "reqs drafts"]:
    """What decides on each draft."""
    places = torch.arange(drafts.shape[1], device=drafts.device).expand(len(drafts), -1)
    return uniforms(places, ACCEPT, 1)[..., 0]


def _as_told(judged: Tensor, rates: tuple[float, ...], chance: Tensor) -> Int[Tensor, " reqs"]:
    """How many drafts stand if a request's first j + 1 do with probability rates[j], whatever the model says.

    Source: vllm/v1/sample/rejection_sampler.py, synthetic mode.
    """
    given = (1.0, *rates)[: chance.shape[1] + 1]
    each = [rate / before if before else 0.0 for before, rate in pairwise(given)]
    each += [0.0] * (chance.shape[1] - len(each))
    place = torch.arange(chance.shape[1], device=chance.device)
    stands = torch.stack([own < rate for own, rate in zip(chance.unbind(1), each, strict=True)], 1)
    stands = stands & (place < judged[:, None])
    return stands.to(torch.int64).cumprod(-1).sum(-1)


def _tokens(drafts: Tensor, accepted: Tensor, last: Tensor) -> Int32[Tensor, "reqs places"]:
    """The accepted drafts and the token behind them, -1 behind that."""
    place, behind = torch.arange(drafts.shape[1] + 1, device=drafts.device), accepted[:, None]
    own = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    tokens = torch.where(place < behind, own, torch.where(place == behind, last[:, None], -1))
    return tokens.to(torch.int32)
