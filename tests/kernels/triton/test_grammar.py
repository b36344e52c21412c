"""Grammar masks: the reference's, in the storage of the logits."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from purestep.kernels.reference import reference
from tests.kernels.test_grammar import cases, packed
from tests.kernels.triton.device import DEVICE, NARROW, few, quiet
from tests.laws import equal

from purestep.kernels.triton.grammar import apply_grammar_bitmask  # isort: skip

pytestmark = quiet


@few(25)
@given(cases())
def test_equals_reference(case: tuple[Tensor, list[list[bool]], list[int]]) -> None:
    """To the bit, NaN and infinities included: rows of a wider table, masks shared, unused and in any order."""
    logits, masks, mask_of_row = case
    table = torch.full((len(logits), logits.shape[1] + 3), 7.0, device=DEVICE)
    table[:, : logits.shape[1]] = logits.to(DEVICE)
    own = table[:, : logits.shape[1]]
    arguments = packed(masks).to(DEVICE), torch.tensor(mask_of_row, dtype=torch.int32, device=DEVICE)
    expected = reference.apply_grammar_bitmask(own.clone(), *arguments)
    ours = apply_grammar_bitmask(own, *arguments)
    assert ours.data_ptr() == own.data_ptr() and equal(ours, expected)
    assert (table[:, logits.shape[1] :] == 7.0).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_logits(dtype: torch.dtype) -> None:
    logits = torch.arange(5 * 4200, device=DEVICE).reshape(5, 4200).to(dtype)
    bitmask = torch.full((2, 132), 0x55555555, dtype=torch.int32, device=DEVICE)
    bitmask[1] = -2
    mask_of_row = torch.tensor([1, -1, 0, 0, -1], device=DEVICE)
    expected = reference.apply_grammar_bitmask(logits.clone(), bitmask, mask_of_row)
    assert equal(apply_grammar_bitmask(logits, bitmask, mask_of_row), expected)


def test_no_rows() -> None:
    nothing = torch.zeros(0, 40, device=DEVICE)
    mask_of_row = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert (
        apply_grammar_bitmask(nothing, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), mask_of_row)
        is nothing
    )
