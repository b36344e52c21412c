"""Small GGUF files, written by the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from purestep.pure.models.config import ModelConfig
from purestep.pure.models.names import hf_shapes
from purestep.pure.models.rope import frequency_divisors

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
    """A GGUF file of the model; matrices are quantised; `without` leaves tensors out, `instead` takes their place."""
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
        writer.add_key_value(key, value, _kind(value))
    for name in hf_shapes(config):
        if name not in without:
            array = ((instead or {}).get(name, tensors[name])).float().numpy()
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                array = interleaved(array, shape.num_heads if ".q_proj." in name else shape.num_kv_heads)
            _add(writer, gguf_name(name), array, quantization)
    if config.rope.scaling is not None:
        divisors = frequency_divisors(config.rope, shape.head_dim).numpy()
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
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return getattr(gguf.GGUFValueType, kinds[type(value)])  # type: ignore[no-any-return]


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by Hugging Face name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(config).items()}
