"""Outputs on their way to the host: what lies in one allocation is found again in a copy of it."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.state.pending import ToHost, like
from tests.profiles import examples


@examples(0.5)
@given(st.integers(1, 9), st.integers(1, 3))
def test_a_tensor_is_found_in_a_copy_of_its_allocation(count: int, step: int) -> None:
    data = torch.randint(0, 2, (10 * count,), dtype=torch.uint8)
    words = data[: 8 * count].view(torch.int32)
    leaves = (*words.split(count), data[8 * count :].view(torch.bool), words[::step], words.view(2, count).T)

    copied = data.clone()
    data_before = [leaf.clone() for leaf in leaves]
    found = [like(leaf, copied) for leaf in leaves]

    for leaf, before in zip(found, data_before, strict=True):
        assert leaf.dtype == before.dtype and torch.equal(leaf, before)
        assert leaf.untyped_storage().data_ptr() == copied.untyped_storage().data_ptr()


def test_a_tree_comes_to_the_host_as_it_was_when_it_was_sent() -> None:
    a, b = torch.arange(3), torch.tensor([True, False])
    on_its_way = ToHost({"a": (a,), "b": b})
    a.zero_()

    result = on_its_way.result()

    assert np.array_equal(result["a"][0], [0, 1, 2]) and np.array_equal(result["b"], [True, False])
