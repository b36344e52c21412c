"""Hugging Face folders."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from purestep.pure.errors import ModelLoadError
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.loading.huggingface import load_folder
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.tokenizer import Tokenizer
from tests.pure.models.families import both, random_ids, theirs
from tests.pure.models.paging import logits_of, paging, whole

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> LoadedModel:
    return load_folder(folder, dtype=dtype, device=CPU, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny saved Qwen2, in one file."""
    both("qwen2")[0].save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_checkpoints_compute_what_transformers_computes(name: str, models_dir: Path) -> None:
    """Logits of a packed batch, within 2e-5 of the largest."""
    loaded = load(models_dir / name)
    module = transformers.AutoModelForCausalLM.from_pretrained(models_dir / name).eval()
    ids = random_ids([13, 5])
    found = logits_of(loaded.model, loaded.params, ids, whole([13, 5]), paging([13, 5]), torch.float32)
    for got, i in zip(found, ids, strict=True):
        with torch.no_grad():
            want = module(i[None]).logits[0]
        assert (got - want).abs().max() < 2e-5 * want.abs().max()
    assert loaded.name == name and loaded.eos_token_ids == (2,)
    assert loaded.tokenizer is None and loaded.chat_template is None


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-bart", "tiny-gemma3"])
def test_other_architectures_are_refused(name: str, models_dir: Path) -> None:
    """By the name that their config gives."""
    architecture = json.loads((models_dir / name / "config.json").read_text())["architectures"][0]
    with pytest.raises(
        ModelLoadError, match=rf"{name}/config\.json: unknown architecture {architecture}; known"
    ):
        load(models_dir / name)


def test_shards_are_put_together(folder: Path) -> None:
    """With an index, and without one, the tree is that of the single file."""
    expected = tree_leaves(load(folder).params)
    theirs("qwen2").save_pretrained(folder.parent / "shards", max_shard_size="50KB")
    shards = folder.parent / "shards"
    assert len(list(shards.glob("*.safetensors"))) > 2
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(load(shards).params), expected, strict=True))
        (shards / "model.safetensors.index.json").unlink(missing_ok=True)


def test_dtype_is_the_configs_unless_asked_for(folder: Path) -> None:
    """As the config says in either spelling, else as stored; any other on demand."""
    assert load(folder).params.tree["embed"].dtype == torch.float32
    assert load(folder, torch.float64).params.tree["layers"][0]["qkv"].dtype == torch.float64
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop("dtype", None)
        (folder / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
        assert {leaf.dtype for leaf in tree_leaves(load(folder).params)} == {torch.bfloat16}
        (folder / "config.json").write_text(json.dumps(config | {key: "float8"}))
        with pytest.raises(ModelLoadError, match=rf"config\.json: {key} = 'float8' is not supported"):
            load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert {leaf.dtype for leaf in tree_leaves(load(folder).params)} == {torch.float32}


def test_what_generation_config_says(folder: Path) -> None:
    """Its end-of-sequence ids are added to the config's, its advice is kept."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    generation = {
        "eos_token_id": [7, 5],
        "temperature": 0.6,
        "top_p": None,
        "do_sample": True,
        "max_new_tokens": 9,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    loaded = load(folder)
    assert loaded.eos_token_ids == (5, 7)
    assert loaded.generation_defaults == {"temperature": 0.6, "max_tokens": 9}
    SamplingParams(**loaded.generation_defaults)
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == (5,)


def test_tokenizer_and_templates(folder: Path, smollm_tokenizer: Tokenizer) -> None:
    """tokenizer.json; the template in tokenizer_config.json, alone or named; chat_template.jinja before both."""
    smollm_tokenizer.backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": "one"}))
    loaded = load(folder)
    assert loaded.tokenizer is not None and loaded.tokenizer.encode("The") == [504]
    assert loaded.chat_template == "one"
    named = [{"name": "tools", "template": "two"}, {"name": "default", "template": "three"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert load(folder).chat_template == "three"
    (folder / "chat_template.jinja").write_text("four")
    assert load(folder).chat_template == "four"
    path.write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}))
    (folder / "chat_template.jinja").unlink()
    assert load(folder).chat_template is None
    assert load(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Put other tensors in the folder's file; None takes one out."""
    path = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()} | {
        key: value for key, value in changes.items() if value is not None
    }
    save_file({key: value for key, value in tensors.items() if changes.get(key, value) is not None}, path)


def test_wrong_tensors_are_named_with_their_file(folder: Path) -> None:
    """Missing, misshapen, unexpected, quantised."""
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            r"tiny: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        (
            {"model.norm.weight": torch.zeros(3)},
            r"model\.safetensors: tensor model\.norm\.weight has shape \(3,\)",
        ),
        ({"model.more": torch.zeros(3)}, r"model\.safetensors: tensor model\.more has no place"),
        (
            {"model.norm.weight": torch.zeros(64, dtype=torch.int8)},
            r"model\.safetensors: tensor model\.norm\.weight is stored as I8",
        ),
    ]
    original = (folder / "model.safetensors").read_bytes()
    for changes, message in cases:
        change(folder, **changes)
        with pytest.raises(ModelLoadError, match=message):
            load(folder)
        (folder / "model.safetensors").write_bytes(original)
    load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    """Cut in its header or in its data."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated or damaged"):
        load(folder)


def test_an_absent_shard_is_named(folder: Path) -> None:
    """The index names a file that is not there."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelLoadError, match=r"b\.safetensors does not exist, though model\.safetensors\.index\.json"
    ):
        load(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    """Which of them would be meant is not known."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"].clone()}, folder / "b.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"b\.safetensors: tensor model\.norm\.weight is in another file"
    ):
        load(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    """Not even when there is nothing else; a folder without any weights is another message."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file"):
        load(folder)
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError, match=r"pickled \(pytorch_model\.bin\), and a pickle can run any code"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("{", "not JSON"), ("[]", "holds a list")]
)
def test_a_bad_config_is_named(folder: Path, content: str | None, message: str) -> None:
    """Absent, broken, or something else."""
    path = folder / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelLoadError, match=rf"config\.json:? {message}"):
        load(folder)


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "template": ("chat_template.jinja", b"caf\xe9", "not UTF-8 from byte 3 on"),
    "config bytes": ("config.json", b'{"a": "\xff"}', "not UTF-8 from byte 7 on"),
    "long number": ("config.json", b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    "deep list": ("config.json", b"[" * 200_000, "not JSON"),
    "tokenizer bytes": ("tokenizer.json", b'{"a": "\xff"}', "the tokenizers package can not read it"),
    "template kind": ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template = 5 .*: a text"),
    "template names": ("tokenizer_config.json", b'{"chat_template": [{}]}', r"chat_template = \[\{\}\]"),
    "token": ("tokenizer_config.json", b'{"eos_token": ["</s>"]}', r"eos_token = \['</s>'\] .*: a text"),
    "advice": ("generation_config.json", b'{"top_p": "0.9"}', "top_p = '0.9' .*: a number"),
    "ids": ("generation_config.json", b'{"eos_token_id": "2"}', "eos_token_id = '2' .*: a whole number"),
    "index": (
        "model.safetensors.index.json",
        b'{"weight_map": ["a"]}',
        r"weight_map = \['a'\] .*: an object",
    ),
    "no map": ("model.safetensors.index.json", b"{}", "weight_map is missing"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_damaged_file_is_named_with_what_is_wrong_in_it(folder: Path, what: str) -> None:
    """Bytes that are no text, JSON that can not be read, values of the wrong kind."""
    name, content, message = BAD_FILES[what]
    (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"{re.escape(name)}: {message}"):
        load(folder)
