"""`Book`: who was submitted, and what they have got so far. A value: each of these functions makes a new one.

Samples have numbers that are never used twice, so that what a step brings finds them whatever became of their ids.
Tokens are columns, so that a step costs an append for each; text is read from them when somebody asks for it, and in
every step only where a stop string may be found.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import attrs
import numpy as np

from purestep.pure.arrays import Tape, append_each, appended
from purestep.pure.errors import DuplicateRequestError, InvalidRequestError, NoTokenError, short
from purestep.pure.persistent import Map
from purestep.pure.prompt_logprobs import PromptScores
from purestep.pure.record import record, replace
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Finished, FinishReason
from purestep.pure.records.scheduler_output import NewRequestData
from purestep.state.flights import Landed, Readers, Sample
from purestep.state.results import RequestOutput
from purestep.state.submission import Submission, with_scores
from purestep.state.transcript import Transcript, finish, read, wants_reports, with_report

K = TypeVar("K")
V = TypeVar("V")

UNSEEDED = 1 << 32  # streams of requests without a seed lie above those that a caller can name by position
NOTHING: Mapping[int, None] = MappingProxyType({})
EMPTY = Map.make_empty(64)
NO_TOKENS = Tape.of()


@record
class Book:
    """Submissions that run or wait, or that have something to tell."""

    submissions: Map[int, Submission] = EMPTY  # by number
    transcripts: Map[int, Transcript] = EMPTY  # by the samples' numbers
    samples: Map[int, Sample] = EMPTY  # by number
    tokens: tuple[Tape, ...] = ()  # outputs of samples, by place
    free_places: tuple[int, ...] = ()
    numbers: Map[str, int] = EMPTY  # by id, of submissions that run or wait
    live: Map[str, Sample] = EMPTY  # by id, samples that run or wait
    news: Mapping[int, None] = NOTHING  # submissions with something that nobody was told, in order
    over: frozenset[int] = frozenset()  # submissions that have ended, and have still to tell it
    num_submitted: int = 0  # samples
    num_unseeded: int = 0  # streams that were given to samples without a seed, and to forks

    @property
    def next_stream(self) -> int:
        """The first of the random streams that nobody has had."""
        return UNSEEDED + self.num_unseeded

    def output(self, number: int) -> RequestOutput:
        """What a submission has, with text as far as its tokens have been read."""
        submission = known(self.submissions, number)
        own = [(known(self.transcripts, i), known(self.samples, i)) for i in submission.sample_numbers]
        return submission.output([transcript.output(self.tokens_of(sample)) for transcript, sample in own])

    def tokens_of(self, sample: Sample) -> Tape:
        """A sample's outputs."""
        return NO_TOKENS if sample.place is None else self.tokens[sample.place]


@attrs.frozen
class Unscored(Container[str]):
    """The samples whose prompts' log-probabilities are wanted, and not all there."""

    book: Book

    def __contains__(self, sample_id: object) -> bool:
        sample = self.book.live.get(str(sample_id))
        return sample is not None and known(self.book.submissions, sample.owner).awaits_scores


def known(entries: Map[K, V], key: K) -> V:
    """What is there for certain."""
    value = entries.get(key)
    assert value is not None, f"{short(key)} is not in the book"
    return value


def add(book: Book, submission: Submission, transcripts: Sequence[Transcript], num_streams: int) -> Book:
    """With a submission more, whose samples these transcripts are of, and which is given so many unused streams."""
    numbers, names = submission.sample_numbers, submission.sample_ids
    samples = [Sample(name, i, submission.number) for name, i in zip(names, numbers, strict=True)]
    return replace(
        book,
        submissions=book.submissions.with_items([(submission.number, submission)]),
        transcripts=book.transcripts.with_items(zip(numbers, transcripts, strict=True)),
        samples=book.samples.with_items(zip(numbers, samples, strict=True)),
        numbers=book.numbers.with_items([(submission.req_id, submission.number)]),
        live=book.live.with_items(zip(names, samples, strict=True)),
        num_submitted=book.num_submitted + len(numbers),
        num_unseeded=book.num_unseeded + num_streams,
    )


def fork(book: Book, req_id: str, new_id: str, sample: int, num_streams: int) -> tuple[Book, Sample, Sample]:
    """With a submission more that has what a sample of another one has, given so many unused streams; both samples.

    Raises:
        InvalidRequestError: no such submission or sample runs or waits.
        DuplicateRequestError: the new id is in use.
    """
    owner = book.numbers.get(req_id)
    if owner is None:
        raise InvalidRequestError(
            f"fork of {short(req_id)}: no request of this id runs or waits; it may have ended"
        )
    if new_id in book.numbers:
        raise DuplicateRequestError(
            f"fork of {short(req_id)} as {short(new_id)}: this id is in use, choose another one"
        )
    submission = known(book.submissions, owner)
    transcript = book.transcripts.get(owner + sample) if sample in range(submission.params.n) else None
    if transcript is None or transcript.finish_reason:
        raise InvalidRequestError(
            f"fork of sample {sample} of {short(req_id)}, which has {submission.params.n}: it has ended, or never was"
        )
    params, number = submission.params, book.num_submitted
    if params.n > 1:
        params, transcript = replace(params, n=1), replace(transcript, index=0)
    parent, place, tokens, free = known(book.samples, owner + sample), None, book.tokens, book.free_places
    if parent.place is not None:
        own = tokens[parent.place]
        place, free = (free[0], free[1:]) if free else (len(tokens), free)
        tokens = (*tokens[:place], own, *tokens[place + 1 :])
    twin = Sample(new_id, number, number, place)
    told = replace(submission, req_id=new_id, number=number, params=params)
    book = replace(
        book,
        submissions=book.submissions.with_item(number, told),
        transcripts=book.transcripts.with_item(number, transcript),
        samples=book.samples.with_item(number, twin),
        tokens=tokens,
        free_places=free,
        numbers=book.numbers.with_item(new_id, number),
        live=book.live.with_item(new_id, twin),
        num_submitted=number + 1,
        num_unseeded=book.num_unseeded + num_streams,
    )
    return book, parent, twin


def admit(book: Book, new: Iterable[NewRequestData]) -> Book:
    """With places for the tokens of samples that run for the first time, and how much of their prompts was cached."""
    cached, samples = [], []
    for request in new:
        sample = known(book.live, request.req_id)
        samples.append((sample, Tape.of()))
        if sample.number == sample.owner:
            submission = known(book.submissions, sample.owner)
            told = replace(submission, num_cached_tokens=request.num_computed_tokens)
            cached.append((sample.owner, told))
    return _placed(replace(book, submissions=book.submissions.with_items(cached)), samples)


def readers_of(book: Book, samples: Iterable[Sample], rows: Iterable[int]) -> Readers:
    """These samples, to which these rows of an output belong."""
    samples = tuple(samples)
    params = [known(book.transcripts, sample.number).params for sample in samples]
    return Readers(
        samples=samples,
        rows=np.fromiter(rows, np.intp, len(samples)),
        places=np.array([sample.place for sample in samples], np.intp),
        news=dict.fromkeys(sample.owner for sample in samples),
        watched=tuple([i for i, own in enumerate(params) if own.stop or wants_reports(own)]),
        live=book.live,
    )


def with_heir(readers: Readers, parent: Sample, child: Sample) -> Readers:
    """With a sample that was just forked from one which may be among them: what is told that, is told it."""
    samples, watched = readers.samples, readers.watched
    try:
        place = samples.index(parent)
    except ValueError:
        return readers
    return Readers(
        (*samples, child),
        appended(readers.rows, readers.rows[place]),
        appended(readers.places, child.place),
        {**readers.news, child.owner: None},
        (*watched, len(samples)) if place in watched else watched,
        readers.live,
    )


def publish(book: Book, landed: Landed) -> tuple[Book, list[tuple[str, FinishReason, str | None]]]:
    """With a step's tokens; and the samples that a stop string or a failure has ended, each with why.

    What the step says of samples that have ended since it began is dropped, and so are tokens behind the one that ends
    a sample.
    """
    readers, output = _still_there(book, landed.readers), landed.output
    failed = (
        [i for i, row in enumerate(readers.rows.tolist()) if row in landed.failed] if landed.failed else []
    )
    ended = {finished.req_id: finished for finished in landed.finished}
    before, lengths, width = book.tokens, dict[int | None, int](), output.sampled_token_ids.shape[1]
    book, num_kept = _with_tokens(book, readers, output, failed, ended)
    tokens = book.tokens
    transcripts, over = dict[int, Transcript](), dict[int, Sample]()
    stopped = list[tuple[str, FinishReason, str | None]]()
    for i in failed:
        sample, failure = readers.samples[i], landed.failed[int(readers.rows[i])]
        transcript = known(book.transcripts, sample.number)
        transcripts[sample.number] = finish(transcript, tokens[readers.places[i]], "error", None, failure)
        stopped.append((sample.sample_id, "error", None))
        over[sample.number] = sample
    for i in readers.watched:
        if not num_kept[i]:
            continue
        sample, place, first = readers.samples[i], readers.places[i], int(readers.rows[i]) * width
        transcript, own = known(book.transcripts, sample.number), tokens[place]
        if transcript.params.stop:
            end = ended.get(sample.sample_id)
            text_ends = len(own) - (end is not None and end.reason == "stop")  # a stop id is no text
            transcript, stop = read(transcript, own.truncate(text_ends))
            if stop is not None:
                own = own.truncate(transcript.num_read)
                transcript, lengths[place] = finish(transcript, own, "stop", stop), len(own)
                stopped.append((sample.sample_id, "stop", stop))
                over[sample.number] = sample
        if wants_reports(transcript.params):
            for row in range(first, first + len(own) - len(before[place])):
                transcript = with_report(transcript, output, row)
        transcripts[sample.number] = transcript
    book = replace(book, tokens=_cut(tokens, lengths)) if lengths else book
    for finished in landed.finished:
        ending = book.live.get(finished.req_id)
        if ending is not None and ending.number not in over:
            transcript = transcripts.get(ending.number) or known(book.transcripts, ending.number)
            own = book.tokens_of(ending)
            error = _no_token(ending, own) if finished.reason == "error" else None
            transcripts[ending.number] = finish(transcript, own, finished.reason, finished.stop_reason, error)
            over[ending.number] = ending
    if landed.scores:
        book = replace(book, submissions=_scored(book, readers, landed.scores))
    return _ended(book, transcripts, list(over.values())), stopped


def _with_tokens(
    book: Book,
    readers: Readers,
    output: StepOutput,
    failed: Sequence[int],
    ended: Mapping[str, Finished],
) -> tuple[Book, list[int]]:
    """With a step's tokens, up to where the scheduler ends requests, and how many each of the readers got.

    There is news of those that got some, failed or ended.
    """
    new = output.sampled_token_ids[readers.rows]
    kept = new >= 0
    kept[list(failed)] = False
    num_kept, news = kept.sum(axis=1), readers.news
    tokens = append_each(book.tokens, np.repeat(readers.places, num_kept), new[kept])
    if not num_kept.all():
        told = (num_kept > 0) | np.isin(np.arange(len(kept)), failed)
        pairs = zip(readers.samples, told.tolist(), strict=True)
        news = {sample.owner: None for sample, has in pairs if has or sample.sample_id in ended}
    if new.shape[1] > 1 and ended:
        samples = [(book.live.get(req_id), len(finished.token_ids)) for req_id, finished in ended.items()]
        tokens = _cut(tokens, {sample.place: length for sample, length in samples if sample is not None})
    book = replace(book, tokens=tokens, news={**book.news, **news} if book.news else news)
    return book, num_kept.tolist()


def _cut(tokens: tuple[Tape, ...], lengths: Mapping[int | None, int]) -> tuple[Tape, ...]:
    """The tapes, those at these places no longer than said."""
    cut = list(tokens)
    for place, length in lengths.items():
        assert place is not None, "a sample that has run has no place for tokens"
        cut[place] = cut[place].truncate(min(length, len(cut[place])))
    return tuple(cut)


def _no_token(sample: Sample, outputs: Tape) -> NoTokenError:
    return NoTokenError(
        f"request {short(sample.sample_id)} ended after {len(outputs)} outputs, with nothing to draw from: the model's "
        "logits were NaN or +inf, or its constraints (structured_outputs, allowed_token_ids, bad words, min_tokens, "
        "logits_processors) together left no token: loosen them, or look at the weights"
    )


def _scored(book: Book, readers: Readers, scores: Mapping[int, PromptScores]) -> Map[int, Submission]:
    """The submissions, with what a step tells of their prompts."""
    told = dict[int, Submission]()
    for sample, row in zip(readers.samples, readers.rows.tolist(), strict=True):
        if row in scores:
            submission = told.get(sample.owner) or known(book.submissions, sample.owner)
            told[sample.owner] = with_scores(submission, scores[row])
    return book.submissions.with_items(told.items())


def abort(book: Book, req_ids: Sequence[str]) -> tuple[Book, list[str], list[RequestOutput]]:
    """Without these submissions; the samples of theirs that have not ended, and what each of them has so far.

    Nobody is told of them any more. First come those that have ended untold; other ids that are not in use are ignored.
    """
    found = [number for req_id in req_ids if (number := book.numbers.get(req_id)) is not None]
    transcripts, samples = dict[int, Transcript](), list[Sample]()
    for i in (i for number in dict.fromkeys(found) for i in known(book.submissions, number).sample_numbers):
        transcript, sample = known(book.transcripts, i), known(book.samples, i)
        if transcript.finish_reason is None:
            transcripts[i] = finish(transcript, book.tokens_of(sample), "abort", None)
            samples.append(sample)
    book, wanted = _ended(book, transcripts, samples), set(req_ids)
    untold = [n for n in book.news if n not in found and known(book.submissions, n).req_id in wanted]
    outputs = [book.output(number) for number in (*untold, *found)]
    return _forget(book, {*untold, *found}), [sample.sample_id for sample in samples], outputs


def tell(
    book: Book, numbers: Iterable[int], *, of: Container[int] | None = None
) -> tuple[Book, dict[int, RequestOutput]]:
    """Without news of these submissions, nor those of them that have ended; and what they have, all or some of them."""
    gone = dict.fromkeys(numbers)
    wanted = [n for n in gone if (of is None or n in of) and n in book.submissions]
    transcripts = {}
    for i in (i for number in wanted for i in known(book.submissions, number).sample_numbers):
        transcript = known(book.transcripts, i)
        if transcript.decoder is not None:  # it runs, and has text
            transcripts[i], _ = read(transcript, book.tokens_of(known(book.samples, i)))
    book = replace(book, transcripts=book.transcripts.with_items(transcripts.items()))
    return _forget(book, gone.keys()), {number: book.output(number) for number in wanted}


def _placed(book: Book, samples: Sequence[tuple[Sample, Tape]]) -> Book:
    """With places for these samples' tokens."""
    places = book.free_places[: len(samples)]
    places += tuple(range(len(book.tokens), len(book.tokens) + len(samples) - len(places)))
    tokens = [*book.tokens, *[NO_TOKENS] * (max(places, default=-1) + 1 - len(book.tokens))]
    placed = []
    for place, (sample, own) in zip(places, samples, strict=True):
        tokens[place] = own
        placed.append(replace(sample, place=place))
    return replace(
        book,
        samples=book.samples.with_items((sample.number, sample) for sample in placed),
        live=book.live.with_items((sample.sample_id, sample) for sample in placed),
        tokens=tuple(tokens),
        free_places=book.free_places[len(samples) :],
    )


def _still_there(book: Book, readers: Readers) -> Readers:
    """Without samples that have ended."""
    if readers.live is book.live:
        return readers
    there = [i for i, sample in enumerate(readers.samples) if book.live.get(sample.sample_id) is sample]
    return readers_of(book, [readers.samples[i] for i in there], readers.rows[there].tolist())


def _ended(book: Book, transcripts: Mapping[int, Transcript], samples: Sequence[Sample]) -> Book:
    """With these transcripts; these samples have ended, and ids of submissions all of whose samples have are free."""
    book = replace(book, transcripts=book.transcripts.with_items(transcripts.items()))
    if not samples:
        return book
    owners = [known(book.submissions, owner) for owner in dict.fromkeys(sample.owner for sample in samples)]
    over = [
        submission
        for submission in owners
        if all(known(book.transcripts, i).finish_reason for i in submission.sample_numbers)
    ]
    return replace(
        book,
        numbers=book.numbers.without(submission.req_id for submission in over),
        live=book.live.without(sample.sample_id for sample in samples),
        over=book.over.union(submission.number for submission in over),
    )


def _forget(book: Book, numbers: Collection[int]) -> Book:
    """Without news of these submissions; without those of them that have ended, too."""
    news = {number: None for number in book.news if number not in numbers}
    over = book.over.intersection(numbers)
    if not over:
        return replace(book, news=news)
    gone = [i for number in over for i in known(book.submissions, number).sample_numbers]
    places = [place for i in gone if (place := known(book.samples, i).place) is not None]
    tokens = list(book.tokens)
    for place in places:
        tokens[place] = NO_TOKENS
    return replace(
        book,
        submissions=book.submissions.without(over),
        transcripts=book.transcripts.without(gone),
        samples=book.samples.without(gone),
        tokens=tuple(tokens),
        free_places=(*places, *book.free_places),
        news=news,
        over=book.over - over,
    )
