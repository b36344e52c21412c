"""Text to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from purestep.pure.errors import ModelLoadError

REPLACEMENT = "\ufffd"  # what decoders give for bytes that are no UTF-8
UNDECIDED = 3  # bytes of a UTF-8 character that lacks its end, at most
MOST_HELD = UNDECIDED * UNDECIDED  # tokens that may be behind as many replacement characters
PATIENCE = 8  # tokens to wait for the end of a character; more than any character has


@attrs.frozen
class Tokenizer:
    """A `tokenizers` tokenizer with the few methods that are needed here."""

    backend: Any  # tokenizers.Tokenizer
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, special tokens in it included, and what the model wants before a text."""
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

    A token may hold part of a character: it is held back until the text is whole again, or too many tokens
    have come for that. Tokens are decoded together with those of the piece before, as some decoders treat the
    first one in its own way, and never again; so a token costs the same however long the text is.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    _window: list[int] = attrs.field(factory=list)
    _num_context: int = 0  # tokens of the window that were given out, wholly
    _num_given: int = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the midst of a character."""
        if self.skip_special_tokens and token_id in self.tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._text()
        if not text.endswith(REPLACEMENT):
            piece = text[self._num_given :]
            self._restart(self._window[self._num_context :], given=True, num_held=0)
        elif len(self._window) - self._num_context < PATIENCE:
            piece = ""
        else:
            num_held = _num_undecided(text)
            piece = text[self._num_given : len(text) - num_held]
            self._restart(self._window[-MOST_HELD:], given=False, num_held=num_held)
        return piece

    def copy(self) -> "StreamDecoder":
        """Another one that has come as far."""
        window = list(self._window)
        return StreamDecoder(
            self.tokenizer, self.skip_special_tokens, window, self._num_context, self._num_given
        )

    def finish(self) -> str:
        """What was held back; nothing can complete it any more."""
        piece = self._text()[self._num_given :]
        self._restart([], given=True, num_held=0)
        return piece

    def _restart(self, window: list[int], *, given: bool, num_held: int) -> None:
        self._window, self._num_context = window, len(window) if given else 0
        self._num_given = max(len(self._text()) - num_held, 0)

    def _text(self) -> str:
        return self.tokenizer.decode(self._window, skip_special_tokens=self.skip_special_tokens)


def _num_undecided(text: str) -> int:
    """How many replacement characters at the end of `text` may yet become part of another character."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), UNDECIDED)


def tokenizer_from_file(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json.

    Raises:
        ModelLoadError: a file that can not be read.
    """
    from tokenizers import Tokenizer as Backend

    try:
        return wrap(Backend.from_file(str(path)))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"{path}: the tokenizers package can not read it: {error}") from error


def wrap(backend: Any) -> Tokenizer:
    """A tokenizers.Tokenizer as ours."""
    added = backend.get_added_tokens_decoder()
    return Tokenizer(backend=backend, special_ids=frozenset(i for i, token in added.items() if token.special))
