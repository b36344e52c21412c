"""Kernels that write their argument's storage, in torch: what the engine runs on the CPU.

`donating` differs from `reference` in exactly the functions that are said to donate, and means the same.
"""

from typing import Any

import torch
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from purestep.kernels.reference.attention import attend_written


def write(table: Tensor, indices: tuple[Tensor, ...], values: Tensor) -> Tensor:
    """`table[indices] = values`, in place."""
    return table.index_put_(tuple(index.to(torch.int64) for index in indices), values.to(table.dtype))


def copy_blocks(kv: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """`kv[target] = kv[source]`, in place; sources are read before any write."""
    return kv.index_copy_(0, target.to(torch.int64), kv[source])


def zero_blocks(kv: Tensor, blocks: Tensor) -> Tensor:
    """`kv[blocks] = 0`, in place."""
    return kv.index_fill_(0, blocks.to(torch.int64), 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    **shape: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as in `Attend`; keys and values are written in place."""
    block_size = kv.shape[2]
    kv[slot_mapping // block_size, :, slot_mapping % block_size] = torch.stack((k, v), dim=1)
    return attend_written(q, kv, query_start_loc, seq_lens, block_table, **shape), kv


donating = replace(
    reference, write=write, copy_blocks=copy_blocks, zero_blocks=zero_blocks, attend=attend
)
