"""Writing into the leaves of device state, in place."""

import torch
from torch import Tensor

from purestep.kernels.reference.scales import FP8, stored


def write(table: Tensor, indices: tuple[Tensor, ...], values: Tensor) -> Tensor:
    """`table` after `table[indices] = values`."""
    return table.index_put_(tuple(index.to(torch.int64) for index in indices), values.to(table.dtype))


def copy_blocks(kv: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """`kv` after `kv[target] = kv[source]`; sources are read before any write."""
    as_bits(kv).index_copy_(0, target.to(torch.int64), as_bits(kv)[source])
    return kv


def zero_blocks(kv: Tensor, blocks: Tensor) -> Tensor:
    """`kv` after `kv[blocks] = 0`."""
    as_bits(kv).index_fill_(0, blocks.to(torch.int64), 0)
    return kv


def as_bits(kv: Tensor) -> Tensor:
    """The same storage; eight-bit floats as integers, since torch moves those about, and zero is the same."""
    return kv.view(torch.uint8) if kv.dtype == FP8 else kv


def write_kv(
    kv: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> Tensor:
    """`kv` after k and v [tokens, kv_heads, dim] were put at their slots, slot_mapping int64 [tokens] >= 0.

    Raises:
        ValueError: a cache whose dimensions do not follow each other in memory.
    """
    if not kv.is_contiguous():
        raise ValueError(
            f"a cache {tuple(kv.shape)} with strides {kv.stride()}: the CPU kernels take no memory order but NHD; lay "
            "it out so, or use purestep.kernels.reference"
        )
    block_size = kv.shape[2]
    rows = as_bits(kv).view(-1, *kv.shape[3:])
    k_scale, v_scale = (None, None) if kv_scales is None else (kv_scales[0], kv_scales[1])
    # A block's keys come before its values: a slot's key lies one plane further on for each block before it.
    key = torch.add(slot_mapping, slot_mapping.div(block_size, rounding_mode="floor"), alpha=block_size)
    for plane, x, scale in ((rows, k, k_scale), (rows[block_size:], v, v_scale)):
        plane.index_copy_(0, key, as_bits(stored(x, scale, kv.dtype)))
    return kv
