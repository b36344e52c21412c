"""A Hugging Face causal LM, its own code untouched, as a model of one piece.

Its attention layers are sent to `kernels.attend` through transformers' AttentionInterface. No mask is
registered for that name: transformers then builds none, and needs no look at the positions, which would stop
tracing.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from purestep.kernels.record import record
from purestep.kernels.types import Kernels
from purestep.pure.errors import ModelLoadError
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.models.module import module_model, module_tree
from purestep.pure.records.params import Params
from purestep.state.loading.fields import INTEGERS, Fields
from purestep.state.loading.loaded import LoadedModel

ATTENTION = "purestep"


def load_transformers_module(module: Any, *, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """The module as a model; its parameters are shared, not copied, unless `dtype` is another than theirs.

    Raises:
        ModelLoadError: the module is on another device, or its attention is of a kind that `attend` is not.
    """
    tree = module_tree(module)
    elsewhere = next((name for name, tensor in tree.items() if tensor.device.type != device.type), None)
    if elsewhere is not None:
        raise ModelLoadError(
            f"parameter {elsewhere} is on {tree[elsewhere].device}, {device} was asked for: move it"
        )
    name = type(module).__name__
    text_config = Fields(module.config.get_text_config().to_dict(), f"{name}.config: ")
    return LoadedModel(
        name=name,
        model=transformers_model(module),
        params=Params(tree={key: tensor.to(dtype=dtype) for key, tensor in tree.items()}),
        eos_token_ids=text_config.get("eos_token_id", INTEGERS, ()),
    )


def transformers_model(module: Any) -> Model:
    """The module, itself left as it is, as a model whose parameter tree is `module_tree(module)`.

    Raises:
        ModelLoadError: its attention is of a kind that `attend` is not.
    """
    config = module.config.get_text_config()
    _refuse_other_masks(config, type(module).__name__)
    paged = _paged_twin(module)
    kv_layers = _probe(paged, type(module).__name__)
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "sliding_attention" and kv_layers[i].sliding_window is None:
            raise ModelLoadError(
                f"{type(module).__name__}: layer {i} slides, but does not tell attention its window"
            )
    return module_model(
        paged,
        kv_layers=kv_layers,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        head=_head(paged),
        name=type(module).__name__,
    )


def attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    purestep_attend: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
    kind = type(layer).__name__
    if purestep_attend is None:
        raise ModelLoadError(
            f"{kind}: this architecture keeps extra arguments from its attention, so it can not be paged"
        )
    if others.get("s_aux") is not None or others.get("position_bias") is not None:
        raise ModelLoadError(f"{kind}: attention sinks and position biases are not supported")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        sizes = ", ".join(str(x.shape[-1]) for x in (q, k, v))
        raise ModelLoadError(f"{kind}: queries, keys and values of unequal sizes {sizes} are not supported")
    out = purestep_attend(
        layer.layer_idx, q, k, v, scale=scaling, soft_cap=softcap, sliding_window=sliding_window
    )
    return out[None], None


@record(static=True)
class HeadConfig:
    """The module's own way from hidden states to logits, and which parameter each of its tensors is."""

    module: nn.Module
    names: tuple[tuple[str, str], ...]


def head(
    piece: Piece, weights: dict[str, Tensor], carried: tuple[Tensor, ...], inputs: Any, *, kernels: Kernels
) -> tuple[Tensor]:
    """Logits of the given hidden states, by the module's own code: caps and scales included."""
    own = {name: weights[key] for name, key in piece.config.names}
    return (functional_call(piece.config.module, own, (carried[0],)),)


def _paged_twin(module: Any) -> Any:
    """The module's structure a second time, with the same tensors and attention of our own."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, shared).eval()
    twin.set_attn_implementation(ATTENTION)

    def forward(input_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        output = twin.base_model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, purestep_attend=attend
        )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    twin.forward = forward
    return twin


def _head(twin: Any) -> Piece:
    """What the module does after its layers: its own forward, given hidden states instead of layers."""
    alone = copy.copy(twin)
    alone._modules = twin._modules | {twin.base_model_prefix: _Given()}

    def forward(hidden: Tensor) -> Tensor:
        logits: Tensor = type(twin).forward(alone, inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    alone.forward = forward
    key_of = {id(parameter): name for name, parameter in twin.named_parameters()}
    names = tuple(
        (name, key_of[id(parameter)]) for name, parameter in alone.named_parameters(remove_duplicate=False)
    )
    return Piece(name="head", function=head, config=HeadConfig(module=alone, names=names))


class _Given(nn.Module):
    """Gives back the hidden states that it is given, as a base model would."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(inputs_embeds)

    @property
    def decoder(self) -> "_Given":
        """Some models call the decoder of their base model."""
        return self


class _Output:
    """A base model's output: hidden states, and nothing else that it might hold."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]


def _probe(twin: Any, name: str) -> tuple[KVLayerSpec, ...]:
    """The KV cache of each attention layer, seen by running two tokens through the module."""
    found: dict[int, KVLayerSpec] = {}

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, *, sliding_window: int | None, **_: Any
    ) -> Tensor:
        found[layer] = KVLayerSpec(
            num_kv_heads=k.shape[1], head_dim=k.shape[2], sliding_window=sliding_window
        )
        return torch.zeros_like(q)

    device = next(twin.parameters()).device
    with torch.no_grad():
        twin(torch.zeros(2, dtype=torch.int64, device=device), torch.arange(2, device=device), attend)
    if not found or sorted(found) != list(range(len(found))):
        raise ModelLoadError(
            f"{name}: paged attention was called for layers {sorted(found)}, not for every layer"
        )
    return tuple(found[i] for i in range(len(found)))


def _refuse_other_masks(config: Any, name: str) -> None:
    """No mask is built, so what a mask would say beyond causality and windows must not be asked for."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelLoadError(f"{name}: layers of type {', '.join(sorted(kinds))} can not be paged")
    for key in ("is_encoder_decoder", "use_bidirectional_attention", "attention_chunk_size"):
        if getattr(config, key, None):
            raise ModelLoadError(f"{name}: {key} = {getattr(config, key)} can not be paged")
