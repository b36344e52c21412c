"""Cutting the tail without a sort: the rule of the reference, ties included, however the cut is looked for."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.triton.cases import cut_in_float64, wrong_side
from tests.kernels.triton.device import DEVICE, few, quiet

from purestep.kernels.triton.truncate import truncate, truncate_by  # isort: skip

pytestmark = quiet

INF = math.inf
WHOLE = st.lists(st.sampled_from([-INF, 0.0, 1.0, 2.0, 3.0]), min_size=12, max_size=12)
FLOATS = st.lists(st.floats(-50, 50, width=32), min_size=12, max_size=12)
CUT = st.tuples(
    st.sampled_from([-1, 0, 1, 2, 3, 5, 11, 12, 17]),
    st.sampled_from([0.01, 0.2, 0.35, 0.5, 0.75, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.03, 0.1, 0.3, 0.9, 1.0]),
)
# Sub-blocks and lists so small that cuts are found in lists, and in whole rows where lists overflow.
WAYS = [(2, 4), (2, 16), (4, 8), (128, 2048)]


def run(logits: Tensor, cuts: list[tuple[int, float, float]], way: tuple[int, int]) -> Tensor:
    top_k, top_p, min_p = (torch.tensor(column, device=DEVICE) for column in zip(*cuts, strict=True))
    return truncate_by(logits.to(DEVICE), top_k.int(), top_p, min_p, sub_block=way[0], capacity=way[1]).cpu()


def assert_cut(ours: Tensor, logits: Tensor, kept: Tensor) -> None:
    """Kept logits keep every bit, the others are -inf."""
    assert torch.equal(ours.view(torch.int32), logits.masked_fill(~kept, -INF).view(torch.int32))


@few(25)
@given(WHOLE | FLOATS, CUT, st.sampled_from(WAYS))
def test_equals_the_rule(row: list[float], cut: tuple[int, float, float], way: tuple[int, int]) -> None:
    """min-p, then the k largest and their ties (none for k = 1), then just enough mass, lower ids first."""
    assume(max(row) > -INF)
    logits = torch.tensor([row])
    kept, margin = cut_in_float64(logits[0], *cut)
    assume(margin > 1e-5)
    assert_cut(run(logits, [cut], way)[0], logits[0], kept & (logits[0] > -INF))


@pytest.mark.parametrize("way", [(8, 64), (128, 2048)])
@pytest.mark.parametrize("levels", [0, 4])
def test_longer_rows(way: tuple[int, int], levels: int) -> None:
    """Rows of 700, with hundreds of ties at every value or none, under every kind of cut."""
    logits = torch.randn(9, 700) * 3
    if levels:
        logits = (logits / levels).round()
    cuts = [
        (0, 0.9, 0.0),
        (1, 0.5, 0.0),
        (5, 1.0, 0.1),
        (50, 0.8, 0.0),
        (0, 0.3, 0.05),
        (3, 0.7, 0.0),
        (650, 0.95, 0.0),
    ]
    cuts += [(700, 0.99, 0.3), (0, 1.0, 0.0)]
    ours = run(logits, cuts, way)
    for own, row, cut in zip(ours, logits, cuts, strict=True):
        kept, margin = cut_in_float64(row, *cut)
        if margin > 1e-6:
            assert_cut(own, row, kept)


def test_strange_rows_are_left_to_the_reference_s_rule() -> None:
    """NaN keeps the row; an infinite peak has no masses to compare, so only top-k cuts; all -inf stays."""
    logits = torch.randn(5, 40)
    logits[0, 3], logits[1, 5], logits[2], logits[3, ::2], logits[4, 1] = math.nan, INF, -INF, -INF, -0.0
    for cut in [(5, 0.5, 0.1), (0, 0.5, 0.0), (1, 1.0, 0.0), (30, 0.9, 0.0)]:
        top_k, top_p, min_p = (torch.full((5,), value, device=DEVICE) for value in cut)
        ours = truncate(logits.to(DEVICE), top_k, top_p, min_p).cpu()
        expected = reference.truncate(logits, top_k.cpu(), top_p.cpu(), min_p.cpu())
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_several_infinite_logits(k: int, p: float) -> None:
    """They are equal: top-k keeps all of them, top-p has no masses to compare."""
    logits = torch.randn(1, 256)
    logits[0, [3, 100, 200]] = INF
    ours = run(logits, [(k, p, 0.0)], (128, 2048))
    expected = reference.truncate(logits, torch.tensor([k]), torch.tensor([p]), torch.tensor([0.0]))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("offset", [1e3, 3e4])
def test_rows_far_from_zero(offset: float) -> None:
    """Where floats are coarse, and their keys near each other."""
    logits = torch.randn(3, 5000) + offset
    cuts = [(50, 1.0, 0.0), (50, 0.8, 0.0), (0, 0.9, 0.0)]
    for own, row, cut in zip(run(logits, cuts, (128, 2048)), logits, cuts, strict=True):
        kept, margin = cut_in_float64(row, *cut)
        assert margin < 1e-6 or torch.equal(own.isfinite(), kept)


@pytest.mark.parametrize("way", [(2, 4), (128, 2048)])
def test_neighbouring_floats_are_told_apart(way: tuple[int, int]) -> None:
    """Of twelve floats, each the next one after another, exactly k stay."""
    logits = torch.ones(12).view(torch.int32).add(torch.randperm(12).int()).view(torch.float32)
    for k in range(1, 12):
        ours = run(logits[None], [(k, 1.0, 0.0)], way)[0]
        assert torch.equal(ours.sort(descending=True).values[:k], logits.sort(descending=True).values[:k])
        assert ours.isfinite().sum() == k


def test_ties_at_the_mass() -> None:
    """Of eight equal logits p = 0.5 keeps the four lowest ids, which meet it exactly; p = 0.51 a fifth."""
    ours = run(torch.zeros(2, 8), [(0, 0.5, 0.0), (0, 0.51, 0.0)], (2, 16))
    assert ours.isfinite().tolist() == [[True] * 4 + [False] * 4, [True] * 5 + [False] * 3]


@pytest.mark.parametrize(("top", "p"), [(12.0, 0.99999), (12.0, 0.9999), (11.76, 0.99997)])
def test_many_ties_beside_one_that_weighs_more(top: float, p: float) -> None:
    """What is to go is less than a sum of all of them is off by, if it is not taken from the sum itself."""
    row = torch.zeros(128000)
    row[0] = top
    kept, _ = cut_in_float64(row, 0, float(torch.tensor(p)), 0.0)
    ours = run(row[None], [(0, p, 0.0)], (128, 2048))[0].isfinite()
    assert (ours != kept).sum() <= 1


@pytest.mark.parametrize("p", [0.3, 0.9, 0.999])
def test_rows_of_which_most_is_masked(p: float) -> None:
    """Whole stretches of -inf, as a grammar leaves them, weigh nothing."""
    logits = torch.randn(2, 13000) * 2
    logits[0, :9000], logits[1, 100:12900] = -INF, -INF
    ours = run(logits, [(0, p, 0.0)] * 2, (128, 2048))
    for own, row in zip(ours, logits, strict=True):
        kept, margin = cut_in_float64(row, 0, p, 0.0)
        assert margin < 1e-6 or torch.equal(own.isfinite(), kept & (row > -INF))


@pytest.mark.gpu
@pytest.mark.parametrize("reqs", [1, 64])
@pytest.mark.parametrize(
    "cut", [(50, 0.95, 0.0), (0, 0.95, 0.0), (0, 0.3, 0.0), (2000, 1.0, 0.0), (0, 1.0, 0.02)]
)
@pytest.mark.parametrize("sharpness", [1.0, 5.0])
def test_large_rows(reqs: int, cut: tuple[int, float, float], sharpness: float) -> None:
    """The number of ids kept is that of a float64 sort, up to those within rounding of the cut."""
    logits = torch.randn(reqs, 128256, device=DEVICE) * sharpness
    top_k, top_p, min_p = (torch.full((reqs,), value, device=DEVICE) for value in cut)
    ours = truncate(logits, top_k, top_p, min_p)
    for own, row in zip(ours, logits, strict=True):
        count, mass = wrong_side(own, row, cut)
        assert count <= 1 or mass < 1e-6
        assert torch.equal(own[own.isfinite()], row[own.isfinite()])
