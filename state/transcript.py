"""`Transcript`: one sample's tokens as they become text, stop strings included."""

import time

import numpy as np

from purestep.pure.records.outputs import LogprobsTensors
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import find_stop
from purestep.state.loading.tokenizer import StreamDecoder, Tokenizer
from purestep.state.results import CompletionOutput, SampleLogprobs


class Transcript:
    """Collects a sample's tokens, text and log-probabilities.

    Text that may yet turn out to be the beginning of a stop string is held back from `settled_text`.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._index = index
        self._params = params
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._begun = time.monotonic()
        self._seconds = 0.0
        self._text = ""
        self._search_from = 0
        self._token_ids: list[int] = []
        self._logprobs: list[tuple[np.ndarray, np.ndarray, int]] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def push(self, token_id: int, logprobs: LogprobsTensors | None, row: int, is_stop: bool) -> str | None:
        """Take one token; the stop string that it completes, if it does. `logprobs` is on the host.

        A stop token belongs to the tokens, not to the text.
        """
        self._token_ids.append(token_id)
        wanted = self._params.logprobs
        if wanted is not None and logprobs is not None:
            width = None if wanted == -1 else wanted + 1
            ids, values = logprobs.logprob_token_ids[row, :width], logprobs.logprobs[row, :width]
            self._logprobs.append((np.array(ids), np.array(values), int(logprobs.selected_token_ranks[row])))
        if self._decoder is None or is_stop:
            return None
        before = len(self._text)
        self._text += self._decoder.push(token_id)
        return self._cut_at_stop(before)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """No token follows."""
        if self._decoder is not None and not isinstance(stop_reason, str):
            before = len(self._text)
            self._text += self._decoder.finish()
            self._cut_at_stop(before)
        self._finish_reason, self._stop_reason = reason, stop_reason
        self._seconds = time.monotonic() - self._begun

    @property
    def finished(self) -> bool:
        """Whether no token follows."""
        return self._finish_reason is not None

    def _cut_at_stop(self, before: int) -> str | None:
        stops = self._params.stop
        if not stops:
            return None
        if len(self._token_ids) < self._params.min_tokens:
            self._search_from = len(self._text)  # what stands before min_tokens ends nothing
            return None
        found = find_stop(self._text, stops, max(self._search_from, before - max(map(len, stops)) + 1))
        if found is None:
            return None
        self._text = self._text[: found[0]]
        return found[1]

    def output(self) -> CompletionOutput:
        """The sample so far; of a running one, only the text that no stop string can take back."""
        text = self._text
        if self._finish_reason is None and self._params.stop:
            text = text[: max(0, len(text) - max(map(len, self._params.stop)) + 1)]
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=self._collected(),
            seconds=self._seconds if self._finish_reason else time.monotonic() - self._begun,
        )

    def _collected(self) -> SampleLogprobs | None:
        if self._params.logprobs is None:
            return None
        if not self._logprobs:
            nothing = np.zeros((0, 1))
            return SampleLogprobs(nothing.astype(np.int32), nothing.astype(np.float32), np.zeros(0, np.int32))
        ids, values, ranks = zip(*self._logprobs, strict=True)
        return SampleLogprobs(np.stack(ids), np.stack(values), np.asarray(ranks, np.int32))
