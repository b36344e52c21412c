"""A model as a tuple of pieces.

A piece is what may be captured or replayed as one: `function(piece, weights, carried, inputs, *, kernels)`,
where `weights` is its part of the parameter tree and `carried` the tuple of tensors handed from piece to
piece. A piece that attends is also given the KV cache of its layers and the attention metadata, and returns
`(carried, kv)`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.types import Kernels
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs


@record(static=True)
class KVLayerSpec:
    """What one layer keeps in the KV cache: [num_blocks, 2, block_size, num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    group: int = 0  # the KV group whose block table and slots it uses


@record(static=True)
class Piece:
    """One part of a forward pass."""

    name: str
    function: Callable[..., Any]
    path: tuple[str | int, ...] = ()  # where its weights lie in the parameter tree
    layers: tuple[int, ...] = ()  # the KV layers it attends with, none for most pieces
    group: int = 0  # the KV group of those layers
    config: Any = None  # plain values its function reads

    @property
    def is_attention(self) -> bool:
        """Whether it takes and returns KV cache."""
        return bool(self.layers)

    def weights(self, tree: Any) -> Any:
        """Its part of the parameter tree."""
        for key in self.path:
            tree = tree[key]
        return tree


@record(static=True)
class Model:
    """A forward pass: the last of `pieces` gives hidden states alone, `head` makes logits of chosen rows."""

    name: str
    pieces: tuple[Piece, ...]
    head: Piece | None  # None: the last piece already gives logits
    kv_layers: tuple[KVLayerSpec, ...]
    vocab_size: int
    max_position_embeddings: int
    config: Any = None  # what the pieces were made from


def apply(
    piece: Piece,
    weights: Any,
    carried: tuple[Tensor, ...],
    inputs: ModelInputs,
    kv: tuple[Tensor, ...] = (),
    metadata: AttentionMetadata | None = None,
    *,
    kernels: Kernels,
) -> Any:
    """Apply a piece here and now: `carried`, or `(carried, kv)` if it attends."""
    if piece.is_attention:
        return piece.function(piece, weights, carried, inputs, kv, metadata, kernels=kernels)
    return piece.function(piece, weights, carried, inputs, kernels=kernels)
