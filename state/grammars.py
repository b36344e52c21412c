"""`Grammars`: structured output by xgrammar, the masks of the coming tokens.

Where a sample is in its grammar is a fold over its accepted outputs, and nothing else: the matcher that folds is moved
to whatever history it is asked about, back or forth. So chunks, preemption, forks and rewinding need no code.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
from jaxtyping import Int32
from numpy.typing import NDArray

from purestep.pure.errors import GrammarError
from purestep.pure.records.structured_outputs import StructuredOutputsParams
from purestep.state.json_schema import check_schema
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.tokenizer import Tokenizer

CACHE_BYTES = 512 * 2**20  # of compiled grammars
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\0": r'" "\0" "'})
NOTHING = np.zeros(0, np.int32)
PATIENCE = 100  # tokens that are tried to find a text of min_tokens, some 50 us each


@attrs.frozen
class Matching:
    """A matcher, and the outputs that it has accepted."""

    params: StructuredOutputsParams
    matcher: Any
    accepted: NDArray[np.int32]


class Grammars:
    """Grammars over a model's tokenizer, whose texts its end-of-sequence ids alone can end."""

    def __init__(self, loaded: LoadedModel, *, vocab_size: int) -> None:
        self._tokenizer = loaded.tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = loaded.eos_token_ids
        self._compiler: Any = None  # xgrammar's, once somebody needs it
        self._matchers: dict[int, Matching] = {}  # by sample

    def compile(self, params: StructuredOutputsParams) -> Any:
        """The compiled grammar; the same ones again cost microseconds.

        Raises:
            GrammarError: one that can not be compiled, a model that none can be compiled for, or no xgrammar.
        """
        if self._compiler is None:
            self._compiler = self._new_compiler()
        name, value = params.form
        if name == "json":
            check_schema(value)
        compilers = {
            "json": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "choice": lambda texts: self._compiler.compile_grammar(one_of(texts)),
            "grammar": self._compiler.compile_grammar,
        }
        try:
            return compilers[name](value)
        except Exception as error:  # xgrammar raises RuntimeError and kinds of its own
            reason = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
            raise GrammarError(
                f"structured_outputs: {name}={value!r} can not be compiled: {reason}"
            ) from None

    def check(self, params: StructuredOutputsParams, *, min_tokens: int) -> None:
        """Compile the grammar, and refuse one that leaves no token where one is needed, as far as that is soon seen.

        What is not seen here ends in the step that finds no token.

        Raises:
            GrammarError: as `compile`; a grammar that allows no text, or only texts of fewer than `min_tokens` tokens.
        """
        compiled, (name, value) = self.compile(params), params.form
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(compiled)
        if not len(self._choices(matcher)):
            raise GrammarError(
                f"structured_outputs: {name}={value!r} allows no text of this model's tokens, not even an empty one: "
                "give a form that some text has"
            )
        is_short = name == "choice" and max(len(text.encode()) for text in value) < min_tokens
        if is_short or not self._may_last(matcher, min_tokens):
            raise GrammarError(
                f"structured_outputs: {name}={value!r} with min_tokens={min_tokens}: every text that it allows has "
                f"fewer tokens, and nothing may follow it: lower min_tokens, or allow longer texts"
            )

    def _choices(self, matcher: Any) -> NDArray[np.int32]:
        """The tokens that may come next, the end of the text among them."""
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        matcher.fill_next_token_bitmask(mask[None])
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size]
        return np.flatnonzero(bits).astype(np.int32)

    def _may_last(self, matcher: Any, num_tokens: int) -> bool:
        """Whether a text may have so many tokens before its end: searched in depth, and yes where patience ends."""

        def further() -> Iterator[int]:
            return iter(np.setdiff1d(self._choices(matcher), self._eos_token_ids).tolist())

        ways, num_tried = [further()], 0  # of going on, behind each token of the text so far
        while 0 < len(ways) <= num_tokens and num_tried < PATIENCE:
            token = next(ways[-1], None)
            if token is not None:
                matcher.accept_token(token)
                ways.append(further())
                num_tried += 1
                continue
            ways.pop()
            if ways:
                matcher.rollback(1)
        return len(ways) > 0

    def masks(
        self,
        sample: int,
        params: StructuredOutputsParams,
        outputs: Int32[np.ndarray, " outputs"],
        drafts: Int32[np.ndarray, " drafts"],
        into: Int32[np.ndarray, "places words"],
    ) -> int:
        """Set the bits of the tokens that the grammar allows behind these outputs, and behind each draft that follows.

        Returns how many masks these are, 1 + drafts at most: behind a draft that the grammar refuses no token will ever
        stand, and behind the grammar's end any may. `sample` is a number that nobody else has now.

        Raises:
            GrammarError: outputs that the grammar does not allow.
        """
        known = self._matchers.pop(sample, None)  # it comes back when it is in order
        if known is None or known.params != params:  # a rewind gives numbers anew
            from xgrammar import GrammarMatcher

            known = Matching(params, GrammarMatcher(self.compile(params)), NOTHING)
        matcher = known.matcher
        num_accepted = _move(matcher, known.accepted, outputs)
        num_masks = _mask_along(matcher, drafts, into)
        self._matchers[sample] = Matching(params, matcher, outputs[:num_accepted])
        return num_masks

    def forget(self, *, but: Callable[[int], bool]) -> None:
        """Drop the matchers of all other samples; one that is asked for again begins anew."""
        for sample in [sample for sample in self._matchers if not but(sample)]:
            del self._matchers[sample]

    def _new_compiler(self) -> Any:
        if not self._eos_token_ids:
            raise GrammarError(
                "structured_outputs: this model names no end-of-sequence id, and only that can end a grammar's text: "
                "give a model that does"
            )
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, Tokenizer):
            raise GrammarError(
                f"structured_outputs: the tokenizer is {tokenizer!r}, and a grammar needs the texts of all "
                "tokens: give a model with a tokenizer of the tokenizers package"
            )
        try:
            import xgrammar
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise GrammarError(
                f"structured_outputs: the package {error.name} is not installed: pip install xgrammar"
            ) from error
        stops = list(self._eos_token_ids)
        kind = xgrammar.TokenizerInfo.from_huggingface(
            PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend),  # type: ignore[no-untyped-call]
            vocab_size=self._vocab_size,
            stop_token_ids=stops,
        )
        tokens = [""] * self._vocab_size  # what has no text, as special tokens do, is in no grammar's text
        for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
            if token_id < self._vocab_size and token_id not in tokenizer.special_ids:
                tokens[token_id] = token
        info = xgrammar.TokenizerInfo(
            tokens,
            kind.vocab_type,
            vocab_size=self._vocab_size,
            stop_token_ids=stops,
            add_prefix_space=kind.add_prefix_space,
        )
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)


def _move(matcher: Any, accepted: NDArray[np.int32], outputs: NDArray[np.int32]) -> int:
    """Bring the matcher from what it has accepted to these outputs, or to its end; how many it has accepted then."""
    place = common_length(accepted, outputs)
    if place < len(accepted):
        matcher.rollback(len(accepted) - place)
    while place < len(outputs) and not matcher.is_terminated():
        if not matcher.accept_token(int(outputs[place])):
            raise GrammarError(
                f"structured_outputs: output {place} is token {outputs[place]}, which the grammar does not allow "
                f"behind the {place} tokens before it"
            )
        place += 1
    return place


def _mask_along(matcher: Any, drafts: NDArray[np.int32], into: NDArray[np.int32]) -> int:
    """Fill masks while the drafts stand and the grammar is open; the matcher is where it was when that is done."""
    num_accepted = 0
    while is_open := not matcher.is_terminated():
        mask = into[num_accepted]
        matcher.fill_next_token_bitmask(mask[None])
        if num_accepted == len(drafts) or not _allows(mask, int(drafts[num_accepted])):
            break
        matcher.accept_token(int(drafts[num_accepted]))
        num_accepted += 1
    if num_accepted:
        matcher.rollback(num_accepted)
    return num_accepted + is_open


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a mask has the token's bit. A matcher that is given a token without says so on stderr."""
    return bool(mask[token // 32] >> token % 32 & 1)


def one_of(texts: tuple[str, ...]) -> str:
    """A grammar of just these texts."""
    return "root ::= " + " | ".join(f'"{text.translate(ESCAPES)}"' for text in texts)


def common_length(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """How many entries two columns have in common from the front."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
