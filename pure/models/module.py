"""Any torch module as a model of one piece."""

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from purestep.kernels.record import record
from purestep.kernels.types import Kernels
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs


@record(static=True)
class ModuleConfig:
    """A module, compared by identity, and the KV cache of its attention layers."""

    module: nn.Module
    kv_layers: tuple[KVLayerSpec, ...]


def module_model(
    module: nn.Module,
    *,
    kv_layers: tuple[KVLayerSpec, ...],
    vocab_size: int,
    max_position_embeddings: int,
    head: Piece | None = None,
    name: str = "module",
) -> Model:
    """A model that calls `module(input_ids, positions, attend)`.

    input_ids and positions are int [tokens]. Attention layer i calls `attend(i, q, k, v)` with q [tokens,
    heads, dim] and k, v [tokens, kv_heads, dim]; it gets [tokens, heads, dim] (keywords: scale,
    sliding_window, soft_cap). The module returns hidden states [tokens, hidden] for `head`, or logits
    [tokens, vocab] if `head` is None. The parameter tree is `module_tree(module)`; the module's own tensors
    are used only where the tree lacks them.
    """
    config = ModuleConfig(module=module, kv_layers=kv_layers)
    layers = tuple(range(len(kv_layers)))
    return Model(
        name=name,
        pieces=(Piece(name="module", function=call_module, layers=layers, config=config),),
        head=head,
        kv_layers=kv_layers,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        config=config,
    )


def module_tree(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters by name, sharing its storage."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def call_module(
    piece: Piece,
    weights: dict[str, Tensor],
    carried: tuple[Tensor, ...],
    inputs: ModelInputs,
    kv: tuple[Tensor, ...],
    metadata: AttentionMetadata,
    *,
    kernels: Kernels,
) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """The whole forward pass. The KV cache is a value: each attention leaves a new one for the next."""
    specs, cache = piece.config.kv_layers, list(kv)

    def attend(
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        group = metadata.groups[specs[layer].group]
        out, cache[layer] = kernels.attend(
            q,
            k,
            v,
            cache[layer],
            metadata.query_start_loc,
            metadata.seq_lens,
            group.block_table,
            group.slot_mapping,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=sliding_window or specs[layer].sliding_window,
            soft_cap=soft_cap,
            kv_scales=metadata.scales_of(piece.layers[layer]),
        )
        return out

    arguments: tuple[Any, ...] = (inputs.input_ids, inputs.positions, attend)
    hidden = functional_call(piece.config.module, weights, arguments)
    return (hidden,), tuple(cache)
