"""A list of what lies around a cut: the cut is in it, and what lies below it is weighed."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.triton.cases import cut_in_float64
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

import purestep.kernels.triton.truncate as truncate_module  # isort: skip

pytestmark = quiet

ROWS = st.builds(
    lambda seed, sharpness, offset, width: (
        torch.randn(width, generator=torch.Generator().manual_seed(seed)) * sharpness + offset
    ),
    st.integers(0, 2**31),
    st.sampled_from([0.01, 0.5, 2.0, 6.0]),
    st.sampled_from([0.0, -1000.0, 77.0]),
    st.sampled_from([2000, 5000]),
)


def cut(row: Tensor, p: float, min_p: float, *, capacity: int) -> Tensor:
    """The row as top-p and min-p leave it, with a list of so many entries."""
    top_k, top_p, ratio = (torch.tensor([x], device=DEVICE) for x in (0, p, min_p))
    ours = truncate_module.truncate_by(
        row[None].to(DEVICE), top_k.int(), top_p, ratio, sub_block=128, capacity=capacity
    )
    return ours[0].cpu()


def listed(row: Tensor, p: float, *, capacity: int) -> list[tuple[int, float]]:
    """How many entries were listed, and what those below them weigh, each time that a list was made."""
    own, found = truncate_module.list_around_cut, list[tuple[int, float]]()

    def spy(*arguments: Any) -> Any:
        count, under = own(*arguments)
        found.append((int(count.handle.data.item()), float(under.handle.data.item())))
        return count, under

    with mock.patch.object(truncate_module, "list_around_cut", spy):
        cut(row, p, 0.0, capacity=capacity)
    return found


looks_inside = pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks into a function that is compiled on a GPU"
)


@looks_inside
@few(25)
@given(ROWS, st.sampled_from([0.05, 0.5, 0.9, 0.99, 0.9999]))
def test_the_cut_lies_in_the_list(row: Tensor, p: float) -> None:
    ((count, under),) = listed(row, p, capacity=16)
    weights = (row.double() - row.max().double()).exp()
    order = row.argsort()
    below = torch.cat((torch.zeros(1, dtype=torch.float64), weights[order].cumsum(0)))
    first = int((below - under).abs().argmin())  # so many lie below the list
    assert below[first].item() == pytest.approx(under, rel=1e-5, abs=1e-12)
    kept, _ = cut_in_float64(row, 0, p, 0.0)
    lowest_kept = len(row) - int(kept.sum())
    assert first <= lowest_kept < first + count
    assert count <= max(0.02 * len(row), 16)


@looks_inside
@pytest.mark.parametrize("gap", [2.0, 5.0, 15.0])
@pytest.mark.parametrize("beyond", [-0.02, -0.002, 0.002, 0.01])
def test_nothing_between_two_heaps_of_entries_is_listed(gap: float, beyond: float) -> None:
    """Where top-p cuts about as much as the lower heap weighs: a little less, or a little more."""
    generator = torch.Generator().manual_seed(0)
    heaps = torch.randn(4000, generator=generator) * 0.02 - gap, torch.randn(500, generator=generator) * 0.02
    row = torch.cat(heaps)[torch.randperm(4500, generator=generator)]
    weights = (row.double() - row.max().double()).exp()
    share = weights[row < -gap / 2].sum() / weights.sum()
    p = float(1 - share * (1 + beyond))
    ((count, _),) = listed(row, p, capacity=64)
    assert 0 < count <= 64
    kept, _ = cut_in_float64(row, 0, float(torch.tensor(p)), 0.0)
    differing = cut(row, p, 0.0, capacity=64).isfinite() != kept
    assert weights[differing].sum() <= 1e-6 * weights.sum()


@looks_inside
@pytest.mark.parametrize("short_of", [9e-4, 2e-4, 5e-5])
@pytest.mark.parametrize("above", [torch.linspace(-0.9505, -0.9485, 3000), torch.full((20,), -0.95)])
def test_entries_at_the_border_of_a_bin(short_of: float, above: Tensor) -> None:
    """A hair below it, and rounded into the bin above; most of them are to go."""
    border = torch.nextafter(torch.tensor(-1.0), torch.tensor(-2.0))
    row = torch.cat([border.expand(3000), above, torch.zeros(3000)])
    weights = row.double().exp()
    p = float(1 - weights[:3000].sum() * (1 - short_of) / weights.sum())
    ((count, _),) = listed(row, p, capacity=64)
    assert count >= 3000
    kept, _ = cut_in_float64(row, 0, float(torch.tensor(p)), 0.0)
    assert (cut(row, p, 0.0, capacity=4096).isfinite() != kept).sum() <= 1


@few(12)
@given(ROWS, st.sampled_from([0.3, 0.9, 0.99]), st.sampled_from([0.0, 0.02]))
def test_flat_rows_are_cut_where_the_rule_cuts_them(row: Tensor, p: float, min_p: float) -> None:
    """With lists that are too short for what stays."""
    kept, margin = cut_in_float64(row, 0, p, min_p)
    ours = cut(row, p, min_p, capacity=64)
    if margin > 1e-6:
        assert equal(ours, row.masked_fill(~kept, -torch.inf))


def test_more_ties_than_the_list_holds() -> None:
    """Lower ids first, as ever."""
    ours = cut(torch.zeros(3000), 0.5, 0.0, capacity=256)
    assert ours.isfinite().nonzero().flatten().tolist() == list(range(1500))
