"""Drafts out of histories: the reference's, in histories of one part and of several."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.ngram import propose_ngram  # isort: skip

pytestmark = quiet

HISTORY = st.lists(st.integers(0, 2), min_size=12, max_size=12)
REQUEST = st.tuples(HISTORY, st.integers(0, 12), st.integers(-1, 5))


@few(15)
@given(st.lists(REQUEST, min_size=1, max_size=3), st.integers(1, 2), st.integers(0, 3), st.integers(0, 5))
def test_equals_reference(
    requests: list[tuple[list[int], int, int]], min_n: int, wider: int, num_drafts: int
) -> None:
    tapes, lengths, room = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in zip(*requests, strict=True)
    )
    rows = torch.arange(len(requests), device=DEVICE).flip(0)
    given = (tapes, rows, lengths, room)
    numbers = {"min_n": min_n, "max_n": min_n + wider, "num_drafts": num_drafts}
    assert equal(propose_ngram(*given, **numbers), reference.propose_ngram(*given, **numbers))


@pytest.mark.parametrize("length", [1024, 1025, 2500])
def test_long_histories(length: int) -> None:
    """Matches that cross the border of two parts, and ties between parts: the earliest wins."""
    tapes = torch.randint(3, (2, 2600), dtype=torch.int32, generator=torch.Generator().manual_seed(length))
    lengths, room = torch.tensor([length, length - 3]), torch.tensor([9, 4])
    at = 1020 if length > 2000 else 500
    tapes[0, at : at + 8] = tapes[0, length - 8 : length]
    rows = torch.tensor([1, 0])
    given = [x.to(DEVICE) for x in (tapes, rows, lengths.flip(0), room)]
    for max_n in (2, 8):
        numbers = {"min_n": 1, "max_n": max_n, "num_drafts": 6}
        ours = propose_ngram(*given, **numbers)
        assert equal(ours, reference.propose_ngram(*given, **numbers))
        assert (ours[:, 0] >= 0).all()


@pytest.mark.gpu
def test_large_batch() -> None:
    tapes = torch.randint(50, (64, 32768), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(64, device=DEVICE).int()
    lengths = torch.randint(32768, (64,), dtype=torch.int32, device=DEVICE)
    room = torch.randint(6, (64,), dtype=torch.int32, device=DEVICE)
    given, numbers = (tapes, rows, lengths, room), {"min_n": 1, "max_n": 4, "num_drafts": 5}
    assert equal(propose_ngram(*given, **numbers), reference.propose_ngram(*given, **numbers))
