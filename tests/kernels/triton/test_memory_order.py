"""A cache whose dimensions lie otherwise in memory: the same values, to the last bit."""

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.cases import attention_case
from tests.kernels.triton.device import DEVICE, quiet
from tests.laws import equal

from purestep.kernels.triton.attention import attend  # isort: skip
from purestep.kernels.triton.writes import copy_blocks, zero_blocks  # isort: skip

pytestmark = quiet

ORDERS = [(0, 1, 3, 2, 4), (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)]


def laid_out(kv: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same entries, the dimension that `order` names first lying outermost in memory."""
    return kv.permute(order).contiguous().permute([order.index(d) for d in range(kv.dim())])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("requests", [[(20, 1), (1, 1)], [(20, 4), (3, 3), (17, 1)]], ids=["decode", "mixed"])
def test_attention_reads_and_writes_any_order(
    order: tuple[int, ...], requests: list[tuple[int, int]]
) -> None:
    case = attention_case(requests, heads=4, kv_heads=2, dim=32, device=DEVICE)
    out, kv = case.run(attend)
    other = laid_out(case.tensors["kv"].clone(), order)
    assert not other.is_contiguous()

    same_out, same_kv = case.run(attend, kv=other)

    assert same_kv is other
    assert equal(same_out, out)
    assert equal(other, kv)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_copied_and_zeroed_in_any_order(order: tuple[int, ...]) -> None:
    kv = torch.randn(6, 2, 4, 2, 8, device=DEVICE)
    source, target, zeroed = (torch.tensor(ids, device=DEVICE) for ids in ([1, 2, 0], [2, 3, 0], [5]))
    other = laid_out(kv.clone(), order)

    assert copy_blocks(other, source, target) is other
    assert zero_blocks(other, zeroed) is other

    assert equal(other, zero_blocks(copy_blocks(kv, source, target), zeroed))
