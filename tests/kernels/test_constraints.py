"""Rules that name tokens, against their definitions in Python."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.constraints import add_bias, allow_only, ban_bad_words, ban_tokens
from tests.laws import equal
from tests.profiles import examples

REQS, VOCAB = 4, 6
INF = math.inf
LOGIT = st.sampled_from([-INF, -2.5, -0.0, 0.0, 1.0, 3.25, INF, math.nan])
LOGITS = st.lists(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB), min_size=REQS, max_size=REQS).map(
    torch.tensor
)
# Places of the batch and beyond it on both sides; ids of the vocabulary and padding.
ENTRIES = st.lists(st.tuples(st.integers(-2, REQS + 1), st.integers(-1, VOCAB)), max_size=12)
FLAGS = st.lists(st.booleans(), min_size=REQS, max_size=REQS)


def columns(entries: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    index, ids = zip(*entries, strict=True) if entries else ((), ())
    return torch.tensor(index, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32)


def exists(index: int, token: int) -> bool:
    return 0 <= index < REQS and 0 <= token < VOCAB


def banned(logits: Tensor, places: set[tuple[int, int]]) -> Tensor:
    rows = [[-INF if (r, v) in places else float(logits[r, v]) for v in range(VOCAB)] for r in range(REQS)]
    return torch.tensor(rows)


@examples(0.3)
@given(LOGITS, FLAGS, ENTRIES)
def test_only_listed_ids_are_left(
    logits: Tensor, restricted: list[bool], entries: list[tuple[int, int]]
) -> None:
    """Restricted requests keep their own list and nothing else; the others keep every bit."""
    listed = {entry for entry in entries if exists(*entry)}
    forbidden = {(r, v) for r in range(REQS) if restricted[r] for v in range(VOCAB)} - listed
    ours = allow_only(logits, torch.tensor(restricted), *columns(entries))
    assert equal(ours, banned(logits, forbidden))


@examples(0.3)
@given(LOGITS, ENTRIES, st.data())
def test_biases_add_up(logits: Tensor, entries: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each entry adds its value, repeated ones too; places without one keep every bit, NaN included."""
    values = data.draw(
        st.lists(st.sampled_from([-100.0, -0.5, 2.0]), min_size=len(entries), max_size=len(entries))
    )
    ours = add_bias(logits, *columns(entries), torch.tensor(values))
    expected = logits.tolist()
    for (index, token), value in zip(entries, values, strict=True):
        if exists(index, token):
            expected[index][token] += value
    touched = torch.tensor([[(r, v) in entries for v in range(VOCAB)] for r in range(REQS)])
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    assert equal(ours[~touched], logits[~touched])


def test_ignored_bias_keeps_the_sign_of_zero() -> None:
    """Padding adds nothing, not even 0.0, which would turn -0.0 into it."""
    logits = torch.full((2, 2), -0.0)
    ours = add_bias(logits, torch.tensor([-1, 2, 0]), torch.tensor([0, 0, 2]), torch.ones(3))
    assert equal(ours, logits)


@examples(0.3)
@given(
    LOGITS,
    st.lists(st.lists(st.integers(-1, VOCAB), min_size=3, max_size=3), min_size=REQS, max_size=REQS),
    FLAGS,
)
def test_active_requests_lose_their_ids(logits: Tensor, ids: list[list[int]], active: list[bool]) -> None:
    """min_tokens: stop ids of active requests are banned; padding bans nothing, inactive rows keep every bit."""
    places = {(r, token) for r in range(REQS) if active[r] for token in ids[r] if exists(r, token)}
    ours = ban_tokens(logits, torch.tensor(ids, dtype=torch.int32), torch.tensor(active))
    assert equal(ours, banned(logits, places))


TOKEN = st.integers(0, 1)  # few ids and short lists, so that words do occur, across prompt and outputs too
SEQUENCE = st.lists(TOKEN, max_size=3)


@examples(0.3)
@given(
    LOGITS,
    st.lists(st.tuples(SEQUENCE, SEQUENCE), min_size=REQS, max_size=REQS),
    st.lists(st.tuples(st.integers(-2, REQS + 1), st.lists(TOKEN, max_size=4)), max_size=8),
)
def test_last_id_of_a_bad_word_is_banned(
    logits: Tensor, histories: list[tuple[list[int], list[int]]], words: list[tuple[int, list[int]]]
) -> None:
    """Banned is the last id of a word whose other ids end the outputs.

    Neither the prompt counts, nor what lies beyond the history.
    """
    width = 7
    rows = [prompt + outputs + [1] * (width - len(prompt + outputs)) for prompt, outputs in histories]
    starts = torch.tensor([len(prompt) for prompt, _ in histories], dtype=torch.int32)
    ends = torch.tensor([len(prompt + outputs) for prompt, outputs in histories], dtype=torch.int32)
    padded = torch.tensor([word + [-1] * (4 - len(word)) for _, word in words], dtype=torch.int32).view(-1, 4)
    index = torch.tensor([r for r, _ in words], dtype=torch.int32)
    ours = ban_bad_words(logits, torch.tensor(rows, dtype=torch.int32), starts, ends, index, padded)
    places = set()
    for r, word in words:
        if word and exists(r, word[-1]):
            outputs = histories[r][1]
            if len(word) - 1 <= len(outputs) and outputs[len(outputs) - len(word) + 1 :] == word[:-1]:
                places.add((r, word[-1]))
    assert equal(ours, banned(logits, places))


def test_bad_word_does_not_begin_in_the_prompt() -> None:
    """Prompt [4], no outputs: the word [4, 9] is not banned yet. Prompt [], outputs [4]: it is."""
    logits, history, words = torch.zeros(2, 10), torch.tensor([[4], [4]]), torch.tensor([[4, 9], [4, 9]])
    ours = ban_bad_words(
        logits, history, torch.tensor([1, 0]), torch.tensor([1, 1]), torch.tensor([0, 1]), words
    )
    assert ours[:, 9].tolist() == [0.0, -INF]


def test_bad_word_example() -> None:
    """After [4, 5], the word [5, 9] bans 9 and the word [4, 9] does not ban it."""
    logits, history, two = torch.zeros(2, 10), torch.tensor([[4, 5], [4, 5]]), torch.tensor([2, 2])
    words = torch.tensor([[5, 9], [4, 9]])
    ours = ban_bad_words(logits, history, torch.tensor([0, 0]), two, torch.tensor([0, 1]), words)
    assert ours[0].tolist() == [0.0] * 9 + [-INF]
    assert ours[1].tolist() == [0.0] * 10


def test_end_of_sequence_is_banned_with_the_stop_ids() -> None:
    """min_tokens with no stop ids of the request's own still keeps the model's end-of-sequence id away."""
    end_of_sequence, logits = 3, torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    stops = torch.tensor([[end_of_sequence, -1, -1]])
    assert int(ban_tokens(logits, stops, torch.tensor([True])).argmax()) == 2
    assert int(ban_tokens(logits, stops, torch.tensor([False])).argmax()) == end_of_sequence
