"""Random bits: those of the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.philox import uniforms  # isort: skip

pytestmark = quiet

INT64 = st.integers(-(2**63), 2**63 - 1)
ROW = st.tuples(INT64, INT64, st.integers(0, 2**28 - 1))


@few(10)
@given(st.lists(ROW, min_size=1, max_size=3), st.integers(0, 15), st.sampled_from([1, 5, 2048, 2051]))
def test_bits_equal_the_reference(rows: list[tuple[int, int, int]], purpose: int, width: int) -> None:
    seed, stream, index = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    arguments = (seed, stream, index.to(torch.int32))
    ours = uniforms(*arguments, purpose=purpose, width=width)
    assert equal(ours, reference.uniforms(*arguments, purpose=purpose, width=width))
