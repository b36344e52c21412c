"""Writing into the leaves of device state. `donating` kernels do the same in their argument's storage."""

from torch import Tensor


def write(table: Tensor, indices: tuple[Tensor, ...], values: Tensor) -> Tensor:
    """`table` with `table[indices] = values`. Donates `table`.

    Indices broadcast against each other, one per leading dimension; where two name the same place either
    value may stay. `values` takes the table's dtype.
    """
    return table.index_put(indices, values.to(table.dtype))


def copy_blocks(kv: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """`kv` with `kv[target] = kv[source]`, all sources read before any write. Donates `kv`.

    kv [blocks, ...]; source and target [copies]. A target is named once, except the null block 0, for
    padding.
    """
    return kv.index_put((target,), kv[source])


def zero_blocks(kv: Tensor, blocks: Tensor) -> Tensor:
    """`kv` with `kv[blocks] = 0`. Donates `kv`. kv [blocks, ...]; blocks [n], 0 for padding."""
    return kv.index_put((blocks,), kv.new_zeros(()))
