"""Peers compute what we compute, from configs that say what ours say."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import BenchmarkError
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig, RopeScaling
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.state.bench.engines import generator_of
from purestep.state.bench.hf import hf_config
from purestep.state.bench.methods import SAMPLINGS, random_prompts
from purestep.state.bench.peers import Room, installed, open_transformers, open_vllm
from purestep.state.bench.shapes import SHAPES, Subject, load
from purestep.state.engine import Engine
from purestep.state.loading.hf_config import hf_model_config
from purestep.state.loading.loaded import LoadedModel
from tests.state.bench.fakes import TINY

ROOM = Room(num_requests=4, length=64)
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


BIASES = {  # of q, k, v and of the output, as the families can have them
    "llama": ((False, False), (True, True)),
    "qwen2": ((True, False),),
    "qwen3": ((False, False), (True, True)),
}


@given(
    family=st.sampled_from(sorted(BIASES)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(BIASES[name]))
    ),
    kv_heads=st.integers(1, 3),
    sizes=st.tuples(*[st.integers(8, 64)] * 4),
    scaled=st.booleans(),
    tied=st.booleans(),
    theta=st.sampled_from((1e4, 5e5)),
)
def test_a_config_comes_back_as_it_was(
    family: tuple[str, tuple[bool, bool]],
    kv_heads: int,
    sizes: tuple[int, ...],
    scaled: bool,
    tied: bool,
    theta: float,
) -> None:
    name, (qkv_bias, out_bias) = family
    config = ModelConfig(
        vocab_size=sizes[0],
        hidden_size=sizes[1],
        intermediate_size=sizes[2],
        num_layers=2,
        attention=AttentionConfig(
            num_heads=2 * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=4,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=name == "qwen3",
        ),
        rope=RopeConfig(theta=theta, scaling=SCALING if scaled else None),
        rms_norm_eps=1e-5,
        tied_embeddings=tied,
        max_position_embeddings=sizes[3],
    )

    written = json.loads(json.dumps(hf_config(config)))

    assert written["model_type"] == name
    assert hf_model_config(written, source="config") == config


def test_a_window_is_refused() -> None:
    tiny = SHAPES["tiny"]
    windowed = replace(tiny, attention=replace(tiny.attention, sliding_window=(8,) * tiny.num_layers))

    with pytest.raises(BenchmarkError, match="--no-peers"):
        hf_config(windowed)


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"qkv_bias": True}],
    ids=["llama", "qwen3", "qwen2"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_gives_our_tokens_from_our_weights(changes: dict[str, bool], tied: bool) -> None:
    tiny = SHAPES["tiny"]
    config = replace(tiny, tied_embeddings=tied, attention=replace(tiny.attention, **changes))
    loaded = LoadedModel("tiny", llama(config), random_params(config, seed=1, std=0.3))
    prompts = random_prompts(config.vocab_size, 3, 12, seed=0)
    with Engine(loaded, max_model_len=64, kv_cache_bytes=2**20) as engine:
        expected = [list(own) for own in generator_of(engine)(prompts, 8, SAMPLINGS["decode"])]

    with open_transformers(TINY, lambda: loaded, ROOM) as generate:
        found = [list(generate(prompts, n, SAMPLINGS["decode"])[0]) for n in (8, 4, 8)]
        sampled = generate(prompts, 8, SAMPLINGS["sampled"])
        every = generate(prompts, 8, SAMPLINGS["decode"])

    assert found == [expected[0], expected[0][:4], expected[0]]
    assert every == expected
    assert [len(own) for own in sampled] == [8, 8, 8] and sampled != expected


def test_transformers_reads_our_weights_where_they_lie() -> None:
    loaded = load(TINY)
    pointers = []
    module_type = torch.nn.Module
    with open_transformers(TINY, lambda: loaded, ROOM) as generate:
        for cell in generate.__closure__:  # type: ignore[attr-defined]
            if isinstance(cell.cell_contents, module_type):
                pointers = [weight.data_ptr() for weight in cell.cell_contents.parameters()]

    tree = loaded.params.tree
    assert tree["embed"].data_ptr() in pointers
    assert all(layer["down"].data_ptr() in pointers for layer in tree["layers"])


def test_peers_are_those_that_can_be_imported() -> None:
    names = [own.name for own in installed()]

    assert "transformers" in names
    assert all(own.version for own in installed())


class FakeVllm:
    """Stands in for the package: keeps what it is asked."""

    def __init__(self, device_type: str) -> None:
        self.settings: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.num_shutdowns = 0
        core = SimpleNamespace(shutdown=self.shutdown)
        self.llm_engine = SimpleNamespace(engine_core=core)
        self.platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=device_type))

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def make(self, **settings: Any) -> "FakeVllm":
        self.settings = settings
        self.config = json.loads((Path(settings["model"]) / "config.json").read_text())
        return self

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params))
        output = SimpleNamespace(token_ids=[1] * params["max_tokens"])
        return [SimpleNamespace(outputs=[output]) for _ in prompts]


def installed_vllm(monkeypatch: pytest.MonkeyPatch, device_type: str) -> FakeVllm:
    fake = FakeVllm(device_type)
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = fake.make, dict
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = fake.platforms.current_platform
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return fake


def test_vllm_is_given_the_shape_and_the_room_and_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = installed_vllm(monkeypatch, "cpu")

    with open_vllm(TINY, lambda: load(TINY), ROOM) as generate:
        tokens = generate([[1, 2]], 3, SAMPLINGS["sampled"])

    assert tokens == [[1, 1, 1]]
    assert hf_model_config(fake.config, source="config") == SHAPES["tiny"]
    wanted = {"load_format": "dummy", "max_model_len": 64, "max_num_seqs": 4, "dtype": "float32"}
    assert wanted.items() <= fake.settings.items()
    ((prompts, params),) = fake.asked
    assert prompts == [{"prompt_token_ids": [1, 2]}]
    assert params["ignore_eos"] and not params["detokenize"] and params["top_k"] == 50
    assert fake.num_shutdowns == 1
    assert not Path(fake.settings["model"]).exists()


def test_vllm_reads_a_folder_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = installed_vllm(monkeypatch, "cpu")
    (tmp_path / "config.json").write_text("{}")

    with open_vllm(Subject(model=str(tmp_path)), lambda: load(TINY), ROOM):
        pass

    assert (fake.settings["model"], fake.settings["load_format"]) == (str(tmp_path), "auto")


@pytest.mark.parametrize(
    ("subject", "device_type", "why"),
    [(TINY, "cuda", "built for cuda"), (Subject(), "cpu", "folders and named shapes")],
)
def test_what_vllm_can_not_do_is_a_named_error(
    subject: Subject, device_type: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_vllm(monkeypatch, device_type)

    with pytest.raises(BenchmarkError, match=why), open_vllm(subject, lambda: load(TINY), ROOM):
        pass
