"""Packed bits of a grammar, against their definition in Python."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.grammar import apply_grammar_bitmask
from tests.laws import equal
from tests.profiles import examples

INF = math.inf
LOGIT = st.sampled_from([-INF, -2.5, -0.0, 0.0, 1.0, INF, math.nan])


def packed(allowed: list[list[bool]]) -> Tensor:
    """Bools [masks, vocab] as int32 words, the lowest bit first."""
    masks = []
    for bits in allowed:
        words = [
            sum(1 << place for place, bit in enumerate(bits[start : start + 32]) if bit)
            for start in range(0, len(bits), 32)
        ]
        masks.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(masks, dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, list[list[bool]], list[int]]:
    """Logits of some rows, some masks, and the mask of each row: any of them, shared ones and none too."""
    vocab = draw(st.sampled_from([1, 31, 32, 33, 64, 70]))
    masks = draw(st.lists(st.lists(st.booleans(), min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    mask_of_row = draw(st.lists(st.integers(-1, len(masks) - 1), min_size=1, max_size=4))
    values = st.lists(LOGIT, min_size=vocab, max_size=vocab)
    logits = draw(st.lists(values, min_size=len(mask_of_row), max_size=len(mask_of_row)))
    return torch.tensor(logits), masks, mask_of_row


@examples(0.3)
@given(cases())
def test_a_token_stays_where_its_rows_mask_has_its_bit(
    case: tuple[Tensor, list[list[bool]], list[int]],
) -> None:
    """The highest bit of a word, the last word in part, rows without a mask: each token is looked up on its own."""
    logits, masks, mask_of_row = case
    ours = apply_grammar_bitmask(logits, packed(masks), torch.tensor(mask_of_row, dtype=torch.int32))
    expected = [
        [float(x) if mask < 0 or masks[mask][token] else -INF for token, x in enumerate(logits[row].tolist())]
        for row, mask in enumerate(mask_of_row)
    ]
    assert equal(ours, torch.tensor(expected))
