"""Our config as transformers' and vLLM's: the other way round from `purestep.state.loading.hf_config`."""

from typing import Any

from purestep.pure.errors import BenchmarkError
from purestep.pure.models.config import ModelConfig

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json of this model.

    Raises:
        BenchmarkError: sliding windows, which the families write each in their own way.
    """
    shape, rope = config.attention, config.rope
    if shape.sliding_window is not None:
        raise BenchmarkError("models with a sliding window are measured without peers: give --no-peers")
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias and not shape.out_bias else "llama"
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is not None:
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_position_embeddings,
        }
    fields = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": parameters,
        "tie_word_embeddings": config.tied_embeddings,
    }
    return fields if family == "qwen2" else fields | {"attention_bias": shape.out_bias}
