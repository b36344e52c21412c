"""`Book`: who was submitted, and what they have got so far. A value: each of these functions makes a new one.

Samples have numbers that are never used twice, so that what a step brings finds them whatever became of their ids.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TypeVar

import attrs

from purestep.pure.errors import DuplicateRequestError, InvalidRequestError
from purestep.pure.persistent import Map
from purestep.pure.prompt_logprobs import PromptScores
from purestep.pure.record import record, replace
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Finished
from purestep.pure.records.scheduler_output import NewRequestData
from purestep.state.async_output import ScoredChunk
from purestep.state.pending import Pending
from purestep.state.results import RequestOutput
from purestep.state.submission import Submission, with_scores
from purestep.state.transcript import Transcript, finish, push

K = TypeVar("K")
V = TypeVar("V")

UNSEEDED = 1 << 32  # streams of requests without a seed lie above those that a caller can name by position
NOTHING: Mapping[int, None] = MappingProxyType({})
NO_SCORES: Mapping[int, PromptScores] = MappingProxyType({})
EMPTY = Map.make_empty(256)


@attrs.frozen
class Heir:
    """A fork that was made while a step was under way: the step brings it what it brings its parent."""

    sample_id: str
    number: int
    row: int  # the parent's, in the step's output


@attrs.frozen
class InFlight:
    """A step whose output is on its way, and the samples that it ran."""

    req_ids: tuple[str, ...]
    numbers: tuple[int, ...]
    pending: Pending
    prompts: tuple[ScoredChunk, ...] = ()  # parts of prompts that it scored
    heirs: tuple[Heir, ...] = ()

    def scores(self) -> Mapping[int, PromptScores]:
        """What it tells of prompts, by the rows of its output; it waits for that."""
        rows = {req_id: row for row, req_id in enumerate(self.req_ids)} if self.prompts else {}
        return {
            rows[part.chunk.req_id]: PromptScores(part.chunk.first_row, part.rows.result())
            for part in self.prompts
        }


@attrs.frozen
class Landed:
    """A step whose output is known: whom it ran, what it brought, which requests ended with it."""

    step: InFlight
    output: StepOutput
    finished: tuple[Finished, ...]
    scores: Mapping[int, PromptScores] = NO_SCORES  # of prompts, by the rows of the output

    def readers(self) -> Iterator[tuple[str, int, int]]:
        """Id, number and row of every sample that it brings something."""
        step = self.step
        heirs = ((heir.sample_id, heir.number, heir.row) for heir in step.heirs)
        return chain(zip(step.req_ids, step.numbers, range(len(step.numbers)), strict=True), heirs)


@record
class Book:
    """Submissions that run or wait, or that have something to tell."""

    submissions: Map[int, Submission] = EMPTY  # by number
    transcripts: Map[int, Transcript] = EMPTY  # by the samples' numbers
    numbers: Map[str, int] = EMPTY  # by id, of submissions that run or wait
    samples: Map[str, int] = EMPTY  # by id, of samples that run or wait
    news: Mapping[int, None] = NOTHING  # submissions with something that nobody was told, in order
    num_submitted: int = 0  # samples
    num_unseeded: int = 0  # streams that were given to samples without a seed, and to forks

    def output(self, number: int) -> RequestOutput:
        """What a submission has so far."""
        return known(self.submissions, number).output(self._transcripts(number))

    def is_over(self, number: int) -> bool:
        """Whether all samples of a submission have ended."""
        return all(transcript.finish_reason is not None for transcript in self._transcripts(number))

    def _transcripts(self, number: int) -> list[Transcript]:
        return [known(self.transcripts, i) for i in known(self.submissions, number).sample_numbers]


@attrs.frozen
class Unscored(Container[str]):
    """The samples whose prompts' log-probabilities are wanted, and not all there."""

    book: Book

    def __contains__(self, sample: object) -> bool:
        number = self.book.samples.get(str(sample))
        if number is None:
            return False
        owner = number - known(self.book.transcripts, number).index
        return known(self.book.submissions, owner).awaits_scores


def known(entries: Map[K, V], key: K) -> V:
    """What is there for certain."""
    value = entries.get(key)
    assert value is not None, f"{key!r} is not in the book"
    return value


def add(book: Book, submission: Submission, transcripts: Sequence[Transcript]) -> Book:
    """With a submission more, whose samples these transcripts are of."""
    numbers, names = submission.sample_numbers, submission.sample_ids
    return replace(
        book,
        submissions=book.submissions.with_items([(submission.number, submission)]),
        transcripts=book.transcripts.with_items(zip(numbers, transcripts, strict=True)),
        numbers=book.numbers.with_items([(submission.req_id, submission.number)]),
        samples=book.samples.with_items(zip(names, numbers, strict=True)),
        num_submitted=book.num_submitted + len(numbers),
    )


def fork(book: Book, req_id: str, new_req_id: str, sample: int) -> tuple[Book, str]:
    """With a submission more that has what a sample of another one has; and the id of that sample.

    Raises:
        InvalidRequestError: no such submission or sample runs or waits.
        DuplicateRequestError: the new id is in use.
    """
    owner = book.numbers.get(req_id)
    if owner is None:
        raise InvalidRequestError(
            f"fork of {req_id!r}: no request of this id runs or waits; it may have ended"
        )
    if new_req_id in book.numbers:
        raise DuplicateRequestError(
            f"fork of {req_id!r} as {new_req_id!r}: this id is in use, choose another one"
        )
    submission = known(book.submissions, owner)
    if sample not in range(submission.params.n) or known(book.transcripts, owner + sample).finished:
        raise InvalidRequestError(
            f"fork of sample {sample} of {req_id!r}, which has {submission.params.n}: it has ended, or never was"
        )
    params = replace(submission.params, n=1)
    twin = replace(submission, req_id=new_req_id, number=book.num_submitted, params=params)
    transcript = replace(known(book.transcripts, owner + sample), index=0)
    return add(book, twin, [transcript]), submission.sample_ids[sample]


def unused_stream(book: Book, num_samples: int) -> tuple[int, Book]:
    """The first of so many random streams that nobody has had, and that nobody will be given again."""
    first = UNSEEDED + book.num_unseeded
    return first, replace(book, num_unseeded=book.num_unseeded + num_samples)


def admit(book: Book, new: Iterable[NewRequestData]) -> Book:
    """Knowing how much of their prompts the first samples found in the cache."""
    cached = []
    for request in new:
        submission = book.submissions.get(known(book.samples, request.req_id))
        if submission is not None:
            told = replace(submission, num_cached_tokens=request.num_computed_tokens)
            cached.append((submission.number, told))
    return replace(book, submissions=book.submissions.with_items(cached))


def publish(book: Book, landed: Landed) -> tuple[Book, list[tuple[str, str]]]:
    """With a step's tokens in the transcripts; the samples that a stop string has ended, and that.

    What it says of samples that have ended since it began is dropped.
    """
    output, tokens = landed.output, landed.output.sampled_token_ids[:, 0].tolist()
    ended = {finished.req_id: finished for finished in landed.finished}
    grown, news = dict[int, Transcript](), dict(book.news)
    stopped, over = list[tuple[str, str]](), list[str]()
    for sample, number, row in landed.readers():
        transcript, token, end = book.transcripts.get(number), tokens[row], ended.get(sample)
        if transcript is None or transcript.finish_reason is not None or (token < 0 and end is None):
            continue
        stop = None
        if token >= 0:
            is_stop = end is not None and end.reason == "stop"
            transcript, stop = push(transcript, token, output, row, is_stop)
        if stop is not None:
            stopped.append((sample, stop))
            transcript = finish(transcript, "stop", stop)
        elif end is not None:
            transcript = finish(transcript, end.reason, end.stop_reason)
        if transcript.finish_reason is not None:
            over.append(sample)
        grown[number] = transcript
        news[number - transcript.index] = None
    transcripts = book.transcripts.with_items(grown.items())
    if landed.scores:
        book = replace(book, submissions=_scored(book, landed))
    return _without_samples(replace(book, transcripts=transcripts, news=news), over), stopped


def _scored(book: Book, landed: Landed) -> Map[int, Submission]:
    """The submissions, with what a step tells of their prompts."""
    told = dict[int, Submission]()
    for _, number, row in landed.readers():
        transcript, scores = book.transcripts.get(number), landed.scores.get(row)
        if transcript is not None and scores is not None:
            owner = number - transcript.index
            told[owner] = with_scores(told.get(owner) or known(book.submissions, owner), scores)
    return book.submissions.with_items(told.items())


def abort(book: Book, req_ids: Sequence[str]) -> tuple[Book, list[str], list[RequestOutput]]:
    """Without these submissions; the samples of theirs that have not ended, and what each of them has so far.

    Nobody is told of them any more. Ids that are not in use are ignored.
    """
    found = [number for req_id in req_ids if (number := book.numbers.get(req_id)) is not None]
    ended, samples = list[tuple[int, Transcript]](), list[str]()
    for number in dict.fromkeys(found):
        submission = known(book.submissions, number)
        for sample, i in zip(submission.sample_ids, submission.sample_numbers, strict=True):
            transcript = known(book.transcripts, i)
            if transcript.finish_reason is None:
                ended.append((i, finish(transcript, "abort")))
                samples.append(sample)
    book = _without_samples(replace(book, transcripts=book.transcripts.with_items(ended)), samples)
    outputs, wanted = [book.output(number) for number in found], set(req_ids)
    old = [number for number in book.news if known(book.submissions, number).req_id in wanted]
    return told(book, [*found, *old]), samples, outputs


def told(book: Book, numbers: Iterable[int]) -> Book:
    """When the news of these submissions is no news any more; those that have ended are forgotten."""
    gone = {number: None for number in numbers if number in book.submissions}
    if not gone:
        return book
    news = {number: None for number in book.news if number not in gone}
    over = [number for number in gone if book.is_over(number)]
    samples = [i for number in over for i in known(book.submissions, number).sample_numbers]
    return replace(
        book,
        submissions=book.submissions.without(over),
        transcripts=book.transcripts.without(samples),
        news=news,
    )


def _without_samples(book: Book, samples: Sequence[str]) -> Book:
    """When these samples have ended; ids of submissions all of whose samples have are free again."""
    if not samples:
        return book
    numbers = [known(book.samples, sample) for sample in samples]
    owners = {number - known(book.transcripts, number).index for number in numbers}
    over = [known(book.submissions, owner).req_id for owner in owners if book.is_over(owner)]
    return replace(book, samples=book.samples.without(samples), numbers=book.numbers.without(over))
