"""Outputs on their way to the host: what lies in one allocation is found again in a copy of it."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.state.pending import Place, Sender
from tests.profiles import examples


@examples(0.5)
@given(st.integers(1, 9), st.integers(1, 3))
def test_a_tensor_is_found_in_a_copy_of_its_allocation(count: int, step: int) -> None:
    data = torch.randint(0, 2, (10 * count,), dtype=torch.uint8)
    words = data[: 8 * count].view(torch.int32)
    leaves = (*words.split(count), data[8 * count :].view(torch.bool), words[::step], words.view(2, count).T)

    copied = data.numpy().copy()

    for leaf in leaves:
        found = Place.of(leaf).within(copied)
        assert found.dtype == leaf.numpy().dtype and np.array_equal(found, leaf.numpy())
        assert np.shares_memory(found, copied)


def test_a_tree_comes_to_the_host_as_it_was_when_it_was_sent() -> None:
    a, b = torch.arange(3), torch.tensor([True, False])
    sender = Sender({"a": (a, None), "b": b})

    first = sender.send()
    a.zero_()
    second = sender.send()
    b.zero_()

    assert first.result()["a"][1] is None
    assert np.array_equal(first.result()["a"][0], [0, 1, 2]) and np.array_equal(
        second.result()["a"][0], [0, 0, 0]
    )
    assert np.array_equal(first.result()["b"], [True, False]) and np.array_equal(
        second.result()["b"], [True, False]
    )


def test_memory_is_used_again_once_a_copy_was_taken_in_and_not_before() -> None:
    a = torch.arange(3)
    sender = Sender([a])
    before = sender.send()
    (taken,) = before.result()
    a.add_(1)
    waiting, others = sender.send(), sender.send()
    a.add_(1)
    (last,) = sender.send().result()
    assert [x.tolist() for x in (taken, *waiting.result(), *others.result(), last)] == [
        [0, 1, 2],
        [1, 2, 3],
        [1, 2, 3],
        [2, 3, 4],
    ]
    assert before.result()[0] is not None and np.array_equal(before.result()[0], [0, 1, 2])
