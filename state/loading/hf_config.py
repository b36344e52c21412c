"""A Hugging Face config as a `ModelConfig`."""

from collections.abc import Mapping
from typing import Any

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig, RopeScaling
from purestep.state.loading.fields import (
    FLAG,
    INTEGERS,
    MOST_LAYERS,
    TEXT,
    TEXTS,
    Fields,
    integer,
    real,
)

# Architecture, and its model_type, which alone is given where no class is named.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def hf_model_config(config: Mapping[str, Any], *, source: str) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
        ModelLoadError: an architecture that is not of the dense Llama family, a missing key, a value of the
            wrong kind, or a setting that would change the computation in a way that is not implemented.
    """
    fields = Fields(config, f"{source}: ")
    kind = model_type(config, source=source)
    if kind is None:
        asked = fields.get("architectures", TEXTS, ()) or (str(config.get("model_type")),)
        raise ModelLoadError(
            f"{source}: unknown architecture {', '.join(asked)}; known are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(fields)
    size = integer()
    num_heads, hidden_size = fields.get("num_attention_heads", size), fields.get("hidden_size", size)
    old_llama = kind == "llama" and config.get("num_key_value_heads") is None  # each head has its own
    num_layers = fields.get("num_hidden_layers", integer(most=MOST_LAYERS))
    attention_bias = fields.get("attention_bias", FLAG, False)
    return ModelConfig(
        vocab_size=fields.get("vocab_size", size),
        hidden_size=hidden_size,
        intermediate_size=fields.get("intermediate_size", size),
        num_layers=num_layers,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads if old_llama else fields.get("num_key_value_heads", size),
            head_dim=fields.get("head_dim", size, hidden_size // num_heads),
            qkv_bias=kind == "qwen2" or attention_bias,
            out_bias=kind in ("llama", "qwen3") and attention_bias,
            qk_norm=kind == "qwen3",
            sliding_window=_sliding_window(fields, kind, num_layers),
        ),
        rope=_rope(fields),
        rms_norm_eps=fields.get("rms_norm_eps", real(above=0), 1e-6),
        tied_embeddings=fields.get("tie_word_embeddings", FLAG, False),
        max_position_embeddings=fields.get("max_position_embeddings", size),
        eos_token_ids=fields.get("eos_token_id", INTEGERS, ()),
    )


def model_type(config: Mapping[str, Any], *, source: str) -> str | None:
    """llama, mistral, qwen2 or qwen3; None for any other.

    Raises:
        ModelLoadError: names that are no texts.
    """
    fields = Fields(config, f"{source}: ")
    named = fields.get("architectures", TEXTS, ())
    if named:
        return next((ARCHITECTURES[name] for name in named if name in ARCHITECTURES), None)
    kind = fields.get("model_type", TEXT, None)
    return kind if kind in ARCHITECTURES.values() else None


def _refuse_unsupported(fields: Fields) -> None:
    neutral = {
        "hidden_act": (None, "silu", "swish"),
        "mlp_bias": (None, False),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1.0),
        "use_bidirectional_attention": (None, False),
    }
    for key, allowed in neutral.items():
        if fields.values.get(key) not in allowed:
            raise fields.refusal(key, f"what can be run here has {' or '.join(map(repr, allowed))}")


def _sliding_window(fields: Fields, kind: str, num_layers: int) -> tuple[int | None, ...] | None:
    """Each layer's window: Mistral's is for all layers; Qwen's for some, and off unless asked for."""
    if kind == "llama" or (kind != "mistral" and not fields.get("use_sliding_window", FLAG, False)):
        return None
    window = fields.get("sliding_window", integer(), None)
    if window is None or kind == "mistral":
        return None if window is None else (window,) * num_layers
    layer_types = fields.get("layer_types", TEXTS, None)
    if layer_types is None:
        first = fields.get("max_window_layers", integer(least=0), 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(layer_types) != num_layers or set(layer_types) - {"sliding_attention", "full_attention"}:
        raise fields.refusal(
            "layer_types", f"each of {num_layers} layers has to be a sliding_attention or a full_attention"
        )
    return tuple(window if layer == "sliding_attention" else None for layer in layer_types)


def _rope(fields: Fields) -> RopeConfig:
    """Rotary embedding: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope = fields.section("rope_parameters")
    scaling = rope if rope.values else fields.section("rope_scaling")
    positive = real(above=0)
    theta = rope.get("rope_theta", positive, fields.get("rope_theta", positive, 10000.0))
    if scaling.get("partial_rotary_factor", real(), 1.0) != 1.0:
        raise scaling.refusal("partial_rotary_factor", "only heads that are rotated whole can be run here")
    key = "type" if scaling.values.get("rope_type") is None else "rope_type"
    kind = scaling.get(key, TEXT, "default")
    if kind not in ("default", "llama3"):
        raise scaling.refusal(key, "default and llama3 can be run here")
    if kind == "default":
        return RopeConfig(theta=theta)
    low = scaling.get("low_freq_factor", positive)
    return RopeConfig(
        theta=theta,
        scaling=RopeScaling(
            factor=scaling.get("factor", positive),
            low_freq_factor=low,
            high_freq_factor=scaling.get("high_freq_factor", real(above=low)),
            original_max_position_embeddings=scaling.get("original_max_position_embeddings", integer()),
        ),
    )
