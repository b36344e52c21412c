"""Writing into leaves, out of place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference.writes import copy_blocks, write, zero_blocks
from tests.laws import assert_pure

BLOCKS = 6


def cache() -> torch.Tensor:
    return torch.arange(BLOCKS * 2 * 3, dtype=torch.float32).view(BLOCKS, 2, 3) + 1


@given(places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), unique=True, max_size=8))
def test_write_changes_the_named_places_and_no_other(places: list[tuple[int, int]]) -> None:
    """Afterwards the named places hold their values, all others what they held, and the table given is unchanged."""
    table = torch.arange(20, dtype=torch.int32).view(4, 5)
    rows, columns = (torch.tensor([p[i] for p in places], dtype=torch.int64) for i in range(2))
    values = -1 - torch.arange(len(places))
    new = assert_pure(write, table, (rows, columns), values)
    expected = table.tolist()
    for (row, column), value in zip(places, values.tolist(), strict=True):
        expected[row][column] = value
    assert new.tolist() == expected
    assert new.dtype == table.dtype


def test_write_takes_whole_rows() -> None:
    """Fewer indices than dimensions name rows."""
    new = write(torch.zeros(3, 2), (torch.tensor([2, 0]),), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert new.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]


@given(data=st.data())
def test_copy_reads_all_sources_before_it_writes(data: st.DataObject) -> None:
    """Every target holds what its source held before, even if the source is itself a target."""
    target = data.draw(st.lists(st.integers(1, BLOCKS - 1), unique=True))
    source = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=len(target), max_size=len(target)))
    kv = cache()
    padding = data.draw(st.integers(0, 3))
    as_tensor = [torch.tensor(x + [0] * padding, dtype=torch.int32) for x in (source, target)]
    new = assert_pure(copy_blocks, kv, *as_tensor)
    expected = {i: kv[i] for i in range(BLOCKS)} | {t: kv[s] for s, t in zip(source, target, strict=True)}
    assert all(torch.equal(new[i], expected[i]) for i in range(BLOCKS))


@given(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=8))
def test_zero_clears_the_named_blocks_alone(blocks: list[int]) -> None:
    """Named blocks are 0, the others keep every bit."""
    kv = cache()
    new = assert_pure(zero_blocks, kv, torch.tensor(blocks, dtype=torch.int32))
    for i in range(BLOCKS):
        assert torch.equal(new[i], torch.zeros_like(kv[i]) if i in blocks else kv[i])
