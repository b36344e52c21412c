"""Blocks of the manager as blocks of a kernel, where the kernel's are smaller."""

import numpy as np
from jaxtyping import Int32

from purestep.pure.arrays import frozen


def expand_block_ids(
    block_ids: Int32[np.ndarray, " blocks"], *, block_size: int, kernel_block_size: int
) -> Int32[np.ndarray, " kernel_blocks"]:
    """The kernel's block ids of a request: block x is the kernel's x * ratio up to (x + 1) * ratio, in order.

    Both address the same slots, since slot = block id * block size + offset either way.

    Raises:
        ValueError: a kernel block that does not divide the manager's.
    Source: vllm/v1/worker/block_table.py map_to_kernel_blocks.
    """
    ratio, rest = divmod(block_size, kernel_block_size)
    if rest or ratio < 1:
        raise ValueError(
            f"blocks of {block_size} tokens can not be cut into kernel blocks of {kernel_block_size}: "
            "choose a kernel block size that divides the block size"
        )
    parts = np.asarray(block_ids, np.int32)[:, None] * np.int32(ratio) + np.arange(ratio, dtype=np.int32)
    return frozen(parts.reshape(-1))
