"""What the engine gives back."""

from collections.abc import Sequence
from itertools import count
from typing import overload

import attrs
import numpy as np
from jaxtyping import Float32, Int32

from purestep.pure.errors import InvalidRequestError, PurestepError
from purestep.pure.record import record
from purestep.pure.records.outputs import KeptMass, LogprobsTensors


@record
class SampleLogprobs:
    """Log-probabilities of one sample, a row per token.

    Column 0 is the sampled token, then come as many of the likeliest ones as were asked for.
    """

    token_ids: Int32[np.ndarray, "tokens candidates"]
    logprobs: Float32[np.ndarray, "tokens candidates"]
    ranks: Int32[np.ndarray, " tokens"]  # of the sampled token, 1 for the likeliest


@attrs.frozen
class Logprob:
    """A token's log-probability at one place."""

    logprob: float
    rank: int  # 1 for the likeliest; ties count against the prompt's own token


PromptEntry = dict[int, Logprob] | None


@attrs.frozen(eq=False)
class PromptLogprobs(Sequence[PromptEntry]):
    """A prompt's table as upstream gives it: per token, those of it and of the likeliest ones, None for the first.

    A row that was not computed is None too. An entry is made when it is looked at: a long prompt has many.

    Source: vllm/v1/engine/logprobs.py.
    """

    table: LogprobsTensors | None  # of every token but the first, on the host; None: there is no other

    def __len__(self) -> int:
        return 1 + (0 if self.table is None else len(self.table.selected_token_ranks))

    @overload
    def __getitem__(self, place: int) -> PromptEntry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[PromptEntry, ...]: ...
    def __getitem__(self, place: int | slice) -> PromptEntry | tuple[PromptEntry, ...]:
        if isinstance(place, slice):
            return tuple([self._entry(i) for i in range(len(self))[place]])
        return self._entry(range(len(self))[place])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, PromptLogprobs) else other)

    __hash__ = None  # type: ignore[assignment]  # its entries can be changed

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _entry(self, place: int) -> PromptEntry:
        if place == 0 or self.table is None:
            return None
        ids, values = (
            column[place - 1].tolist() for column in (self.table.logprob_token_ids, self.table.logprobs)
        )
        if ids[0] < 0:
            return None
        own = {ids[0]: Logprob(values[0], int(self.table.selected_token_ranks[place - 1]))}
        return own | dict(zip(ids[1:], map(Logprob, values[1:], count(1)), strict=False)) | own


@attrs.frozen
class CompletionOutput:
    """One sample of a prompt."""

    index: int  # which of the prompt's n samples
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop, length, abort, error; None while it runs
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for end-of-sequence
    error: PurestepError | None = None  # why its finish_reason is "error"
    logprobs: SampleLogprobs | None = None
    id_logprobs: Float32[np.ndarray, "tokens ids"] | None = None  # of logprob_token_ids, in their order
    kept_mass: KeptMass | None = None
    seconds: float = 0.0  # from its submission to its last token


@attrs.frozen
class RequestOutput:
    """A prompt with its samples; the fields of the first sample can be read from it directly."""

    req_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: PromptLogprobs | None = None  # per prompt token, once the whole prompt has run
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were found in the cache
    error: InvalidRequestError | None = None  # the request was refused; it has no outputs

    @property
    def finished(self) -> bool:
        """Whether no sample can grow any more."""
        return self.error is not None or all(o.finish_reason is not None for o in self.outputs)

    def _first(self) -> CompletionOutput:
        if self.error is not None:
            raise self.error
        return self.outputs[0]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self._first().text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's tokens."""
        return self._first().token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first sample ended."""
        return self._first().finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop id or stop string that ended the first sample."""
        return self._first().stop_reason

    @property
    def logprobs(self) -> SampleLogprobs | None:
        """The first sample's log-probabilities."""
        return self._first().logprobs

    @property
    def id_logprobs(self) -> Float32[np.ndarray, "tokens ids"] | None:
        """The first sample's log-probabilities of `logprob_token_ids`."""
        return self._first().id_logprobs

    @property
    def kept_mass(self) -> KeptMass | None:
        """What the first sample's tokens were drawn from."""
        return self._first().kept_mass

    @property
    def seconds(self) -> float:
        """From submission to the last token of the slowest sample."""
        return max((o.seconds for o in self.outputs), default=0.0)
