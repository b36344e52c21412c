"""Numbers that launches are made of."""

from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.triton.device import quiet

import triton  # isort: skip
from purestep.kernels.triton.shared import cdiv, next_power_of_2  # isort: skip

pytestmark = quiet


@given(st.integers(1, 2**31), st.integers(1, 2**20))
def test_they_are_triton_s_own(number: int, by: int) -> None:
    """Without what it costs that kernels may call those too."""
    assert (next_power_of_2(number), cdiv(number, by)) == (
        triton.next_power_of_2(number),
        triton.cdiv(number, by),
    )
    assert (next_power_of_2(0), cdiv(0, by)) == (1, 0)
