"""Whatever a model's files say, it is loaded, or refused with the file named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.gguf_model import load_gguf
from purestep.state.loading.huggingface import load_folder
from tests.profiles import examples
from tests.pure.models.families import LLAMA_3, QWEN_WINDOW, both, theirs
from tests.state.loading.gguf_files import random_tensors, write_gguf

CPU = torch.device("cpu")
GENERATION = {
    "eos_token_id": [2],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
    "max_new_tokens": 9,
}
TOKENIZER = {"chat_template": "{{ x }}", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
INDEX = {"weight_map": {"model.norm.weight": "model.safetensors"}}
OF_CONFIG = {"dtype": "float32", "torch_dtype": "float32", "hidden_act": "silu", "layer_types": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama 3 scaling": {"rope_parameters": LLAMA_3},
    "mistral": {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": LLAMA_3},
    "qwen2 with a window in its second layer": QWEN_WINDOW,
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 2},
}
ABSENT = object()
WHOLE = st.one_of(st.integers(-3, 200), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 10**30]))
PLAIN = st.one_of(st.none(), st.booleans(), WHOLE, st.floats(), st.text(max_size=4))
JSON = st.one_of(
    st.just(ABSENT),
    st.recursive(
        PLAIN,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each family."""
    found = {}
    for i, family in enumerate(FAMILIES):
        found[family] = tmp_path_factory.mktemp("damaged") / f"family{i}"
        theirs(family).save_pretrained(found[family])
    return found


def changed(content: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The object with one value replaced, or left out."""
    key, *rest = keys
    if rest:
        return content | {key: changed(content[key], tuple(rest), value)}
    return {k: v for k, v in (content | {key: value}).items() if v is not ABSENT}


def paths(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every key, and those of the objects inside."""
    inner = [
        (key, *path) for key, value in content.items() if isinstance(value, dict) for path in paths(value)
    ]
    return [*((key,) for key in content), *inner]


@examples(2)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_a_folder_with_one_value_replaced_is_loaded_or_refused(
    folders: dict[str, Path], data: st.DataObject, family: str
) -> None:
    """In any of its JSON files, at any depth, by any JSON."""
    folder = folders[family]
    config = folder / "config.json"
    contents = {
        config: json.loads(config.read_text()) | OF_CONFIG | FAMILIES[family],
        folder / "generation_config.json": GENERATION,
        folder / "tokenizer_config.json": TOKENIZER,
        folder / "model.safetensors.index.json": INDEX,
    }
    path = data.draw(st.just(config) | st.sampled_from(sorted(contents)))
    keys = data.draw(st.sampled_from(paths(contents[path])))
    original = config.read_bytes()
    for other, content in contents.items():
        other.write_text(json.dumps(changed(content, keys, data.draw(JSON)) if other == path else content))
    try:
        load_folder(folder, dtype=None, device=CPU)
    except ModelLoadError as error:
        assert str(folder) in str(error)
    finally:
        config.write_bytes(original)


CONFIG = both("llama")[1].config
TENSORS = random_tensors(CONFIG)
METADATA = (
    *("general.architecture", "general.name", "general.alignment"),
    *(f"llama.{key}" for key in ("block_count", "context_length", "embedding_length", "feed_forward_length")),
    *(f"llama.attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    *("llama.attention.layer_norm_rms_epsilon", "llama.attention.sliding_window", "llama.rope.freq_base"),
    *("llama.rope.dimension_count", "llama.rope.scaling.type", "llama.expert_count", "llama.vocab_size"),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", "add_bos_token")),
    *(f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "eot", "unknown", "padding")),
    "tokenizer.chat_template",
)
NUMBER = st.one_of(st.integers(-3, 200), st.integers(-(2**63), 2**63 - 1), st.just(2**63))
GGUF_PLAIN = (st.booleans(), NUMBER, st.floats(), st.text(max_size=4))
GGUF_LISTS = [
    st.lists(kind, min_size=1, max_size=4)
    for kind in (st.booleans(), st.integers(-3, 2**31), st.floats(), st.text(max_size=4))
]


@examples(2)
@given(key=st.sampled_from(METADATA), value=st.one_of(st.none(), *GGUF_PLAIN, *GGUF_LISTS))
@example(key="llama.block_count", value=2**63)
@example(key="tokenizer.ggml.pre", value=["smollm"])
def test_a_gguf_file_with_one_value_replaced_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    """By any value of any type, or by nothing."""
    extra = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0} | {key: value}
    path = write_gguf(tmp_path_factory.getbasetemp() / "changed.gguf", CONFIG, TENSORS, extra=extra)
    try:
        load_gguf(path, dtype=torch.float32, device=CPU)
    except ModelLoadError as error:
        assert "changed.gguf: " in str(error)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("whole") / "whole.gguf", CONFIG, TENSORS).read_bytes()


@examples(2)
@given(damage=st.lists(st.tuples(st.integers(4, 2200), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_gguf_file_with_bytes_replaced_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, damage: list[tuple[int, int]]
) -> None:
    """Anywhere in its metadata."""
    path, content = tmp_path_factory.getbasetemp() / "bytes.gguf", bytearray(whole)
    for place, byte in damage:
        content[place] = byte
    path.write_bytes(content)
    try:
        load_gguf(path, dtype=torch.float32, device=CPU)
    except ModelLoadError as error:
        assert "bytes.gguf: " in str(error)
