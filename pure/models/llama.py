"""The dense Llama family, written once: Llama, Mistral, SmolLM, Qwen2, Qwen3.

What is carried between pieces is (cos, sin, hidden), and from the first layer on (cos, sin, hidden,
residual): each sub-layer's output is added to the residual by the norm that follows it.
"""

from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.model import KVLayerSpec, Model, Piece, linear_head
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
            Piece(
                name=f"layers.{i}.after",
                function=after_last_attention if i == config.num_layers - 1 else after_attention,
                path=path,
                config=config,
            ),
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
        head=Piece(name="head", function=linear_head, path=head_path),
        kv_layers=kv_layers,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        config=config,
        linear_paths=(*linear_paths, head_path),
        narrows=True,
    )


def embed(
    piece: Piece, weights: Tensor, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Token embeddings (or those that were given), and the step's rotary angles."""
    config: ModelConfig = piece.config
    hidden = inputs.inputs_embeds
    if hidden is None:
        hidden = kernels.embed(weights, inputs.input_ids)
    head_dim = config.attention.head_dim
    cos, sin = rope_cos_sin(config.rope, inputs.positions, head_dim, hidden.dtype, kernels=kernels)
    return cos, sin, hidden


def before_attention(
    piece: Piece, weights: dict[str, Tensor], carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Queries, keys and values of one layer, side by side: [tokens, (heads + 2 * kv_heads) * dim]."""
    cos, sin, hidden, *residual = carried
    qkv, total = kernels.norm_linear(
        kernels,
        hidden,
        residual[0] if residual else None,
        weights["input_norm"],
        piece.config.rms_norm_eps,
        weights["qkv"],
        weights.get("qkv_bias"),
    )
    return qkv, cos, sin, total


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
    """Attention of one layer over its KV group's blocks, queries and keys rotated.

    The angles that are carried have to be of this step, asked for when its inputs and caches were there, as `embed`
    does: kernels may read those before what was launched since has ended.
    """
    shape, group = piece.config.attention, metadata.groups[piece.group]
    qkv, cos, sin, residual = carried
    out, layer_kv = kernels.attend_qkv(
        kernels,
        qkv,
        kv[0],
        metadata.query_start_loc,
        metadata.seq_lens,
        group.block_table,
        group.slot_mapping,
        cos=cos,
        sin=sin,
        q_gain=weights["q_norm"] if shape.qk_norm else None,
        k_gain=weights["k_norm"] if shape.qk_norm else None,
        eps=piece.config.rms_norm_eps,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
        scale=shape.head_dim**-0.5,
        sliding_window=shape.window_of(piece.layers[0]),
        kv_scales=metadata.scales_of(piece.layers[0]),
        settled=True,
    )
    return (out, cos, sin, residual), (layer_kv,)


def after_attention(
    piece: Piece, weights: dict[str, Tensor], carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """Output projection and feed-forward of one layer; its sum with the residual is left to the next norm."""
    out, cos, sin, residual = carried
    hidden = kernels.linear(out.flatten(-2), weights["o"], weights.get("o_bias"))
    hidden, residual = kernels.norm_gate_up(
        kernels, hidden, residual, weights["post_norm"], piece.config.rms_norm_eps, weights["gate_up"]
    )
    return cos, sin, kernels.linear(hidden, weights["down"], None), residual


def after_last_attention(
    piece: Piece, weights: dict[str, Tensor], carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """`after_attention` of the wanted tokens alone: no later layer attends to the others."""
    if inputs.wanted is not None:
        out, cos, sin, residual = carried
        carried = (out.index_select(0, inputs.wanted), cos, sin, residual.index_select(0, inputs.wanted))
    return after_attention(piece, weights, carried, inputs, kernels=kernels)


def norm(
    piece: Piece, weights: Tensor, carried: Carried, inputs: ModelInputs, *, kernels: Kernels
) -> Carried:
    """The final norm: hidden states, ready for the head."""
    _, _, hidden, residual = carried
    hidden, _ = kernels.add_rms_norm(hidden, residual, weights, piece.config.rms_norm_eps)
    return (hidden,)
