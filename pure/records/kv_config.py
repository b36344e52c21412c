"""What the KV cache is made of: layers, groups of layers with one block table, and the tensors that hold them.

Layers are numbered as in `Model.kv_layers`. A layer that reads another layer's keys and values names that layer in
its piece and does not occur here; neither does one that keeps nothing.
Source: vllm/v1/kv_cache_interface.py.
"""

import numpy as np
import torch
from jaxtyping import Int, Int32

from purestep.kernels.record import record
from purestep.pure.arrays import frozen
from purestep.pure.errors import KVCacheConfigError


@record(static=True)
class KVCacheSpec:
    """What one attention layer keeps of each token, and how many tokens its blocks hold."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: all before it

    @property
    def page_bytes(self) -> int:
        """Bytes of one block: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@record(static=True)
class KVCacheGroupSpec:
    """Layers that share block tables and slots."""

    layers: tuple[int, ...]
    block_size: int  # tokens in a block of the scheduler
    kernel_block_size: int  # tokens in a block of the attention kernels, a divisor
    sliding_window: int | None = (
        None  # what no layer of the group looks back beyond; None: some layer sees all
    )

    @property
    def num_kernel_blocks(self) -> int:
        """Kernel blocks in one block of the scheduler."""
        return self.block_size // self.kernel_block_size


@record(static=True)
class KVCacheTensor:
    """One allocation. Layers that share it are of different groups, whose block ids never meet."""

    num_bytes: int
    shared_by: tuple[int, ...]


@record(static=True)
class KVCacheConfig:
    """The whole cache. Every group has block ids 0 to num_blocks - 1, and 0 is its null block."""

    num_blocks: int
    specs: tuple[KVCacheSpec, ...]  # by layer
    groups: tuple[KVCacheGroupSpec, ...]
    tensors: tuple[KVCacheTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of the scheduler, by group."""
        return tuple(group.block_size for group in self.groups)

    @property
    def kernel_block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of the attention kernels, by group."""
        return tuple(group.kernel_block_size for group in self.groups)


@record(static=True)
class MultipleOf:
    """Any block size that this divides."""

    base: int


BlockSizes = tuple[int | MultipleOf, ...]  # those that one attention kernel supports


def kernel_block_ids(
    block_ids: Int[np.ndarray, " blocks"], *, block_size: int, kernel_block_size: int
) -> Int32[np.ndarray, " kernel_blocks"]:
    """The kernel blocks that these blocks of the scheduler consist of: block x is x * ratio up to (x + 1) * ratio.

    Both address the same slots, since slot = block id * block size + offset either way.

    Raises:
        KVCacheConfigError: a kernel block that does not divide the scheduler's.
    Source: vllm/v1/worker/block_table.py map_to_kernel_blocks.
    """
    ratio, rest = divmod(block_size, kernel_block_size)
    if rest or ratio < 1:
        raise KVCacheConfigError(
            f"blocks of {block_size} tokens can not be cut into kernel blocks of {kernel_block_size}: "
            "choose a kernel block size that divides the block size"
        )
    parts = np.asarray(block_ids, np.int32)[:, None] * np.int32(ratio) + np.arange(ratio, dtype=np.int32)
    return frozen(parts.reshape(-1))
