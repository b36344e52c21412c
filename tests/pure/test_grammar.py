"""Masks find the rows of logits that they are for, by request id."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.grammar import GrammarMask, apply_grammar, grammar_mask
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import GrammarOutput
from purestep.pure.sampling import sample_tokens
from tests.laws import assert_pure, equal
from tests.sampling_stage import Asker, executed

VOCAB = 40


def masks(names: tuple[str, ...], num_masks: int) -> GrammarOutput:
    """Mask k allows token k alone."""
    words = np.zeros((num_masks, 2), np.int32)
    words[np.arange(num_masks), np.arange(num_masks) // 32] = 1 << np.arange(num_masks) % 32
    return GrammarOutput(names, words)


def test_upstreams_example() -> None:
    """Each request has 1 + drafts masks in the order of the grammar's ids, and as many rows as the layout gives all."""
    drafts = {"a": (7, 8), "c": (9,)}
    found = assert_pure(
        grammar_mask,
        masks(("c", "a"), 5),
        ("a", "b", "c"),
        drafts,
        num_rows=9,
        vocab_size=VOCAB,
        num_drafts=2,
    )
    assert found.mask_of_row.tolist() == [2, 3, 4, -1, -1, -1, 0, 1, -1]


@given(st.permutations("abcdef"), st.permutations("abcdefxy"), st.data())
def test_a_request_has_its_own_masks_whatever_the_orders(
    batch: list[str], everybody: list[str], data: st.DataObject
) -> None:
    """Those without a grammar have none, nor has padding; who does not run uses up its masks."""
    drafts = {name: (1,) * data.draw(st.integers(0, 3)) for name in "abcdefxy"}
    names = tuple(everybody[: data.draw(st.integers(0, 8))])
    most = data.draw(st.integers(0, 3))  # fewer than were scheduled if the layout says so
    num_rows = len(batch) * (1 + most)
    grammar = masks(names, sum(1 + len(drafts[name]) for name in names))

    found = grammar_mask(grammar, batch, drafts, num_rows=num_rows + 2, vocab_size=VOCAB, num_drafts=most)

    own = {}
    start = 0
    for name in names:
        own[name] = list(range(start, start + 1 + len(drafts[name])))
        start = own[name][-1] + 1
    rows = [(own.get(name, []) + [-1] * (1 + most))[: 1 + most] for name in batch]
    expected = [mask for row in rows for mask in row]
    assert found.mask_of_row.tolist() == [*expected, -1, -1]


@pytest.mark.parametrize(("num_masks", "num_words"), [(1, 2), (3, 2), (2, 1), (2, 3)])
def test_masks_of_another_number_or_vocabulary_are_refused(num_masks: int, num_words: int) -> None:
    grammar = GrammarOutput(("a", "b"), np.zeros((num_masks, num_words), np.int32))
    with pytest.raises(SchedulerOutputError, match=r"take \(2, 2\): send 1 \+ drafts masks for each id"):
        grammar_mask(grammar, ("a", "b"), {}, num_rows=2, vocab_size=VOCAB)


def test_masks_come_before_everything_else_that_is_done_to_logits() -> None:
    """As if the model had said so: raw log-probabilities are of what the grammar allows."""
    askers = [
        Asker(SamplingParams(temperature=0.7, logprobs=3, seed=i, logit_bias={4: 9.0})) for i in range(2)
    ]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    given_ = executed(askers, logits)
    words = torch.tensor([[0b1110, 0]], dtype=torch.int32)
    masked = assert_pure(
        apply_grammar, given_, GrammarMask(words, torch.tensor([0, -1], dtype=torch.int32)), kernels=donating
    )

    by_hand = logits.clone()
    by_hand[0, [token for token in range(VOCAB) if token not in (1, 2, 3)]] = float("-inf")
    expected = sample_tokens(replace(given_, logits=by_hand), kernels=donating)
    assert equal(sample_tokens(masked, kernels=donating), expected)
    nothing = GrammarMask(words[:0], torch.tensor([-1, -1], dtype=torch.int32))
    assert apply_grammar(given_, nothing, kernels=donating) is given_
