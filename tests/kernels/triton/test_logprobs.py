"""Reading log-probabilities: the likeliest in order, equal ones by id, without sorting the row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet

from purestep.kernels.triton.logprobs import MOST, gather_by, gather_logprobs, score  # isort: skip

pytestmark = quiet

VALUE = st.sampled_from([-math.inf, -3.0, -1.0, -0.0, 0.0]) | st.floats(-50, 0, width=32)
ROW = st.lists(VALUE, min_size=12, max_size=12)


def assert_same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for own, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


@few(15)
@given(
    ROW,
    st.integers(0, 11),
    st.sampled_from([0, 1, 2, 5, 12]),
    st.sampled_from([(2, 4), (2, 16), (128, 2048)]),
)
def test_equals_reference(row: list[float], token: int, n: int, way: tuple[int, int]) -> None:
    """However few candidates a list may hold."""
    logprobs = torch.tensor([row, row[::-1]], device=DEVICE)
    ids = torch.tensor([token, 11 - token], device=DEVICE)
    ours = gather_by(logprobs, ids, n, sub_block=way[0], capacity=way[1])
    assert_same(ours, reference.gather_logprobs(logprobs, ids, n))


@few(10)
@given(
    st.lists(
        st.floats(-90, 90, width=32) | st.sampled_from([-math.inf, math.inf, math.nan]),
        min_size=3,
        max_size=3,
    ),
    st.sampled_from([3, 4096, 4099, 9001]),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_scores_are_the_references(odd: list[float], vocab: int, n: int, seed: int) -> None:
    """Rows of a wider table: random ones, odd values somewhere, one that is high, one of -inf alone or but for a low
    value at its end."""
    table = torch.randn(5, vocab + 1, generator=torch.Generator().manual_seed(seed)).mul(9).to(DEVICE)
    logits = table[:, :vocab]
    logits[1, :: max(vocab // 3, 1)][:3] = torch.tensor(odd, device=DEVICE)
    logits[2] = 88.0
    logits[3:] = -math.inf
    logits[4, -1] = -700.0
    chosen = torch.tensor([seed % vocab, 0, 1, 2, vocab - 1], device=DEVICE)
    ids, logprobs, ranks, by = score(logits, chosen, n)
    expected_ids, expected, expected_ranks, expected_by = reference.score(logits.double(), chosen, n)
    assert_same((ids, ranks), (expected_ids, expected_ranks))
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-6, atol=2e-6, equal_nan=True)
    has_number = ~logits.isnan().any(-1)  # where there is NaN, only the sum has to say so
    torch.testing.assert_close(by[:, 1], expected_by[:, 1].float(), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert_same((by[has_number, 0],), (expected_by[has_number, 0].float(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_do_not_depend_on_how_many_are_wanted(dtype: torch.dtype) -> None:
    """To the bit: with more than fit as well, as somebody else in the batch may want."""
    logits = torch.randn(2, MOST + 60, device=DEVICE).mul(9).to(dtype)
    chosen = torch.tensor([5, 1070], device=DEVICE)
    many = score(logits, chosen, MOST + 1)
    assert_same(many[::2], reference.score(logits, chosen, MOST + 1)[::2])
    for n in (0, 1, 2, MOST):
        few = score(logits, chosen, n)
        assert_same(few, (many[0][:, : n + 1], many[1][:, : n + 1], *many[2:]))


def test_large_logits_keep_their_digits() -> None:
    logits = torch.full((3, 5), -1e8, device=DEVICE)
    logits[1] = torch.tensor([1e6, 1e6 - 1, 1e6 - 2, 0, -1e6])
    logits[2] = 3e38
    _, logprobs, _, _ = score(logits, torch.tensor([0, 1, 4], device=DEVICE), 2)
    torch.testing.assert_close(logprobs[0], torch.full((3,), -math.log(5), device=DEVICE))
    expected = logits[1].double().log_softmax(-1)[[1, 0, 1]].float()
    torch.testing.assert_close(logprobs[1], expected)
    torch.testing.assert_close(logprobs[2], torch.full((3,), -math.log(5), device=DEVICE))


def test_nan_comes_first() -> None:
    logprobs = torch.tensor([[0.0, math.nan, 1.0, math.nan]], device=DEVICE)
    ids = torch.tensor([2], device=DEVICE)
    assert_same(gather_logprobs(logprobs, ids, 3), reference.gather_logprobs(logprobs, ids, 3))


def test_more_than_fit_are_sorted() -> None:
    logprobs = torch.randn(1, MOST + 60, device=DEVICE)
    ids = torch.tensor([5], device=DEVICE)
    assert_same(gather_logprobs(logprobs, ids, MOST + 9), reference.gather_logprobs(logprobs, ids, MOST + 9))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 20, 1000])
@pytest.mark.parametrize("levels", [0, 1])
def test_large_rows(n: int, levels: int) -> None:
    """With distinct values and with thousands of ties."""
    logprobs = torch.randn(33, 128256, device=DEVICE)
    logprobs = logprobs.round() if levels else logprobs
    ids = torch.randint(128256, (33,), device=DEVICE)
    assert_same(gather_logprobs(logprobs, ids, n), reference.gather_logprobs(logprobs, ids, n))
