"""Whole models from GGUF files."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch.utils._pytree import tree_leaves

from purestep.kernels.record import replace
from purestep.pure.errors import ModelLoadError
from purestep.pure.models.names import from_hf_names
from purestep.state.loading.gguf_model import load_gguf
from purestep.state.loading.loaded import LoadedModel
from tests.pure.models.families import both
from tests.state.loading.gguf_files import TOKENS, random_tensors, write_gguf

CPU = torch.device("cpu")
FAMILIES = {
    "llama": "llama",
    "llama, wide heads, tied": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_gguf(path, dtype=dtype, device=CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    """Config and tree are those that were written: rows of rotated heads put back, leaves fused."""
    _, model, params = both(family)
    tensors = {name: tensor.detach() for name, tensor in both(family)[0].named_parameters()}
    loaded = load(write_gguf(tmp_path / "a.gguf", model.config, tensors, architecture=FAMILIES[family]))
    expected = replace(model.config, eos_token_ids=(0,))
    assert loaded.model.config == expected
    assert loaded.eos_token_ids == (0,) and loaded.name == "a"
    assert loaded.params.tree.keys() == params.tree.keys()
    for got, want in zip(tree_leaves(loaded.params), tree_leaves(params), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "F16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_are_dequantised(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To float32, or rounded from there: near what was written, and exactly what the gguf package makes of it."""
    _, model, _ = both("llama")
    quantization = gguf.GGMLQuantizationType[kind]
    tensors = random_tensors(model.config)

    def stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1:
            return tensor
        raw = gguf.quants.quantize(tensor.numpy(), quantization)
        return torch.from_numpy(gguf.quants.dequantize(raw, quantization).copy())

    path = write_gguf(tmp_path / "q.gguf", model.config, tensors, quantization=quantization)
    tree = from_hf_names(model.config, {name: stored(name, tensor) for name, tensor in tensors.items()})
    for got, want in zip(tree_leaves(load(path, dtype).params.tree), tree_leaves(tree), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


def test_llama_3_scaling_is_recognised(tmp_path: Path) -> None:
    """A GGUF file holds the table of divisors; the scaling that makes it is found again."""
    _, model, _ = both("llama 3 scaling")
    scaling = replace(model.config.rope.scaling, original_max_position_embeddings=8192)
    config = replace(model.config, rope=replace(model.config.rope, theta=5e5, scaling=scaling))
    loaded = load(write_gguf(tmp_path / "a.gguf", config, random_tensors(config)))
    assert loaded.model.config.rope == config.rope
    other = {"rope_freqs.weight": torch.linspace(1, 8, 8)}
    with pytest.raises(ModelLoadError, match=r"b\.gguf: tensor rope_freqs\.weight"):
        load(write_gguf(tmp_path / "b.gguf", config, random_tensors(config), instead=other))


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    """Both are in the metadata; a template is optional."""
    _, model, _ = both("llama")
    extra = {"tokenizer.chat_template": "{{ messages[0].content }}", "general.name": "Tiny"}
    loaded = load(write_gguf(tmp_path / "a.gguf", model.config, random_tensors(model.config), extra=extra))
    assert loaded.name == "a (in its metadata: Tiny)" and loaded.chat_template == "{{ messages[0].content }}"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("<|user|>abc a<|end|>") == [1, TOKENS.index("abc"), TOKENS.index("Ġa"), 0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "unknown architecture 'mamba'"),
    "experts": ({"extra": {"llama.expert_count": 8}}, r"llama\.expert_count = 8 is not supported"),
    "half rotated": ({"extra": {"llama.rope.dimension_count": 4}}, r"llama\.rope\.dimension_count = 4"),
    "yarn": ({"extra": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type = 'yarn'"),
    "no layers": ({"extra": {"llama.block_count": None}}, r"llama\.block_count is missing"),
    "endless layers": (
        {"extra": {"llama.block_count": 2**40}},
        r"llama\.block_count = 1099511627776 .*to 10000",
    ),
    "too many layers": (
        {"extra": {"llama.block_count": 3}},
        r"layers\.2\.input_layernorm\.weight is missing",
    ),
    "a size per layer": (
        {"extra": {"llama.feed_forward_length": [96, 96]}},
        r"feed_forward_length = \[96, 96\]",
    ),
    "heads as text": ({"extra": {"llama.attention.head_count": "4"}}, r"head_count = '4' .*: a whole number"),
    "uneven heads": ({"extra": {"llama.attention.head_count_kv": 3}}, "4 query heads over 3 key-value heads"),
    "odd heads": ({"extra": {"llama.attention.key_length": 3}}, "heads of size 3; rotation takes pairs"),
    "no end": ({"extra": {"tokenizer.ggml.eos_token_id": -1}}, r"eos_token_id = -1 .*: a whole number"),
    "template": ({"extra": {"tokenizer.chat_template": 5}}, r"chat_template = 5 .*: a text"),
    "token types": (
        {"extra": {"tokenizer.ggml.token_type": [1]}},
        r"token_type = \[1\] .*one is needed for each",
    ),
    "no merges": ({"extra": {"tokenizer.ggml.merges": None}}, r"merges is missing: a list of texts"),
    "bos": (
        {"extra": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}},
        r"bos_token_id = 1000000 .*: a whole number from 0 to",
    ),
    "alignment": ({"extra": {"general.alignment": 0}}, r"general\.alignment = 0"),
    "missing": (
        {"without": ("model.layers.1.mlp.down_proj.weight",)},
        r"layers\.1\.mlp\.down_proj\.weight is missing",
    ),
    "misshapen": (
        {"instead": {"model.norm.weight": torch.zeros(63)}},
        r"model\.norm\.weight has shape \(63,\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_run_is_refused_by_name(what: str, tmp_path: Path) -> None:
    """The message has the file, and what is wrong with it."""
    changes, message = REFUSED[what]
    _, model, _ = both("llama")
    path = write_gguf(tmp_path / "a.gguf", model.config, random_tensors(model.config), **changes)
    with pytest.raises(ModelLoadError, match=rf"a\.gguf: .*{message}"):
        load(path)
