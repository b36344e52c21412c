"""Structured output in a step: the masks of its samples, made of what they have said by then."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from purestep.pure.errors import GrammarError, PurestepError
from purestep.pure.records.queue import StepInFlight
from purestep.pure.records.scheduler_output import GrammarOutput
from purestep.state.book import Book, known
from purestep.state.flights import InFlight
from purestep.state.grammars import Grammars


def grammar_masks(
    grammars: Grammars, book: Book, before: Sequence[InFlight], step: StepInFlight, *, vocab_size: int
) -> tuple[GrammarOutput, Mapping[int, PurestepError]]:
    """The masks of the tokens that this step samples, and, by their place in it, the requests that can have none.

    A mask needs every token before it: the outcome of the steps `before` (in flight, oldest first) is waited for.
    """
    on_their_way = [_tokens(flight) for flight in before]
    names, masks = list[str](), list[NDArray[np.int32]]()
    failed, num_words = dict[int, PurestepError](), -(-vocab_size // 32)
    for index in np.flatnonzero(step.samples).tolist():
        sample = known(book.live, step.req_ids[index])
        params = known(book.transcripts, sample.number).params.structured_outputs
        if params is None:
            continue
        own = [tokens[sample.number] for tokens in on_their_way if sample.number in tokens]
        outputs, mask = np.concatenate([book.tokens_of(sample).array, *own]), np.zeros(num_words, np.int32)
        try:
            if grammars.mask(sample.number, params, outputs, mask):
                names.append(sample.sample_id)
                masks.append(mask)
        except GrammarError as error:
            failed[index] = error
    grammars.forget(but=book.samples.__contains__)
    bitmask = np.stack(masks) if masks else np.zeros((0, num_words), np.int32)
    return GrammarOutput(tuple(names), bitmask), failed


def _tokens(flight: InFlight) -> dict[int, NDArray[np.int32]]:
    """What a step has brought each sample, by number; it waits for that."""
    told, readers = flight.pending.result().sampled_token_ids, flight.readers
    rows = [told[row] for row in readers.rows.tolist()]
    return {sample.number: row[row >= 0] for sample, row in zip(readers.samples, rows, strict=True)}
