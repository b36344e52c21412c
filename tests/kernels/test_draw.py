"""Temperature, the greedy choice and the random draw."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference.draw import draw, greedy, scale_by_temperature, temperature_offset
from purestep.kernels.reference.philox import uniforms
from tests.laws import equal

INF = math.inf
LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=8)
TEMPERATURE = st.floats(-30, 0.5).map(lambda exponent: 10.0**exponent)


def scaled(row: list[float], temperature: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return scale_by_temperature(torch.tensor([row], dtype=dtype), torch.tensor([temperature]))[0]


def exponentials(num_rows: int, width: int, seed: int = 0) -> Tensor:
    """One row of noise per stream, as a sampling stage makes it."""
    rows = torch.arange(num_rows)
    return -uniforms(torch.full_like(rows, seed), rows, torch.zeros_like(rows), purpose=0, width=width).log()


@given(LOGITS, TEMPERATURE, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_low_temperature_tends_to_greedy(row: list[float], temperature: float, dtype: torch.dtype) -> None:
    """From 3 down to 1e-30 there is no band that breaks, in half precision either.

    No value overflows upwards or is NaN, and where the largest leads by 50 temperatures it is drawn.
    """
    logits = torch.tensor([row], dtype=dtype)
    ours = scaled(row, temperature, dtype)
    assert not ours.isnan().any() and not ours.isposinf().any()
    assert ours.softmax(-1).isfinite().all()
    first, second = logits[0].to(torch.float64).sort(descending=True)[0][:2].tolist()
    if first - second > 50 * temperature and temperature >= 1e-5:
        token = draw(ours[None].float(), exponentials(1, len(row)))
        assert int(token) == int(greedy(logits)) == int(ours.argmax())


@given(LOGITS, st.floats(1e-5, 10, exclude_min=True))
def test_temperature_divides(row: list[float], temperature: float) -> None:
    """The distribution is that of logits / temperature, and with the offset so are the values."""
    logits, column = torch.tensor([row]), torch.tensor([temperature])
    wide = logits.to(torch.float64) / column.to(torch.float64)
    ours = scale_by_temperature(logits, column)
    torch.testing.assert_close(ours.softmax(-1), wide.softmax(-1).float(), rtol=2e-4, atol=1e-7)
    reported = ours + temperature_offset(logits, column)
    largest = float(wide.abs().max())
    torch.testing.assert_close(reported, wide.float(), rtol=0, atol=4e-7 * largest + 1e-30)


@given(st.lists(st.sampled_from([-INF, -0.0, 0.0, 1.0, 60.0, INF, math.nan]), min_size=1, max_size=6))
def test_neutral_temperature_keeps_every_bit(row: list[float]) -> None:
    """Temperature 1, and greedy requests, which no temperature concerns."""
    for temperature in (1.0, 0.0, 9e-6):
        assert equal(scaled(row, temperature), torch.tensor(row))
        assert not temperature_offset(torch.tensor([row]), torch.tensor([temperature])).any()


@given(LOGITS, st.sampled_from([INF, math.nan]), TEMPERATURE)
def test_neighbours_of_a_broken_row_stay_exact(row: list[float], broken: float, temperature: float) -> None:
    logits = torch.tensor([row, [broken] * len(row), [-INF] * len(row)])
    ours = scale_by_temperature(logits, torch.full((3,), temperature))
    assert equal(ours[0], scaled(row, temperature))
    assert ours[2].isneginf().all()
    assert not ours[1].isfinite().any()


@given(st.lists(st.sampled_from([-INF, 0.0, 1.0, 2.0]), min_size=1, max_size=8))
def test_greedy_takes_the_lowest_of_equals(row: list[float]) -> None:
    assert int(greedy(torch.tensor([row]))) == row.index(max(row))


@given(LOGITS, st.integers(0, 1000))
def test_draw_is_the_race_of_exponential_clocks(row: list[float], seed: int) -> None:
    """The token drawn has the largest probability / exponential, as upstream writes it, up to a rounding."""
    logits, noise = torch.tensor([row]), exponentials(1, len(row), seed)
    ratio = logits.to(torch.float64).softmax(-1) / noise.to(torch.float64)
    assert float(ratio[0, int(draw(logits, noise))]) >= float(ratio.max()) * (1 - 1e-5)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 streams of one seed: equal prompts have noise of their own."""
    num_draws, logits = 20_000, torch.tensor([1.5, -INF, 0.0, 0.7, -2.0, 0.7])
    ids = draw(logits.expand(num_draws, -1), exponentials(num_draws, len(logits), seed=3))
    counts = torch.bincount(ids, minlength=len(logits)).to(torch.float64)
    expected = logits.to(torch.float64).softmax(-1) * num_draws
    assert counts[1] == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 18.5  # 0.1 % of samples of 4 degrees of freedom lie above


def test_equal_prompts_with_one_seed_draw_apart() -> None:
    """64 equal rows: pairs of draws of neighbours are as frequent as independence has it."""
    logits, rows = torch.zeros(4), 64
    pairs = torch.zeros(16)
    for seed in range(40):
        ids = draw(logits.expand(rows, -1), exponentials(rows, 4, seed))
        pairs += torch.bincount(ids[::2] * 4 + ids[1::2], minlength=16)
    expected = pairs.sum() / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 0.1 % at 15 degrees of freedom


@pytest.mark.parametrize("noise", [0.0, 1e-45, 1.0, INF])
def test_banned_token_is_never_drawn(noise: float) -> None:
    """Not even with the noise at its extremes."""
    logits = torch.tensor([[-INF, 0.0, -INF]])
    exponential = torch.tensor([[noise, 1.0, noise]])
    assert int(draw(logits, exponential)) == 1
