"""Suffix drafts: the most frequent continuation of the longest context, against the definition in plain Python."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.drafters.suffix import suffix
from purestep.pure.errors import DrafterError
from purestep.pure.propose import host_drafts
from purestep.pure.records.drafter import HostDrafter

TEXT = st.lists(st.integers(0, 3), max_size=14)


def by_definition(
    history: list[int], corpus: list[list[int]], most: int, max_context: int, min_share: float
) -> list[int]:
    context, drafts, chance = list(history), list[int](), 1.0
    while len(drafts) < most:
        for length in range(min(max_context, len(context)), 0, -1):
            ending = context[-length:]
            followers = Counter(
                text[start + length]
                for text in (history, *corpus)
                for start in range(len(text) - length)
                if text[start : start + length] == ending
            )
            if followers:
                break
        else:
            break
        token = min(followers, key=lambda id: (-followers[id], id))
        chance *= followers[token] / followers.total()
        if chance < min_share:
            break
        drafts.append(token)
        context.append(token)
    return drafts


def proposed(drafter: HostDrafter, history: list[int], limit: int) -> list[int]:
    kept, (drafts,) = host_drafts(drafter, drafter.init(), [history], [limit])
    assert kept is not None
    return list(drafts)


@given(
    TEXT, st.lists(TEXT, max_size=3), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5])
)
def test_is_the_definition(
    history: list[int], corpus: list[list[int]], num_drafts: int, max_context: int, min_share: float
) -> None:
    drafter = suffix(num_drafts=num_drafts, max_context=max_context, min_share=min_share, corpus=corpus)
    expected = by_definition(history, corpus, num_drafts, max_context, min_share)
    assert proposed(drafter, history, 99) == expected


def test_what_is_more_frequent_wins_over_what_is_earlier() -> None:
    """Unlike an n-gram drafter's; and what the corpus says counts."""
    history = [1, 2, 5, 1, 2, 6, 1, 2, 6, 1, 2]
    assert proposed(suffix(num_drafts=3, max_context=2), history, 99) == [6, 1, 2]
    corpus = [[1, 2, 7], [1, 2, 7], [1, 2, 7]]
    assert proposed(suffix(num_drafts=1, max_context=2, corpus=corpus), history, 99) == [7]


def test_drafts_end_where_they_become_unlikely() -> None:
    history = [1, 2, 1, 3, 1, 4, 1]  # behind 1 three different tokens have a third each
    assert proposed(suffix(num_drafts=4, max_context=1, min_share=0.4), history, 99) == []
    assert proposed(suffix(num_drafts=4, max_context=1, min_share=0.3), history, 99) == [2, 1]


@given(TEXT, st.integers(0, 20))
def test_drafts_leave_room_for_the_token_behind(history: list[int], limit: int) -> None:
    drafts = proposed(suffix(num_drafts=5, min_share=0.0), history, limit)
    assert len(drafts) <= max(limit - len(history) - 1, 0)


@pytest.mark.parametrize(
    "corpus", [5, "abc", [1, 2, 3], [[1, 2.5]], [["a"]], [[[1]], [[2]]], [[1], None], [[1, [2]]]]
)
def test_a_corpus_of_something_else_is_refused(corpus: Any) -> None:
    with pytest.raises(DrafterError, match=r"corpus=.*: give a list of texts, each a list of token ids"):
        suffix(num_drafts=1, corpus=corpus)


def test_empty_texts_teach_nothing() -> None:
    assert proposed(suffix(num_drafts=1, corpus=[[], [4, 7]]), [4], 99) == [7]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_drafts": 0},
        {"num_drafts": "3"},
        {"num_drafts": 1.5},
        {"num_drafts": 1, "max_context": 0},
        {"num_drafts": 1, "min_share": 1.5},
        {"num_drafts": 1, "min_share": None},
    ],
)
def test_numbers_that_ask_for_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DrafterError, match="suffix drafts with"):
        suffix(**wrong)  # type: ignore[arg-type]
