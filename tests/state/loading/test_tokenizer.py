"""Streaming decode."""

from pathlib import Path

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.tokenizer import PATIENCE, Tokenizer, tokenizer_from_file, wrap

WORDS = [
    "▁the",
    "▁a",
    "n",
    "d",
    "▁",
    "é",
    "<0xE2>",
    "<0x82>",
    "<0xAC>",
    "<0xF0>",
    "<0x9F>",
    "<0x98>",
    "<0x80>",
    "</s>",
]


# SmolLM2 has no token for some bytes, and drops what is spelled with them.
KNOWN = st.characters(codec="utf-8", max_codepoint=0x1F7FF, exclude_categories=["Cc", "Cs", "Cn"])


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Words with a mark for the space before them, and bytes for what has no word."""
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(WORDS)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return wrap(backend)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = tokenizer.stream(skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@given(text=st.text(KNOWN, max_size=60))
def test_pieces_join_to_the_text_and_hold_whole_characters(smollm_tokenizer: Tokenizer, text: str) -> None:
    """Every prefix of the joined pieces is a prefix of the text: no half characters, none taken back."""
    ids = smollm_tokenizer.encode(text)
    given_out = stream(smollm_tokenizer, ids, skip=False)
    assert "".join(given_out) == text
    joined = ""
    for piece in given_out:
        joined += piece
        assert text.startswith(joined)


@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=60), skip=st.booleans())
def test_any_tokens_stream_to_what_they_decode_to(
    smollm_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    """Broken characters too: low ids are single bytes, most of which do not fit their neighbours."""
    pieces = stream(smollm_tokenizer, ids, skip=skip)
    assert "".join(pieces) == smollm_tokenizer.decode(ids, skip_special_tokens=skip)


@example(spelling="¬ĢŁééģâĤ")
@given(spelling=st.text("ĢģðŁâĤ¬éA", max_size=40))
def test_broken_bytes_stream_to_what_they_decode_to(smollm_tokenizer: Tokenizer, spelling: str) -> None:
    """Tokens of a byte each, mostly halves of characters: long runs that never become text."""
    ids = [i for i in map(smollm_tokenizer.backend.token_to_id, spelling) if i is not None]
    assert "".join(stream(smollm_tokenizer, ids)) == smollm_tokenizer.decode(ids)


@given(words=st.lists(st.sampled_from([*range(6), "€", "😀"]), max_size=40))
def test_words_and_bytes_stream_too(sentencepiece: Tokenizer, words: list[int | str]) -> None:
    """With a mark for spaces, and characters spelled as bytes."""
    spelled = {"€": [6, 7, 8], "😀": [9, 10, 11, 12]}
    ids = [i for word in words for i in (spelled[word] if isinstance(word, str) else [word])]
    pieces = stream(sentencepiece, ids)
    assert "".join(pieces) == sentencepiece.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte(sentencepiece: Tokenizer) -> None:
    """Three bytes of an emoji give nothing, the fourth gives it; what never ends comes out at the end."""
    decoder = sentencepiece.stream()
    assert [decoder.push(i) for i in (0, 9, 10, 11, 12)] == ["the", "", "", "", "😀"]
    assert [decoder.push(i) for i in (2, 6, 7)] == ["n", "", ""]
    assert decoder.finish() == "\ufffd\ufffd"
    assert decoder.finish() == ""


def test_a_token_costs_the_same_however_long_the_text(smollm_tokenizer: Tokenizer) -> None:
    """No decode ever sees more than a window of tokens, for good text and for bytes that never fit."""
    lengths: list[int] = []

    @attrs.frozen
    class Counting(Tokenizer):
        def decode(self, ids, *, skip_special_tokens=True):  # type: ignore[no-untyped-def, override]
            lengths.append(len(ids))
            return Tokenizer.decode(self, ids, skip_special_tokens=skip_special_tokens)

    counting = Counting(backend=smollm_tokenizer.backend, special_ids=smollm_tokenizer.special_ids)
    lone_byte = smollm_tokenizer.backend.token_to_id("Ģ")
    for ids in ([504, 3575] * 400, [lone_byte] * 800):
        assert len("".join(stream(counting, ids))) >= 800
    assert max(lengths) <= 2 * PATIENCE
    assert sum(lengths) < 2 * PATIENCE * 1600


def test_special_tokens_are_skipped_or_shown(smollm_tokenizer: Tokenizer) -> None:
    """As asked for."""
    ids = smollm_tokenizer.encode("<|im_start|>user<|im_end|>")
    assert "".join(stream(smollm_tokenizer, ids)) == "user"
    assert "".join(stream(smollm_tokenizer, ids, skip=False)) == "<|im_start|>user<|im_end|>"


def test_files(smollm_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A tokenizer.json gives the tokenizer that was saved; another file is refused by name."""
    smollm_tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    again = tokenizer_from_file(tmp_path / "tokenizer.json")
    text = "<|im_start|>user\nIn 1969<|im_end|>"
    assert again.encode(text) == smollm_tokenizer.encode(text)
    assert again.special_ids == smollm_tokenizer.special_ids and again.vocab_size == 49152
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"bad\.json"):
        tokenizer_from_file(tmp_path / "bad.json")
