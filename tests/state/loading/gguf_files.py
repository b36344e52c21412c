"""Small GGUF files, written by the gguf package."""

from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import torch
from torch import Tensor

from purestep.kernels.reference.rope import frequency_divisors
from purestep.pure.models.config import ModelConfig
from purestep.pure.models.names import hf_shapes

# llama.cpp's names, written down a second time here.
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOKENS = ["<|end|>", "<|user|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "abc", "Ġa"]


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def interleaved(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp's converter lays them: the two members of a rotated pair side by side."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    instead: dict[str, Tensor] | None = None,
) -> Path:
    """A GGUF file of the model; matrices are quantised; `without` leaves tensors out, `instead` takes their place.

    `extra` is metadata that is added, or takes the place of what is there; None leaves it out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    shape = config.attention
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 4] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "ab c", "Ġ a"])
    writer.add_eos_token_id(0)
    for key, value in (extra or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, _kind(value), _kind(value[0]) if type(value) is list else None)
    for name in hf_shapes(config):
        if name not in without:
            array = ((instead or {}).get(name, tensors[name])).float().numpy()
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                array = interleaved(array, shape.num_heads if ".q_proj." in name else shape.num_kv_heads)
            _add(writer, gguf_name(name), array, quantization)
    if config.rope.scaling is not None:
        numbers = attrs.astuple(config.rope.scaling)
        divisors = frequency_divisors(shape.head_dim, config.rope.theta, numbers).numpy()
        if instead and "rope_freqs.weight" in instead:
            divisors = instead["rope_freqs.weight"].numpy()
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, array: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> None:
    if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(array))
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)


def _kind(value: Any) -> gguf.GGUFValueType:
    whole = "UINT64" if type(value) is int and value >= 2**63 else "INT64"
    kinds = {bool: "BOOL", int: whole, float: "FLOAT64", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[kinds[type(value)]]


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by Hugging Face name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(config).items()}
