"""A dense decoder from a GGUF file."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig, RopeScaling
from purestep.pure.models.llama import llama
from purestep.pure.models.names import check_shapes, fuse
from purestep.pure.models.rope import frequency_divisors
from purestep.pure.records.params import Params
from purestep.state.loading.gguf_file import GGUFFile, open_gguf
from purestep.state.loading.gguf_tokenizer import gguf_special_tokens, gguf_tokenizer
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = (
    (r"token_embd\.(\w+)", r"model.embed_tokens.\1"),
    (r"output_norm\.(\w+)", r"model.norm.\1"),
    (r"output\.(\w+)", r"lm_head.\1"),
    (r"blk\.(\d+)\.attn_norm\.(\w+)", r"model.layers.\1.input_layernorm.\2"),
    (r"blk\.(\d+)\.ffn_norm\.(\w+)", r"model.layers.\1.post_attention_layernorm.\2"),
    (r"blk\.(\d+)\.attn_output\.(\w+)", r"model.layers.\1.self_attn.o_proj.\2"),
    (r"blk\.(\d+)\.attn_([qkv])\.(\w+)", r"model.layers.\1.self_attn.\2_proj.\3"),
    (r"blk\.(\d+)\.attn_([qk])_norm\.(\w+)", r"model.layers.\1.self_attn.\2_norm.\3"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)\.(\w+)", r"model.layers.\1.mlp.\2_proj.\3"),
)
ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(
    path: Path, *, dtype: torch.dtype, device: torch.device, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """The model in a GGUF file, dequantised to `dtype`.

    Raises:
        ModelLoadError: an unknown architecture, a missing, unexpected or misshapen tensor, a damaged file.
    """
    file = open_gguf(path)
    config = gguf_config(file)
    by_hf_name = {hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    shapes = {hf: file.tensors[name].shape for hf, name in by_hf_name.items()}
    check_shapes(config, shapes, source=str(path))

    def read(hf: str) -> Tensor:
        tensor = file.read(by_hf_name[hf])
        if file.metadata["general.architecture"] == "llama" and (part := re.search(r"\.([qk])_proj\.", hf)):
            shape = config.attention
            tensor = _uninterleaved(tensor, shape.num_heads if part[1] == "q" else shape.num_kv_heads)
        return tensor.to(device=device, dtype=dtype)

    metadata = file.metadata
    return LoadedModel(
        name=metadata.get("general.name", path.stem),
        model=llama(config, name=path.stem),
        params=Params(tree=fuse(config, read)),
        tokenizer=tokenizer or gguf_tokenizer(metadata, source=str(path)),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=gguf_special_tokens(metadata),
        eos_token_ids=config.eos_token_ids,
    )


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one keeps its own."""
    for pattern, replacement in NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(replacement)
    return name


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's shape, from the metadata.

    Raises:
        ModelLoadError: a model that can not be run here.
    """
    metadata, path = file.metadata, file.path
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{path}: unknown architecture {architecture!r}; known are {known}")

    def value(key: str, *default: Any) -> Any:
        found = metadata.get(f"{architecture}.{key}", *default)
        if found is None and not default:
            raise ModelLoadError(f"{path}: metadata {architecture}.{key} is missing")
        if isinstance(found, list) or (isinstance(found, int | float) and found < 0):
            raise ModelLoadError(f"{path}: metadata {architecture}.{key} = {found} is not supported")
        return found

    num_heads, hidden_size = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    refused = {
        "expert_count": value("expert_count", 0) != 0,
        "rope.dimension_count": value("rope.dimension_count", head_dim) != head_dim,
        "attention.value_length": value("attention.value_length", head_dim) != head_dim,
        "rope.scaling.type": value("rope.scaling.type", "none") != "none",
    }
    for key in (key for key, present in refused.items() if present):
        raise ModelLoadError(f"{path}: {architecture}.{key} = {value(key)} is not supported")
    num_layers, window = value("block_count"), value("attention.sliding_window", None)
    theta, embed = value("rope.freq_base", 10000.0), file.tensors.get("token_embd.weight")
    return ModelConfig(
        vocab_size=embed.shape[0] if embed else value("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=value("feed_forward_length"),
        num_layers=num_layers,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=value("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            out_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            sliding_window=None if window is None else (window,) * num_layers,
        ),
        rope=RopeConfig(theta=theta, scaling=_rope_scaling(file, theta, head_dim)),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        max_position_embeddings=value("context_length"),
        eos_token_ids=tuple(
            metadata[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in metadata
        ),
    )


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    """Llama 3's scaling, which a GGUF file holds as the table of divisors that follows from it."""
    if ROPE_FACTORS not in file.tensors:
        return None
    divisors = file.read(ROPE_FACTORS)
    scaling = RopeScaling(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    expected = frequency_divisors(RopeConfig(theta=theta, scaling=scaling), head_dim)
    if expected.shape != divisors.shape or not torch.allclose(expected, divisors, rtol=1e-4):
        raise ModelLoadError(f"{file.path}: tensor {ROPE_FACTORS} does not hold Llama 3's rotary scaling")
    return scaling


def _uninterleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key projection (or its bias) as rotation by halves wants them.

    llama.cpp keeps the two members of a rotated pair side by side.
    """
    rest = weight.shape[1:]
    return weight.reshape(num_heads, -1, 2, *rest).transpose(1, 2).reshape(weight.shape)
