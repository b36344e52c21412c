"""Writing in place gives what the reference gives out of place, in the storage that was given."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.cpu import writes
from purestep.kernels.reference import reference
from tests.laws import equal

BLOCKS = 6


def cache() -> torch.Tensor:
    return torch.arange(BLOCKS * 2 * 3, dtype=torch.float32).view(BLOCKS, 2, 3) + 1


@given(places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), unique=True, max_size=8))
def test_write(places: list[tuple[int, int]]) -> None:
    """Named places are written, with values brought into the table's type; indices may be int32."""
    table = torch.arange(20, dtype=torch.int32).view(4, 5)
    indices = tuple(torch.tensor([p[i] for p in places], dtype=torch.int32) for i in range(2))
    values = -1 - torch.arange(len(places))
    want = reference.write(table, tuple(index.long() for index in indices), values)
    got = writes.write(table, indices, values)
    assert got is table
    assert equal(got, want)


@given(data=st.data())
def test_copy_blocks(data: st.DataObject) -> None:
    """All sources are read before a target is written, so chains and cycles of copies are safe."""
    target = data.draw(st.lists(st.integers(1, BLOCKS - 1), unique=True))
    source = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=len(target), max_size=len(target)))
    padding = [0] * data.draw(st.integers(0, 3))
    arguments = [torch.tensor(x + padding, dtype=torch.int32) for x in (source, target)]
    kv = cache()
    want = reference.copy_blocks(kv, *arguments)
    got = writes.copy_blocks(kv, *arguments)
    assert got is kv
    assert equal(got, want)


@given(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=8))
def test_zero_blocks(blocks: list[int]) -> None:
    """Named blocks are 0, the others keep every bit."""
    kv, named = cache(), torch.tensor(blocks, dtype=torch.int32)
    want = reference.zero_blocks(kv, named)
    got = writes.zero_blocks(kv, named)
    assert got is kv
    assert equal(got, want)
