"""Tokenizers built from GGUF metadata."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.fields import Fields
from purestep.state.loading.gguf_tokenizer import LLAMA_3, QWEN_2, gguf_special_tokens, gguf_tokenizer
from purestep.state.loading.tokenizer import Tokenizer

# SmolLM2 has no token for some bytes, and drops what is spelled with them.
KNOWN = st.characters(codec="utf-8", max_codepoint=0x1F7FF, exclude_categories=["Cc", "Cs", "Cn"])
TOKENS = ["<bos>", "<|tool|>", *"abcdefgh'ls0123456789 ", "Ġ", "ab", "Ġa", "12"]


def metadata(**changes: Any) -> Fields:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(TOKENS) - 2),
        "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Fields(values, "here: metadata ")


def pieces(text: str, **changes: Any) -> list[str]:
    tokenizer = gguf_tokenizer(metadata(**changes))
    return [TOKENS[i] for i in tokenizer.encode(text)]


def test_recorded_prompts(smollm_tokenizer: Tokenizer, e2e_dir: Path) -> None:
    """Every recorded prompt gives the recorded ids, and these give the prompt again."""
    prompts = json.loads((e2e_dir / "prompts.json").read_text())
    for prompt in prompts:
        ids = prompt["prompt_token_ids"]
        assert smollm_tokenizer.encode(prompt["text"]) == ids
        assert smollm_tokenizer.decode(ids, skip_special_tokens=False) == prompt["text"]
    assert len(prompts) == 8


@given(text=st.text(KNOWN))
def test_decoding_undoes_encoding(smollm_tokenizer: Tokenizer, text: str) -> None:
    """Byte-level tokens hold every text that is spelled with bytes of the vocabulary."""
    assert smollm_tokenizer.decode(smollm_tokenizer.encode(text), skip_special_tokens=False) == text


def test_merges_digits_and_special_tokens() -> None:
    """SmolLM splits digits; control tokens are special, user-defined ones only never split."""
    assert pieces("ab a12<|tool|>") == ["ab", "Ġa", "1", "2", "<|tool|>"]
    assert pieces("ab12", pre="qwen2") == ["ab", "1", "2"]
    assert pieces("ab12", pre="llama-bpe") == ["ab", "12"]
    tokenizer = gguf_tokenizer(metadata())
    assert tokenizer.special_ids == {0}
    assert tokenizer.decode([0, 1, 2]) == "<|tool|>a"


def test_a_beginning_is_added_where_the_model_wants_it() -> None:
    """Unless it is not wanted now, as in a chat template's text."""
    assert pieces("ab", add_bos_token=True) == ["<bos>", "ab"]
    tokenizer = gguf_tokenizer(metadata(add_bos_token=True))
    assert tokenizer.encode("ab", add_special_tokens=False) == [TOKENS.index("ab")]


def test_special_tokens_by_name() -> None:
    """As far as the metadata has them; an id outside the vocabulary names nothing."""
    known = metadata(eos_token_id=1, padding_token_id=10**6)
    assert gguf_special_tokens(known) == {"bos_token": "<bos>", "eos_token": "<|tool|>"}


def test_patterns_are_the_published_ones() -> None:
    """As transformers has them."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert PRETOKENIZE_REGEX.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "") == QWEN_2.replace(
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)", ""
    )
    assert LLAMA_3 in (TikTokenConverter.__init__.__defaults__ or ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model = 'llama' is not supported: only 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model = None"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre = 'tekken' .*smollm, llama-bpe and qwen2 are known"),
        ({"merges": ["a z"]}, "the tokenizers package can not build it: .*out of vocabulary"),
        ({"merges": ["ab"]}, "the tokenizers package can not build it"),
    ],
)
def test_other_kinds_are_refused(changes: dict[str, Any], message: str) -> None:
    """With the remedy: give the model's tokenizer.json."""
    with pytest.raises(ModelLoadError, match=rf"here: .*{message}.*tokenizer\.json"):
        gguf_tokenizer(metadata(**changes))
