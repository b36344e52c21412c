"""config.json as a ModelConfig."""

from typing import Any

import pytest
import transformers

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import RopeConfig, RopeScaling
from purestep.state.loading.hf_config import hf_model_config

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 7],
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**changes: Any) -> Any:
    return hf_model_config(PLAIN | changes, source="here")


def test_a_plain_config() -> None:
    """Every number lands in its place; what is not said takes the family's default."""
    made = config()
    sizes = made.vocab_size, made.hidden_size, made.intermediate_size, made.num_layers
    assert sizes == (100, 64, 96, 4)
    shape = made.attention
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 2, 8)
    assert not (shape.qkv_bias or shape.out_bias or shape.qk_norm or made.tied_embeddings)
    assert shape.sliding_window is None and shape.window_of(3) is None
    assert made.rope == RopeConfig(theta=10000.0) and made.eos_token_ids == (2, 7)


def test_rotary_embedding_before_and_since_transformers_5() -> None:
    """The same in both spellings, and in the oldest one."""
    scaling = RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    wanted = RopeConfig(theta=5e5, scaling=scaling)
    assert config(rope_parameters=LLAMA_3 | {"rope_theta": 5e5}).rope == wanted
    assert config(rope_theta=5e5, rope_scaling=LLAMA_3).rope == wanted
    assert config(rope_theta=5e5, rope_scaling={**LLAMA_3, "type": "llama3"}).rope == wanted
    assert config(rope_theta=5e5, rope_scaling=None).rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...] | None) -> None:
    """Mistral's for all layers, Qwen's for some and only if asked for, Llama's never."""
    assert config(**changes).attention.sliding_window == windows


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_saved_configs_are_understood(name: str) -> None:
    """As transformers writes them, with nothing but its defaults."""
    theirs = getattr(transformers, f"{name}Config")()
    made = hf_model_config(theirs.to_dict() | {"architectures": None}, source="here")
    assert made.attention.num_kv_heads == theirs.num_key_value_heads
    assert made.attention.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert made.attention.qk_norm == (name == "Qwen3") and made.attention.qkv_bias == (name == "Qwen2")


def test_old_llamas_do_not_say_how_many_key_heads() -> None:
    """Each head has its own then; other families always say."""
    old = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    assert hf_model_config(old, source="here").attention.num_kv_heads == 8
    with pytest.raises(ModelLoadError, match="here: num_key_value_heads is missing"):
        hf_model_config(old | {"architectures": ["Qwen2ForCausalLM"]}, source="here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "unknown architecture MambaForCausalLM; known are Llama"),
        ({"architectures": None, "model_type": "bert"}, "unknown architecture bert"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type = 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], message: str) -> None:
    """By name: never computed in another way than its makers meant."""
    with pytest.raises(ModelLoadError, match=f"here: .*{message}"):
        config(**changes)


def test_ids() -> None:
    """None, one or several."""
    given: list[Any] = [None, 3, [3, 4]]
    assert [config(eos_token_id=ids).eos_token_ids for ids in given] == [(), (3,), (3, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": "100"},
            "vocab_size = '100' .*: a whole number from 1 to 2147483647 is needed; correct it",
        ),
        ({"hidden_size": 64.0}, "hidden_size = 64.0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 .*: a whole number from 1 to 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True"),
        ({"head_dim": -8}, "head_dim = -8"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id = \[2, -1\]"),
        (
            {"eos_token_id": "</s>"},
            "eos_token_id = '</s>' .*: a whole number from 0 to 2147483647, or a list",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan .*: a number above 0 is needed"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 .*: true or false is needed"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' .*: a list of texts"),
        ({"architectures": None, "model_type": 3}, "model_type = 3 .*: a text"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\] .*: an object"),
        (
            {"rope_scaling": LLAMA_3 | {"high_freq_factor": 1.0}},
            "high_freq_factor = 1.0 .*: a number above 1",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 9, "use_sliding_window": True}
            | {"layer_types": ["full_attention"]},
            "layer_types = .*: each of 4 layers",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(changes: dict[str, Any], message: str) -> None:
    """The file, the key, what was found, and what is needed."""
    with pytest.raises(ModelLoadError, match=f"here: .*{message}"):
        config(**changes)
