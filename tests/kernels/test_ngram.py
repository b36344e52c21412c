"""Drafts out of a history, against the rule in plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference.ngram import propose_ngram
from tests.profiles import examples

HISTORY = st.lists(st.integers(0, 2), max_size=14) | st.lists(st.integers(0, 1), max_size=9)


def by_search(history: list[int], room: int, min_n: int, max_n: int, num_drafts: int) -> list[int]:
    """The longest ending first, its earliest place first."""
    length = len(history)
    for n in range(max_n, min_n - 1, -1):
        for start in range(length - n):
            if n <= length and history[start : start + n] == history[length - n :]:
                return history[start + n :][: max(min(num_drafts, room), 0)]
    return []


@examples(0.3)
@given(
    st.lists(st.tuples(HISTORY, st.integers(-2, 6)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 5),
)
def test_is_the_rule(reqs: list[tuple[list[int], int]], min_n: int, wider: int, num_drafts: int) -> None:
    """Empty histories, endings longer than the history, overlaps; what lies behind a history does not matter."""
    width = max(len(history) for history, _ in reqs) + 2
    rows = list(range(len(reqs)))[::-1]
    tape = torch.zeros(len(reqs), width, dtype=torch.int32)
    for row, (history, _) in zip(rows, reqs, strict=True):
        tape[row] = torch.tensor(history + [1, 0] * width, dtype=torch.int32)[:width]
    drafts = propose_ngram(
        tape,
        torch.tensor(rows),
        torch.tensor([len(history) for history, _ in reqs]),
        torch.tensor([room for _, room in reqs]),
        min_n=min_n,
        max_n=min_n + wider,
        num_drafts=num_drafts,
    )
    assert drafts.dtype == torch.int32
    for own, (history, room) in zip(drafts.tolist(), reqs, strict=True):
        expected = by_search(history, room, min_n, min_n + wider, num_drafts)
        assert own == expected + [-1] * (num_drafts - len(expected))
