"""A model as a tuple of pieces.

A piece is what may be captured or replayed as one: `function(piece, weights, carried, inputs, *, kernels)`,
where `weights` is its part of the parameter tree and `carried` the tuple of tensors handed from piece to
piece. A piece that attends is also given the KV cache of its layers and the attention metadata, and returns
`(carried, kv)`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.types import Kernels
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs
from purestep.pure.records.params import Params


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
    linear_paths: tuple[tuple[str | int, ...], ...] = ()  # leaves that nothing but linear (and embed) reads
    narrows: bool = False  # its pieces obey `ModelInputs.wanted`


def prepare_params(model: Model, params: Params, *, kernels: Kernels) -> Params:
    """The parameters as these kernels want them: weights of linear maps in the form that their `linear` takes.

    To be done once, before many steps. What changes in `params` later may not show in the result.
    """
    tree = params.tree
    for path in model.linear_paths:
        tree = _with_leaf(tree, path, kernels.prepare)
    return Params(tree, params.version)


def _with_leaf(tree: Any, path: tuple[str | int, ...], change: Callable[[Any], Any]) -> Any:
    """The tree with one leaf changed."""
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return tree | {key: _with_leaf(tree[key], rest, change)}
    return tuple(_with_leaf(x, rest, change) if i == key else x for i, x in enumerate(tree))


def linear_head(
    piece: Piece,
    weights: Any,
    carried: tuple[Tensor, ...],
    inputs: ModelInputs | None,
    *,
    kernels: Kernels,
) -> tuple[Tensor, ...]:
    """A head that is a weight and nothing else: logits of the given hidden states."""
    return (kernels.logits(kernels, carried[0], weights),)


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


def head_logits(
    model: Model, weights: Any, hidden: Tensor, *, kernels: Kernels, call: Callable[..., Any] = apply
) -> Tensor:
    """What the head, if there is one, makes of hidden states [n, hidden] with its weights, in float32 or wider."""
    if model.head is not None:
        (hidden,) = call(model.head, weights, (hidden,), None, kernels=kernels)
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
