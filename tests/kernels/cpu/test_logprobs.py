"""Likely tokens on the CPU are those of the reference, in its order."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.cpu.logprobs import gather_logprobs, score
from purestep.kernels.reference import logprobs as by_sorting
from tests.laws import equal

VOCAB = 7
VALUE = st.sampled_from([-math.inf, -0.0, 0.0, 1.0, math.inf, math.nan]) | st.floats(-9, 9, width=32)
ROWS = st.lists(
    st.tuples(st.lists(VALUE, min_size=VOCAB, max_size=VOCAB), st.integers(0, VOCAB - 1)),
    min_size=1,
    max_size=3,
)


@given(ROWS, st.integers(0, VOCAB))
def test_equals_reference(rows: list[tuple[list[float], int]], n: int) -> None:
    """To the bit, whatever is alike, infinite or no number."""
    logits, ids = torch.tensor([row for row, _ in rows]), torch.tensor([token for _, token in rows])
    assert equal(gather_logprobs(logits, ids, n), by_sorting.gather_logprobs(logits, ids, n))
    assert equal(score(logits, ids, n), by_sorting.score(logits, ids, n))


@pytest.mark.parametrize(("n", "is_sorted"), [(0, True), (1, False), (5, False), (50, True)])
def test_rows_are_sorted_only_where_all_is_wanted(n: int, is_sorted: bool) -> None:
    logits, ids = torch.arange(100.0).view(2, 50), torch.tensor([3, 4])
    with mock.patch.object(by_sorting, "gather_logprobs", wraps=by_sorting.gather_logprobs) as sorting:
        gather_logprobs(logits, ids, n)
    assert sorting.called == is_sorted
