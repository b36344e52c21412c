"""Writes in place: the reference's result, in the argument's storage, and nothing else touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.reference.attention import write_kv as write_kv_by_reference
from tests.kernels.triton.device import DEVICE, few, quiet
from tests.laws import equal

from purestep.kernels.triton.writes import copy_blocks, embed, write, write_kv, zero_blocks  # isort: skip

pytestmark = quiet


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def table() -> Tensor:
    return torch.arange(60, dtype=torch.int32, device=DEVICE).view(6, 10)


@pytest.mark.parametrize(
    ("indices", "shape"),
    [
        ((ints(1, 4),), (2, 10)),  # rows
        ((ints(1, 4), ints(2, 2)), (2,)),  # entries
        ((torch.arange(6, device=DEVICE), ints(1, 3)[:, None]), (2, 6)),  # columns of the ledger, row by row
        ((torch.arange(6, device=DEVICE)[:, None], ints(3, 9, 0)[None]), (6, 3)),  # and column by column
        ((torch.tensor(3, device=DEVICE),), (10,)),  # one row by a scalar
        ((ints(),), (0, 10)),  # nothing
    ],
)
def test_write_equals_reference(indices: tuple[Tensor, ...], shape: tuple[int, ...]) -> None:
    """Every form of indices that stages use, with values of another type and stride, in the table's own storage."""
    values = torch.randint(1000, (*shape, 2), device=DEVICE)[..., 0]
    ours = table()
    result = write(ours, indices, values)
    assert result is ours
    assert equal(ours, reference.write(table(), indices, values))


def test_write_leaves_out_what_lies_outside() -> None:
    ours = write(table(), (ints(-1, 6, 2), ints(0, 0, 10)), ints(7, 7, 7))
    assert equal(ours, table())


def test_write_refuses_entries_in_pieces() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        write(table()[:, ::2], (ints(1),), ints(0, 0, 0, 0, 0)[None])


@few(8)
@given(st.permutations(range(1, 9)), st.integers(0, 4), st.booleans())
def test_copies_read_before_they_write(targets: list[int], count: int, in_columns: bool) -> None:
    """Chains such as 1 to 2 and 2 to 3 copy the old contents; padding copies the null block onto itself."""
    kv = torch.randn(9, 2, 4, 2, 32, device=DEVICE).to(torch.bfloat16)
    source = ints(*[targets[-1], *targets][:count], 0, 0)  # each but the first is the target before it
    target = ints(*targets[:count], 0, 0)
    if in_columns:  # as a plan has them: pairs, one after the other
        source, target = torch.stack([source, target], dim=1).unbind(1)
    ours = kv.clone()
    assert copy_blocks(ours, source, target) is ours
    assert equal(ours, reference.copy_blocks(kv, source.long(), target.long()))


def test_zeroed_blocks_are_zero() -> None:
    kv = torch.full((5, 2, 4, 2, 24), float("nan"), device=DEVICE)
    ours = kv.clone()
    assert zero_blocks(ours, ints(3, 0)) is ours
    assert equal(ours, reference.zero_blocks(kv, torch.tensor([3, 0], device=DEVICE)))


@pytest.mark.parametrize("ids", [ints(3, 0, 10, 3), ints(3, 0).long(), ints()])
def test_embed_equals_reference(ids: Tensor) -> None:
    weight = torch.randn(11, 40, device=DEVICE).to(torch.float16)
    assert equal(embed(weight, ids), reference.embed(weight, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "dim"), [(16, 32), (3, 96)])
def test_keys_and_values_lie_at_their_slots(dtype: torch.dtype, block_size: int, dim: int) -> None:
    """From slices of a fused projection, in place; other slots keep their bits."""
    kv = torch.randn(7, 2, block_size, 2, dim, device=DEVICE).to(dtype)
    qkv = torch.randn(5, 8, dim, device=DEVICE).to(dtype)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    slots = torch.tensor(
        [4 * block_size + 1, 2, 4 * block_size, 6 * block_size + 2, block_size], device=DEVICE
    )
    ours = kv.clone()
    assert write_kv(ours, k, v, slots) is ours
    assert equal(ours, write_kv_by_reference(kv, k, v, slots))


def test_a_slot_that_is_none_is_not_written() -> None:
    kv = torch.randn(3, 2, 4, 1, 32, device=DEVICE)
    k = torch.randn(2, 1, 32, device=DEVICE)
    assert equal(write_kv(kv.clone(), k, k, torch.tensor([-1, 12], device=DEVICE)), kv)


@pytest.mark.gpu
def test_offsets_of_64_bits() -> None:
    """Blocks whose first element lies beyond 2**31, and beyond 2**32."""
    kv = torch.zeros(2**22 + 9, 2, 16, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    for block in (2**21 + 3, 2**22 + 5):
        k, v = torch.randn(2, 1, 1, 32, device=DEVICE).to(torch.bfloat16)
        write_kv(kv, k, v, torch.tensor([block * 16 + 7], device=DEVICE))
        assert equal(kv[block, :, 7], torch.stack((k[0], v[0])))
        copy_blocks(kv, ints(block), ints(block + 1))
        assert equal(kv[block + 1], kv[block])
        zero_blocks(kv, ints(block))
        assert not kv[block].any()
    written = kv.view(torch.int16).any(-1)  # count_nonzero would take four times the memory of the cache
    assert written.sum() == 2 * 2
