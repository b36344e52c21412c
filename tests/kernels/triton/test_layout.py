"""Which request a token belongs to: equal to the reference, whatever the lengths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.layout import ragged_index  # isort: skip

pytestmark = quiet


@few(20)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 150))
def test_equals_reference(lengths: list[int], padding: int) -> None:
    """Requests without tokens own none; padding counts on in the last request."""
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    num_tokens = sum(lengths) + padding
    assert equal(ragged_index(starts, num_tokens), reference.ragged_index(starts, num_tokens))
