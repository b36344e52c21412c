"""A dense decoder from a GGUF file."""

import re
from pathlib import Path

import torch
from torch import Tensor

from purestep.kernels.reference.rope import frequency_divisors
from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig, RopeScaling
from purestep.pure.models.llama import llama
from purestep.pure.models.names import check_shapes, fuse
from purestep.pure.records.params import Params
from purestep.state.loading.fields import INTEGERS, MOST_LAYERS, TEXT, Fields, integer, real
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
END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(
    path: Path, *, dtype: torch.dtype, device: torch.device, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """The model in a GGUF file, dequantised to `dtype`.

    Raises:
        ModelLoadError: an unknown architecture, a missing, unexpected or misshapen tensor, a damaged file, metadata of
            the wrong kind.
    """
    file = open_gguf(path)
    config, fields = gguf_config(file), _fields(file)
    by_hf_name = {hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    shapes = {hf: file.tensors[name].shape for hf, name in by_hf_name.items()}
    check_shapes(config, shapes, source=str(path))

    def read(hf: str) -> Tensor:
        tensor = file.read(by_hf_name[hf])
        if file.metadata["general.architecture"] == "llama" and (part := re.search(r"\.([qk])_proj\.", hf)):
            shape = config.attention
            tensor = _uninterleaved(tensor, shape.num_heads if part[1] == "q" else shape.num_kv_heads)
        return tensor.to(device=device, dtype=dtype)

    title = fields.get("general.name", TEXT, path.stem)  # often of the training run, not of the model
    return LoadedModel(
        name=path.stem if title == path.stem else f"{path.stem} (in its metadata: {title})",
        model=llama(config, name=path.stem),
        params=Params(tree=fuse(config, read)),
        tokenizer=tokenizer or gguf_tokenizer(fields),
        chat_template=fields.get("tokenizer.chat_template", TEXT, None),
        special_tokens=gguf_special_tokens(fields),
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
    metadata = _fields(file)
    architecture = metadata.get("general.architecture", TEXT)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{file.path}: unknown architecture {architecture!r}; known are {known}")
    fields = _fields(file, architecture)
    size, embed = integer(), file.tensors.get("token_embd.weight")
    num_heads, hidden_size = fields.get("attention.head_count", size), fields.get("embedding_length", size)
    head_dim = fields.get("attention.key_length", size, hidden_size // num_heads)
    _refuse_unsupported(fields, head_dim)
    num_layers = fields.get("block_count", integer(most=MOST_LAYERS))
    window = fields.get("attention.sliding_window", size, None)
    theta = fields.get("rope.freq_base", real(above=0), 10000.0)
    return ModelConfig(
        vocab_size=embed.shape[0] if embed else fields.get("vocab_size", size),
        hidden_size=hidden_size,
        intermediate_size=fields.get("feed_forward_length", size),
        num_layers=num_layers,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=fields.get("attention.head_count_kv", size, num_heads),
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            out_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            sliding_window=None if window is None else (window,) * num_layers,
        ),
        rope=RopeConfig(theta=theta, scaling=_rope_scaling(file, theta, head_dim)),
        rms_norm_eps=fields.get("attention.layer_norm_rms_epsilon", real(above=0)),
        tied_embeddings="output.weight" not in file.tensors,
        max_position_embeddings=fields.get("context_length", size),
        eos_token_ids=tuple(i for key in END_TOKENS for i in metadata.get(key, INTEGERS, ())),
    )


def _fields(file: GGUFFile, architecture: str = "") -> Fields:
    """The metadata, or its part about an architecture."""
    prefix = f"{architecture}." if architecture else ""
    values = {key.removeprefix(prefix): v for key, v in file.metadata.items() if key.startswith(prefix)}
    return Fields(values, f"{file.path}: metadata {prefix}")


def _refuse_unsupported(fields: Fields, head_dim: int) -> None:
    neutral = {
        "expert_count": 0,
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "rope.scaling.type": "none",
    }
    for key, only in neutral.items():
        if fields.values.get(key, only) != only:
            raise fields.refusal(key, f"only {only} can be run here")


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    """Llama 3's scaling, which a GGUF file holds as the table of divisors that follows from it."""
    if ROPE_FACTORS not in file.tensors:
        return None
    divisors = file.read(ROPE_FACTORS)
    values = (float(divisors.max()), 1.0, 4.0, 8192)
    scaling = RopeScaling(*values)
    expected = frequency_divisors(head_dim, theta, values)
    if expected.shape != divisors.shape or not torch.allclose(expected, divisors, rtol=1e-4):
        raise ModelLoadError(f"{file.path}: tensor {ROPE_FACTORS} does not hold Llama 3's rotary scaling")
    return scaling


def _uninterleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key projection (or its bias) as rotation by halves wants them.

    llama.cpp keeps the two members of a rotated pair side by side.
    """
    rest = weight.shape[1:]
    return weight.reshape(num_heads, -1, 2, *rest).transpose(1, 2).reshape(weight.shape)
