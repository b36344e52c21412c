"""The dense Llama family, written once: Llama, Mistral, SmolLM, Qwen2, Qwen3.

What is carried between pieces is (cos, sin, hidden), and from the first layer on (cos, sin, hidden,
residual): each sub-layer's output is added to the residual by the norm that follows it.
"""

from typing import Any

import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.models.rope import rope_cos_sin
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs

Carried = tuple[Tensor, ...]


def llama(config: ModelConfig, *, name: str = "llama", groups: tuple[int, ...] | None = None) -> Model:
    """The model that `config` describes; `groups` gives each layer's KV group (all in group 0 by default).

    Its parameter tree: {"embed" [vocab, hidden], "layers": a tuple of {"input_norm", "qkv" [q|k|v, hidden],
    "o", "post_norm", "gate_up" [gate|up, hidden], "down"}, "norm", "head"}. A layer also has "qkv_bias",
    "o_bias", "q_norm" and "k_norm" where the config says so; there is no "head" if embeddings are tied.
    """
    groups = groups or (0,) * config.num_layers
    pieces = [Piece(name="embed", function=embed, path=("embed",), config=config)]
    for i in range(config.num_layers):
        path = ("layers", i)
        pieces += [
            Piece(name=f"layers.{i}.before", function=before_attention, path=path, config=config),
            Piece(
                name=f"layers.{i}.attention",
                function=attention,
                path=path,
                layers=(i,),
                group=groups[i],
                config=config,
            ),
            Piece(name=f"layers.{i}.after", function=after_attention, path=path, config=config),
        ]
    pieces.append(Piece(name="norm", function=norm, path=("norm",), config=config))
    shape = config.attention
    head_path = ("embed",) if config.tied_embeddings else ("head",)
    linear_paths = [
        ("layers", i, name) for i in range(config.num_layers) for name in ("qkv", "o", "gate_up", "down")
    ]
    kv_layers = tuple(
        KVLayerSpec(
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            sliding_window=shape.window_of(i),
            group=groups[i],
        )
        for i in range(config.num_layers)
    )
    return Model(
        name=name,
        pieces=tuple(pieces),
        head=Piece(name="head", function=head, path=head_path),
        kv_layers=kv_layers,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        config=config,
        linear_paths=(*linear_paths, head_path),
    )


def embed(
    piece: Piece, weights: Tensor, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Token embeddings (or those that were given), and the step's rotary angles."""
    config: ModelConfig = piece.config
    hidden = inputs.inputs_embeds
    if hidden is None:
        hidden = kernels.embed(weights, inputs.input_ids)
    cos, sin = rope_cos_sin(config.rope, inputs.positions, config.attention.head_dim, hidden.dtype)
    return cos, sin, hidden


def before_attention(
    piece: Piece, weights: dict[str, Tensor], carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Queries, keys and values [tokens, heads, dim] of one layer, rotated."""
    config: ModelConfig = piece.config
    shape, eps = config.attention, config.rms_norm_eps
    cos, sin, hidden, *residual = carried
    if residual:
        hidden, total = kernels.add_rms_norm(hidden, residual[0], weights["input_norm"], eps)
    else:
        hidden, total = kernels.rms_norm(hidden, weights["input_norm"], eps), hidden
    qkv = kernels.linear(hidden, weights["qkv"], weights.get("qkv_bias"))
    heads = torch.unflatten(qkv, -1, (-1, shape.head_dim))
    q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=-2)
    if shape.qk_norm:
        q, k = kernels.rms_norm(q, weights["q_norm"], eps), kernels.rms_norm(k, weights["k_norm"], eps)
    q, k = kernels.rotate(q, k, cos, sin)
    return q, k, v, cos, sin, total


def attention(
    piece: Piece,
    weights: dict[str, Tensor],
    carried: Carried,
    inputs: ModelInputs,
    kv: tuple[Tensor, ...],
    metadata: AttentionMetadata,
    *,
    kernels: Kernels,
) -> tuple[Carried, tuple[Tensor, ...]]:
    """Attention of one layer over its KV group's blocks."""
    shape, group = piece.config.attention, metadata.groups[piece.group]
    q, k, v, *rest = carried
    out, layer_kv = kernels.attend(
        q,
        k,
        v,
        kv[0],
        metadata.query_start_loc,
        metadata.seq_lens,
        group.block_table,
        group.slot_mapping,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
        scale=shape.head_dim**-0.5,
        sliding_window=shape.window_of(piece.layers[0]),
    )
    return (out, *rest), (layer_kv,)


def after_attention(
    piece: Piece, weights: dict[str, Tensor], carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Output projection and feed-forward of one layer; its sum with the residual is left to the next norm."""
    out, cos, sin, residual = carried
    hidden = kernels.linear(out.flatten(-2), weights["o"], weights.get("o_bias"))
    hidden, residual = kernels.add_rms_norm(hidden, residual, weights["post_norm"], piece.config.rms_norm_eps)
    hidden = kernels.silu_and_mul(kernels.linear(hidden, weights["gate_up"], None))
    return cos, sin, kernels.linear(hidden, weights["down"], None), residual


def norm(
    piece: Piece, weights: Tensor, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """The final norm: hidden states, ready for the head."""
    _, _, hidden, residual = carried
    hidden, _ = kernels.add_rms_norm(hidden, residual, weights, piece.config.rms_norm_eps)
    return (hidden,)


def head(
    piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs | None, *, kernels: Kernels
) -> Carried:
    """Logits of the given hidden states."""
    return (kernels.linear(carried[0], weights, None),)
