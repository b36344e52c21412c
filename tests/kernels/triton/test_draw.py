"""Choosing tokens: ties to the lowest id, NaN first, -inf never."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.draw import draw, greedy, scale_by_temperature  # isort: skip

pytestmark = quiet

LOGIT = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 2.0])
STRANGE = st.sampled_from([-math.inf, -0.0, 0.0, math.inf, math.nan])


@few(20)
@given(st.lists(LOGIT | STRANGE, min_size=1, max_size=9))
def test_greedy_takes_the_lowest_of_the_largest(row: list[float]) -> None:
    """Equal logits, -0 and 0 among them, go by id; NaN counts as the largest."""
    logits = torch.tensor([row], device=DEVICE)
    assert equal(greedy(logits), reference.greedy(logits))


@pytest.mark.parametrize("vocab", [1, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_many_chunks(vocab: int, dtype: torch.dtype) -> None:
    """Ties across chunks go by id too; rows need not follow each other closely."""
    logits = (torch.randn(3, vocab + 5, device=DEVICE) * 2).round().to(dtype)[:, :vocab]
    assert equal(greedy(logits), reference.greedy(logits))


@few(10)
@given(st.lists(LOGIT, min_size=1, max_size=9), st.integers(0, 2**31))
def test_draw_equals_reference(row: list[float], seed: int) -> None:
    """The race of exponential clocks has the same winner; -inf wins only where all are."""
    logits = torch.tensor([row, row], device=DEVICE)
    clocks = -torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)).log().to(DEVICE)
    assert equal(draw(logits, clocks), reference.draw(logits, clocks))


@few(10)
@given(st.lists(LOGIT | STRANGE, min_size=1, max_size=9), st.sampled_from([0.0, 1e-4, 0.7, 1.0, 3.0]))
def test_temperature_equals_reference(row: list[float], temperature: float) -> None:
    """Greedy rows and temperature 1 keep every bit; an infinite or NaN peak is not taken away."""
    logits = torch.tensor([row, row[::-1]], device=DEVICE)
    temperatures = torch.tensor([temperature, 1.0], device=DEVICE)
    ours, expected = (
        scale_by_temperature(logits, temperatures),
        reference.scale_by_temperature(logits, temperatures),
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_draws_follow_the_distribution() -> None:
    """Of 65,536 draws from a softmax over 8 ids, each id gets its share within five standard deviations."""
    logits = torch.randn(8, device=DEVICE)
    rows = torch.arange(2**16, device=DEVICE)
    zeros = torch.zeros_like(rows)
    clocks = -reference.uniforms(zeros, rows, zeros, purpose=0, width=8).log()
    counts = draw(logits.expand(len(rows), 8), clocks).bincount(minlength=8).double().cpu()
    share = logits.double().softmax(0).cpu()
    deviation = (len(rows) * share * (1 - share)).sqrt()
    assert ((counts - len(rows) * share).abs() < 5 * deviation).all()


@pytest.mark.gpu
@pytest.mark.parametrize("reqs", [1, 64])
def test_large_rows(reqs: int) -> None:
    logits = torch.randn(reqs, 128256, device=DEVICE)
    assert equal(greedy(logits), reference.greedy(logits))
    temperatures = torch.full((reqs,), 0.7, device=DEVICE)
    expected = (logits.double() - logits.double().amax(-1, keepdim=True)) / 0.7
    torch.testing.assert_close(
        scale_by_temperature(logits, temperatures).double(), expected, rtol=1e-6, atol=1e-6
    )
