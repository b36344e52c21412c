"""Drafts that follow the most frequent continuation of a request's last words, in its own past and in a corpus.

Where an n-gram drafter copies one place, this one asks at every token what followed its context most often, over all
places of the longest context that occurs at all, and stops where the answers so far have become unlikely.
Source: Oliaro et al., "SuffixDecoding", https://arxiv.org/abs/2411.04975.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from purestep.pure.arrays import frozen
from purestep.pure.errors import DrafterError
from purestep.pure.records.drafter import Drafts, Histories, HostDrafter, is_count


def suffix(
    *,
    num_drafts: int,
    max_context: int = 24,
    min_share: float = 0.1,
    corpus: Sequence[Sequence[int]] = (),
) -> HostDrafter:
    """A drafter on the host. It looks at the last `max_context` tokens at most.

    A draft's chance is estimated as the product of the shares that it and the drafts before it had of the tokens seen
    behind their contexts; drafting ends where that falls below `min_share`. `corpus` are texts to learn from beside a
    request's own history, such as earlier answers.

    Raises:
        DrafterError: numbers that ask for nothing, or a corpus of something else than token ids.
    """
    is_share = isinstance(min_share, int | float) and 0 <= min_share <= 1
    if not is_count(num_drafts) or not is_count(max_context) or not is_share:
        raise DrafterError(
            f"suffix drafts with num_drafts={num_drafts!r}, max_context={max_context!r} and min_share={min_share!r}: "
            "the first two are whole numbers of at least 1, and the share lies between 0 and 1"
        )
    texts = _texts(corpus)
    return HostDrafter(
        num_drafts, partial(propose, max_context=max_context, min_share=min_share), partial(tuple, texts)
    )


def _texts(corpus: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    try:
        texts = [np.asarray(text) for text in corpus]
    except (TypeError, ValueError):  # nothing to go through, or texts of texts
        texts = [np.zeros(())]
    if not all(text.ndim == 1 and (text.dtype.kind in "iu" or not len(text)) for text in texts):
        raise DrafterError(
            f"corpus={corpus!r:.80}: give a list of texts, each a list of token ids (whole numbers)"
        )
    return tuple([frozen(text.astype(np.int32)) for text in texts])


def propose(
    kept: tuple[np.ndarray, ...],
    histories: Histories,
    budgets: Sequence[int],
    *,
    max_context: int,
    min_share: float,
) -> tuple[tuple[np.ndarray, ...], Drafts]:
    """Drafts of every request; `kept` is the corpus."""
    return kept, tuple(
        suffix_drafts(np.asarray(history, np.int32), kept, budget, max_context, min_share)
        for history, budget in zip(histories, budgets, strict=True)
    )


def suffix_drafts(
    history: np.ndarray, corpus: Sequence[np.ndarray], most: int, max_context: int, min_share: float
) -> tuple[int, ...]:
    """At most `most` tokens that are likely to follow `history`."""
    texts = (history, *corpus)
    context, drafts, chance = history[-max_context:].tolist(), list[int](), 1.0
    while len(drafts) < most:
        followers = _followers(texts, context)
        if not len(followers):
            break
        ids, counts = np.unique(followers, return_counts=True)
        best = int(counts.argmax())  # the lowest id of the most frequent
        chance *= float(counts[best]) / len(followers)
        if chance < min_share:
            break
        drafts.append(int(ids[best]))
        context = [*context, drafts[-1]][-max_context:]
    return tuple(drafts)


def _followers(texts: Sequence[np.ndarray], context: Sequence[int]) -> np.ndarray:
    """The tokens behind all places of the longest ending of `context` that some text has with a token behind it."""
    places = [np.arange(len(text)) for text in texts]  # of the follower
    longest = 0
    for back in range(1, len(context) + 1):
        token = context[-back]
        fewer = [
            own[own >= back][text[own[own >= back] - back] == token]
            for text, own in zip(texts, places, strict=True)
        ]
        if not any(map(len, fewer)):
            break
        places, longest = fewer, back
    if longest == 0:
        return np.zeros(0, np.int32)
    return np.concatenate([text[own] for text, own in zip(texts, places, strict=True)])
