"""Between Hugging Face's tensor names and our fused parameter tree."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import ModelConfig

# Our leaf of a layer, and the tensors it is made of, in order.
LAYER_WEIGHTS = (
    ("input_norm", ("input_layernorm.weight",)),
    ("qkv", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    ("o", ("self_attn.o_proj.weight",)),
    ("post_norm", ("post_attention_layernorm.weight",)),
    ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ("down", ("mlp.down_proj.weight",)),
)
QKV_BIAS = (("qkv_bias", ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")),)
OUT_BIAS = (("o_bias", ("self_attn.o_proj.bias",)),)
QK_NORM = (("q_norm", ("self_attn.q_norm.weight",)), ("k_norm", ("self_attn.k_norm.weight",)))


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must hold, by Hugging Face name, with its shape."""
    return dict(_each_shape(config))


def _each_shape(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One by one: a damaged config may ask for more layers than can be listed."""
    shape, hidden, inner = config.attention, config.hidden_size, config.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
    }
    parts = [part for leaf in layer_leaves(config).values() for part in leaf]
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        yield from ((f"model.layers.{i}.{part}", layer[part]) for part in parts)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def layer_leaves(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The leaves of one layer of our tree, and the Hugging Face tensors that each is the concatenation of."""
    shape = config.attention
    optional = (QKV_BIAS, shape.qkv_bias), (OUT_BIAS, shape.out_bias), (QK_NORM, shape.qk_norm)
    return dict(LAYER_WEIGHTS) | {
        leaf: parts for leaves, present in optional if present for leaf, parts in leaves
    }


def check_shapes(
    config: ModelConfig,
    found: Mapping[str, tuple[int, ...]],
    *,
    source: str,
    files: Mapping[str, str] | None = None,
) -> None:
    """Nothing, if `found` (tensor name to shape) is what the config asks for.

    A tied head and old rotary buffers may be there as well: both follow from the rest.

    Raises:
        ModelLoadError: a missing, unexpected or misshapen tensor, named with its file (else with `source`), or heads
            that can not be.
    """
    _check_heads(config, source)
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in _each_shape(config):
        if name not in found:
            raise ModelLoadError(
                f"{source}: tensor {name} is missing; there are {len(found)} tensors, "
                f"and its config asks for {config.num_layers} layers"
            )
        wanted[name] = shape
    file_of = files or {}
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise ModelLoadError(
                f"{file_of.get(name, source)}: tensor {name} has shape {tuple(found[name])}, "
                f"its config asks for {shape}"
            )
    unexpected = [name for name in found if name not in wanted and not _redundant(name, config)]
    if unexpected:
        name = unexpected[0]
        raise ModelLoadError(
            f"{file_of.get(name, source)}: tensor {name} has no place in this model ({len(unexpected)} have none)"
        )


def from_hf_names(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, source: str = "the weights"
) -> dict[str, Any]:
    """Our fused tree of tensors that are in memory.

    Raises:
        ModelLoadError: as `check_shapes`.
    """
    check_shapes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source=source)
    return fuse(config, tensors.__getitem__)


def fuse(config: ModelConfig, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """Our tree, each tensor read once by its Hugging Face name; only one leaf's parts are held at a time."""
    layers = tuple(
        {
            leaf: _fused([read(f"model.layers.{i}.{part}") for part in parts])
            for leaf, parts in layer_leaves(config).items()
        }
        for i in range(config.num_layers)
    )
    tree = {"embed": read("model.embed_tokens.weight"), "layers": layers, "norm": read("model.norm.weight")}
    return tree if config.tied_embeddings else tree | {"head": read("lm_head.weight")}


def to_hf_views(config: ModelConfig, tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Hugging Face's tensors as views of our leaves: who writes one, writes the other.

    A tied head is not listed: it is the embedding.
    """
    views = {"model.embed_tokens.weight": tree["embed"]}
    for i, layer in enumerate(tree["layers"]):
        views |= {f"model.layers.{i}.{part}": view for part, view in _layer_views(config, layer)}
    views["model.norm.weight"] = tree["norm"]
    if not config.tied_embeddings:
        views["lm_head.weight"] = tree["head"]
    return views


def _layer_views(config: ModelConfig, layer: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    shape = config.attention
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"qkv": (q, kv, kv), "qkv_bias": (q, kv, kv), "gate_up": (config.intermediate_size,) * 2}
    for leaf, parts in layer_leaves(config).items():
        pieces = torch.split(layer[leaf], list(sizes[leaf])) if leaf in sizes else (layer[leaf],)
        yield from zip(parts, pieces, strict=True)


def _check_heads(config: ModelConfig, source: str) -> None:
    shape = config.attention
    if shape.num_heads % shape.num_kv_heads:
        raise ModelLoadError(
            f"{source}: its config has {shape.num_heads} query heads over {shape.num_kv_heads} key-value heads; "
            "each of these has to serve equally many: correct the config"
        )
    if shape.head_dim < 2 or shape.head_dim % 2:
        raise ModelLoadError(
            f"{source}: its config has heads of size {shape.head_dim}; rotation takes pairs: correct the config"
        )


def _fused(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _redundant(name: str, config: ModelConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)
