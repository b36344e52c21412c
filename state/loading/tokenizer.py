"""Text to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from purestep.pure.errors import ModelLoadError

UNDECIDED = 3  # bytes of a UTF-8 character that lacks its end
CONTEXT, WINDOW = 4, 12  # tokens


@attrs.frozen
class Tokenizer:
    """A `tokenizers` tokenizer with the few methods that are needed here."""

    backend: Any  # tokenizers.Tokenizer
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, special tokens in it included; with what the model wants before and after a text."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool = True) -> "StreamDecoder":
        """A decoder that is fed one token at a time."""
        return StreamDecoder(tokenizer=self, skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))


@attrs.define
class StreamDecoder:
    """Decodes a growing sequence; the pieces it gives, joined, are the text of all tokens.

    A token may hold part of a character, which is held back until it is whole. Only the last few tokens are
    ever decoded again, so a token costs the same however long the text is.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    _window: list[int] = attrs.field(factory=list)
    _num_given: int = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the midst of a character."""
        if self.skip_special_tokens and token_id in self.tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._text()
        end = max(self._num_given, _num_decided(text))
        piece, self._num_given = text[self._num_given : end], end
        if len(self._window) > WINDOW:
            # What is held back is part of one character, and lies in the last tokens.
            held = len(text) - end
            self._window = self._window[-CONTEXT:]
            self._num_given = max(len(self._text()) - held, 0)
        return piece

    def finish(self) -> str:
        """What was held back; nothing can complete it any more."""
        piece = self._text()[self._num_given :]
        self._window, self._num_given = [], 0
        return piece

    def _text(self) -> str:
        return self.tokenizer.decode(self._window, skip_special_tokens=self.skip_special_tokens)


def _num_decided(text: str) -> int:
    """How many characters of `text` no further token can change: replacement characters at its end may yet."""
    end = len(text)
    while end and len(text) - end < UNDECIDED and text[end - 1] == "\ufffd":
        end -= 1
    return end


def tokenizer_from_file(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises: ModelLoadError if it can not be read."""
    from tokenizers import Tokenizer as Backend

    try:
        return wrap(Backend.from_file(str(path)))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"{path}: the tokenizers package can not read it: {error}") from error


def wrap(backend: Any) -> Tokenizer:
    """A tokenizers.Tokenizer as ours."""
    added = backend.get_added_tokens_decoder()
    return Tokenizer(backend=backend, special_ids=frozenset(i for i, token in added.items() if token.special))
