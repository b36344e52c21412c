"""A Hugging Face config as a `ModelConfig`."""

from collections.abc import Mapping
from typing import Any

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig, RopeScaling

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
        ModelLoadError: an architecture that is not of the dense Llama family, a missing key, or a setting
            that would change the computation in a way that is not implemented.
    """
    kind = model_type(config)
    if kind is None:
        asked = config.get("architectures") or [config.get("model_type")]
        raise ModelLoadError(
            f"{source}: unknown architecture {', '.join(map(str, asked))}; "
            f"known are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(config, source)

    def value(key: str) -> Any:
        if config.get(key) is None:
            raise ModelLoadError(f"{source}: {key} is missing")
        return config[key]

    num_heads, hidden_size = value("num_attention_heads"), value("hidden_size")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        vocab_size=value("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=value("intermediate_size"),
        num_layers=value("num_hidden_layers"),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads
            if kind == "llama" and "num_key_value_heads" not in config
            else value("num_key_value_heads"),
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            qkv_bias=kind == "qwen2" or attention_bias,
            out_bias=kind in ("llama", "qwen3") and attention_bias,
            qk_norm=kind == "qwen3",
            sliding_window=_sliding_window(config, kind, value("num_hidden_layers")),
        ),
        rope=_rope(config, source),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=value("max_position_embeddings"),
        eos_token_ids=as_ids(config.get("eos_token_id")),
    )


def model_type(config: Mapping[str, Any]) -> str | None:
    """llama, mistral, qwen2 or qwen3; None for any other."""
    named = config.get("architectures")
    if named:
        return next((ARCHITECTURES[name] for name in named if name in ARCHITECTURES), None)
    kind = config.get("model_type")
    return kind if kind in ARCHITECTURES.values() else None


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids that a config gives as nothing, a number or a list."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(i) for i in value)


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    neutral = {
        "hidden_act": (None, "silu", "swish"),
        "mlp_bias": (None, False),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1.0),
        "use_bidirectional_attention": (None, False),
    }
    for key, allowed in neutral.items():
        if config.get(key) not in allowed:
            raise ModelLoadError(f"{source}: {key} = {config[key]!r} is not supported")


def _sliding_window(config: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int | None, ...] | None:
    """Each layer's window: Mistral's is for all layers; Qwen's for some, and off unless asked for."""
    window = config.get("sliding_window")
    if window is None or kind == "llama" or (kind != "mistral" and not config.get("use_sliding_window")):
        return None
    if kind == "mistral":
        return (window,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return tuple(window if layer == "sliding_attention" else None for layer in layer_types)
    first = config.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(num_layers))


def _rope(config: Mapping[str, Any], source: str) -> RopeConfig:
    """Rotary embedding: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope = dict(config.get("rope_parameters") or {})
    scaling = rope or dict(config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", "llama3"):
        raise ModelLoadError(f"{source}: rotary embedding {scaling} is not supported; default and llama3 are")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    try:
        return RopeConfig(
            theta=float(theta),
            scaling=RopeScaling(
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
            ),
        )
    except KeyError as error:
        raise ModelLoadError(f"{source}: rotary embedding of type llama3 lacks {error}") from error
