"""Which request a token belongs to, and what rows say: equal to the reference, whatever the lengths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.layout import ragged_index, take_rows  # isort: skip

pytestmark = quiet


@few(20)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 150))
def test_equals_reference(lengths: list[int], padding: int) -> None:
    """Requests without tokens own none; padding counts on in the last request."""
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    num_tokens = sum(lengths) + padding
    assert equal(ragged_index(starts, num_tokens), reference.ragged_index(starts, num_tokens))


@few(10)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 1500))
def test_rows_are_the_reference_s(rows: list[int], width: int) -> None:
    """Of tables and columns, of integers and floats, and of a table that is a part of another."""
    wanted = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    table = torch.arange(5 * 1600, dtype=torch.int32, device=DEVICE).view(5, 1600)
    tables = (table[:, :width], table[0], table[2, 100:], torch.rand(5, 3, device=DEVICE))
    for count in (1, 4):
        assert equal(take_rows(tables[:count], wanted), reference.take_rows(tables[:count], wanted))
    assert equal(take_rows((table.long(),), wanted), reference.take_rows((table.long(),), wanted))
