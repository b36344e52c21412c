"""From processed logits to a token, and what the token means for its row; by the set's other functions.

Each is given the set itself first, so that a set which replaces one part changes what is made of it.
"""

import torch
from torch import Tensor

from purestep.kernels.reference.draw import GREEDY_BELOW
from purestep.kernels.types import Kernels


def choose(
    kernels: Kernels,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    stream: Tensor,
    output_index: Tensor,
    *,
    purpose: int,
    truncated: bool,
) -> tuple[Tensor, Tensor]:
    """The token of each row of logits [reqs, vocab], and the id of its largest logit: int64 [reqs] each.

    A row whose temperature is next to 0 takes the largest; the others draw, after temperature and, if `truncated`,
    min-p, top-k and top-p, with `exponentials` as noise. All parameters [reqs]; seed and stream int32 [reqs, 2], low
    and high words.
    """
    best = kernels.greedy(logits)
    final = kernels.scale_by_temperature(logits, temperature)
    if truncated:
        final = kernels.truncate(final, top_k, top_p, min_p)
    noise = kernels.exponentials(kernels, seed, stream, output_index, purpose=purpose, width=logits.shape[-1])
    drawn = kernels.draw(final, noise.to(final.dtype))
    return torch.where(temperature < GREEDY_BELOW, best, drawn), best


def exponentials(
    kernels: Kernels, seed: Tensor, stream: Tensor, output_index: Tensor, *, purpose: int, width: int
) -> Tensor:
    """Exp(1) noise, a function of seed, stream (int32 [reqs, 2]), output_index [reqs] and purpose: [reqs, width]."""
    both = (
        words[:, 0].to(torch.int64) & 0xFFFFFFFF | words[:, 1].to(torch.int64) << 32
        for words in (seed, stream)
    )
    return -kernels.uniforms(*both, output_index, purpose=purpose, width=width).log()  # type: ignore[no-any-return]


def judge(
    kernels: Kernels,
    logits: Tensor,
    best: Tensor,
    processed: Tensor,
    tokens: Tensor,
    stop_ids: Tensor,
    num_stop_ids: Tensor,
    min_tokens: Tensor,
    num_output_tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens as int32, whether they stop their rows, and whether the rows had no distribution: [reqs] each.

    `best` are the ids of the largest of the model's logits [reqs, vocab]: NaN if any is, else +inf if any is.
    `processed` [reqs, vocab] are those that `tokens` were taken from: -inf there means that the rules left none. A
    token stops its row if it is one of the first num_stop_ids of stop_ids [reqs, ids] and, with it, the row has
    min_tokens outputs.
    """
    peak = logits.gather(-1, best[:, None])[:, 0]
    left = processed.gather(-1, tokens[:, None])[:, 0]
    place = torch.arange(stop_ids.shape[1], device=tokens.device)
    is_stop = (stop_ids == tokens[:, None]) & (place < num_stop_ids[:, None])
    return (
        tokens.to(torch.int32),
        is_stop.any(-1) & (num_output_tokens + 1 >= min_tokens),
        ~((peak < float("inf")) & (left > float("-inf"))),
    )
