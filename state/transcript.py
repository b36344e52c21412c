"""`Transcript`: one sample's tokens as they become text, stop strings included. A token makes a new one of it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from purestep.pure.arrays import Tape
from purestep.pure.record import record, replace
from purestep.pure.records.outputs import KeptMass, StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import find_stop
from purestep.state.loading.tokenizer import StreamDecoder, Tokenizer
from purestep.state.results import CompletionOutput, SampleLogprobs


@record
class Transcript:
    """A sample's tokens, text and log-probabilities so far.

    Text that may yet turn out to be the beginning of a stop string is held back until it can not.
    """

    index: int  # among the prompt's samples
    params: SamplingParams
    decoder: StreamDecoder | None  # never fed: a copy of it is
    begun: float  # on the monotonic clock, seconds
    token_ids: Tape
    text: str = ""
    search_from: int = 0  # characters before it end nothing
    reports: Any = (
        None  # (those of the tokens before, ids, values, rank, values of chosen ids, how it was drawn)
    )
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None

    def output(self) -> CompletionOutput:
        """The sample so far; of a running one, only the text that no stop string can take back."""
        text = self.text
        if self.finish_reason is None and self.params.stop:
            text = text[: max(0, len(text) - max(map(len, self.params.stop)) + 1)]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tuple(self.token_ids.tolist()),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            **_collected(self),
            seconds=self.seconds if self.finish_reason else time.monotonic() - self.begun,
        )


def new_transcript(index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> Transcript:
    """That of a sample without tokens. Without a tokenizer it has no text."""
    decoder = None
    if tokenizer is not None and params.detokenize:
        decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
    return Transcript(index, params, decoder, time.monotonic(), Tape.of())


def push(
    transcript: Transcript, token_id: int, output: StepOutput, row: int, is_stop: bool
) -> tuple[Transcript, str | None]:
    """With one token more, and the stop string that it completes, if it does. `output` is on the host.

    A stop token belongs to the tokens, not to the text.
    """
    old, text, decoder, stop = transcript, transcript.text, transcript.decoder, None
    token_ids, search_from = old.token_ids.append(token_id), old.search_from
    if decoder is not None and not is_stop:
        decoder = decoder.copy()
        text += decoder.push(token_id)
        text, search_from, stop = _cut_at_stop(old, text, len(token_ids))
    return Transcript(
        old.index, old.params, decoder, old.begun, token_ids, text, search_from, _reported(old, output, row)
    ), stop


def finish(transcript: Transcript, reason: str, stop_reason: int | str | None = None) -> Transcript:
    """The same, when no token follows."""
    text = transcript.text
    if transcript.decoder is not None and not isinstance(stop_reason, str):
        text += transcript.decoder.copy().finish()
        text, _, _ = _cut_at_stop(transcript, text, len(transcript.token_ids))
    return replace(
        transcript,
        decoder=None,
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        seconds=time.monotonic() - transcript.begun,
    )


def _cut_at_stop(before: Transcript, text: str, num_tokens: int) -> tuple[str, int, str | None]:
    """Text up to the first stop string, where the next search begins, and that string."""
    stops = before.params.stop
    if not stops:
        return text, 0, None
    if num_tokens < before.params.min_tokens:
        return text, len(text), None  # what stands before min_tokens ends nothing
    start = max(before.search_from, len(before.text) - max(map(len, stops)) + 1)
    found = find_stop(text, stops, start)
    return (text, before.search_from, None) if found is None else (text[: found[0]], 0, found[1])


def _reported(transcript: Transcript, output: StepOutput, row: int) -> Any:
    """What is told of the tokens, with those of one more."""
    params = transcript.params
    wanted, chosen = params.logprobs, params.logprob_token_ids
    if wanted is None and chosen is None and not params.kept_mass:
        return transcript.reports
    ids = values = rank = of_chosen = drawn = None
    found, of_ids, mass = output.logprobs_tensors, output.id_logprobs, output.kept_mass
    if wanted is not None and found is not None:
        width = None if wanted == -1 else wanted + 1
        ids, values = np.array(found.logprob_token_ids[row, :width]), np.array(found.logprobs[row, :width])
        rank = int(found.selected_token_ranks[row])
    if chosen is not None and of_ids is not None:
        of_chosen = np.array(of_ids[row, : len(chosen)])
    if params.kept_mass and mass is not None:
        drawn = float(mass.drawn_logprobs[row]), float(mass.log_mass[row])
    return transcript.reports, ids, values, rank, of_chosen, drawn


def _collected(transcript: Transcript) -> dict[str, Any]:
    """What is told of the sample's tokens, as fields of the output."""
    params, entries, link = transcript.params, [], transcript.reports
    while link is not None:
        link, *entry = link
        entries.append(entry)
    ids, values, ranks, of_chosen, drawn = zip(*reversed(entries), strict=True) if entries else ((),) * 5
    fields = dict[str, Any]()
    if params.logprobs is not None:
        of_tokens = _rows(ids, 1, np.int32), _rows(values, 1, np.float32), np.array(ranks, np.int32)
        fields["logprobs"] = SampleLogprobs(*of_tokens)
    if params.logprob_token_ids is not None:
        fields["id_logprobs"] = _rows(of_chosen, len(params.logprob_token_ids), np.float32)
    if params.kept_mass:
        fields["kept_mass"] = KeptMass(*_rows(drawn, 2, np.float32).T)
    return fields


def _rows(rows: Sequence[Any], width: int, dtype: Any) -> np.ndarray:
    """A row for each token; of so many entries, if there is none."""
    return np.array(rows, dtype) if rows else np.zeros((0, width), dtype)
