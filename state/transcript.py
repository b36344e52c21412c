"""`Transcript`: what becomes of one sample's tokens, text and stop strings; read when somebody wants to see it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from purestep.pure.arrays import Tape
from purestep.pure.errors import PurestepError
from purestep.pure.record import record, replace
from purestep.pure.records.outputs import KeptMass, StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import find_stop
from purestep.state.loading.tokenizer import StreamDecoder, Tokenizer
from purestep.state.results import CompletionOutput, SampleLogprobs


@record
class Transcript:
    """A sample's text, as far as its tokens have been read, and what steps reported of them.

    Text that may yet turn out to be the beginning of a stop string is held back until it can not.
    """

    index: int  # among the prompt's samples
    params: SamplingParams
    decoder: StreamDecoder | None  # never fed: a copy of it is
    begun: float  # on the monotonic clock, seconds
    num_read: int = 0  # tokens
    text: str = ""
    search_from: int = 0  # characters before it end nothing
    reports: Any = (
        None  # (those of the tokens before, ids, values, rank, values of chosen ids, how it was drawn)
    )
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: PurestepError | None = None  # why it ended with reason "error"
    seconds: float = 0.0

    def output(self, token_ids: Tape) -> CompletionOutput:
        """The sample so far; of a running one, only the text that no stop string can take back."""
        text = self.text
        if self.finish_reason is None and self.params.stop:
            text = text[: max(0, len(text) - max(map(len, self.params.stop)) + 1)]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tuple(token_ids.tolist()),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            **_collected(self),
            seconds=self.seconds if self.finish_reason else time.monotonic() - self.begun,
        )


def new_transcript(index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> Transcript:
    """That of a sample without tokens. Without a tokenizer it has no text."""
    decoder = None
    if tokenizer is not None and params.detokenize:
        decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
    return Transcript(index, params, decoder, time.monotonic())


def read(transcript: Transcript, token_ids: Tape) -> tuple[Transcript, str | None]:
    """The same, once these tokens are read, and the stop string that ends the text, if one does.

    Tokens behind one that completes a stop string are not read.
    """
    if transcript.decoder is None or transcript.num_read == len(token_ids):
        return transcript, None
    decoder, stop, number = transcript.decoder.copy(), None, transcript.num_read
    text, search_from = transcript.text, transcript.search_from
    for number, token_id in enumerate(
        token_ids[transcript.num_read :].tolist(), start=transcript.num_read + 1
    ):
        before = len(text)
        text += decoder.push(token_id)
        if transcript.params.stop:
            text, search_from, stop = _cut_at_stop(transcript.params, text, before, search_from, number)
            if stop is not None:
                break
    return replace(transcript, decoder=decoder, num_read=number, text=text, search_from=search_from), stop


def finish(
    transcript: Transcript,
    token_ids: Tape,
    reason: str,
    stop_reason: int | str | None,
    error: PurestepError | None = None,
) -> Transcript:
    """The same, when no token follows these. A stop id belongs to the tokens, not to the text."""
    if not isinstance(stop_reason, str):  # else a stop string was found: its beginning is the end of the text
        transcript, _ = read(transcript, token_ids.truncate(len(token_ids) - (reason == "stop")))
    text = transcript.text
    if transcript.decoder is not None and not isinstance(stop_reason, str):
        text += transcript.decoder.copy().finish()
        text, _, _ = _cut_at_stop(
            transcript.params, text, len(transcript.text), transcript.search_from, len(token_ids)
        )
    return replace(
        transcript,
        decoder=None,
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=error,
        seconds=time.monotonic() - transcript.begun,
    )


def wants_reports(params: SamplingParams) -> bool:
    """Whether something is to be told of every token."""
    return params.logprobs is not None or params.logprob_token_ids is not None or params.kept_mass


def with_report(transcript: Transcript, output: StepOutput, row: int) -> Transcript:
    """With what is told of one token more. `output` is on the host."""
    params = transcript.params
    wanted, chosen = params.logprobs, params.logprob_token_ids
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
    return replace(transcript, reports=(transcript.reports, ids, values, rank, of_chosen, drawn))


def _cut_at_stop(
    params: SamplingParams, text: str, before: int, search_from: int, num_tokens: int
) -> tuple[str, int, str | None]:
    """Text up to the first stop string, where later searches begin, and that string. `before` ends the old text."""
    if not params.stop:
        return text, search_from, None
    if num_tokens < params.min_tokens:
        return text, len(text), None  # what stands before min_tokens ends nothing
    start = max(search_from, before - max(map(len, params.stop)) + 1)
    found = find_stop(text, params.stop, start)
    return (text, search_from, None) if found is None else (text[: found[0]], search_from, found[1])


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
