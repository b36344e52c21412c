"""Writing in place gives what the reference gives out of place, in the storage that was given."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.cpu import writes
from purestep.kernels.reference import reference
from purestep.kernels.reference.scales import FP8
from tests.laws import equal
from tests.profiles import examples

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


@given(data=st.data())
def test_blocks_of_eight_bits_are_copied_and_zeroed(data: st.DataObject) -> None:
    """As the reference does it, in the storage that was given; every bit of every number, NaN too."""
    blocks = data.draw(st.permutations(range(BLOCKS)))
    source, target, zeroed = torch.tensor(blocks[:3]), torch.tensor(blocks[1:4]), torch.tensor(blocks[4:])
    kv = torch.arange(BLOCKS * 64, dtype=torch.int32).to(torch.uint8).view(BLOCKS, 2, 4, 2, 4).view(FP8)
    want = reference.zero_blocks(reference.copy_blocks(kv, source, target), zeroed)
    assert writes.copy_blocks(kv, source, target) is kv
    assert writes.zero_blocks(kv, zeroed) is kv
    assert equal(kv, want)


@examples(0.3)
@given(order=st.permutations([1, 2, 3]), blocks=st.permutations(range(1, BLOCKS)))
def test_blocks_are_copied_and_zeroed_in_any_memory_order(order: list[int], blocks: list[int]) -> None:
    """The same entries as in the usual order, in the storage that was given."""
    plain = torch.randn(BLOCKS, 2, 3, 4)
    kv = plain.clone().permute(0, *order).contiguous().permute(0, *(1 + order.index(d) for d in (1, 2, 3)))
    source, target, zeroed = torch.tensor(blocks[:3]), torch.tensor(blocks[1:4]), torch.tensor(blocks[4:])
    assert equal(kv, plain)
    assert writes.copy_blocks(kv, source, target) is kv
    assert writes.zero_blocks(kv, zeroed) is kv
    assert equal(kv, reference.zero_blocks(reference.copy_blocks(plain, source, target), zeroed))


def test_keys_and_values_in_another_memory_order_are_refused() -> None:
    """And nothing is written."""
    kv = torch.zeros(BLOCKS, 2, 2, 3, 4).transpose(2, 3)
    with pytest.raises(ValueError, match="no memory order but NHD"):
        writes.write_kv(kv, torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.tensor([4]))
    assert not kv.any()
