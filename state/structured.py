"""Structured output in a step: the masks of its samples, made of what they have said by then and of their drafts."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import frozen
from purestep.pure.errors import GrammarError, PurestepError
from purestep.pure.grammar import GrammarMask
from purestep.pure.records.queue import StepInFlight
from purestep.state.book import Book, known
from purestep.state.flights import InFlight
from purestep.state.grammars import NOTHING, Grammars
from purestep.state.two_phase import Executed


def grammar_masks(
    grammars: Grammars, book: Book, before: Sequence[InFlight], step: StepInFlight, executed: Executed
) -> tuple[GrammarMask, Mapping[int, PurestepError]]:
    """The masks of the tokens that this step samples, and, by their place in it, the requests that can have none.

    A request that verifies drafts has a mask for the place of each and one for the token behind them: a draft that the
    grammar refuses has no chance at its place, and falls. A mask needs every token before it: the outcome of the steps
    `before` (in flight, oldest first) is waited for, and so are the drafts, of whatever drafter, as the step finds them
    on the device. So a step with grammars begins its forward pass ahead of time, and its sampling does not.
    """
    on_their_way = [_tokens(flight) for flight in before]
    batch, own_drafts = executed.batch, _drafts(executed)
    bounds, num_words = batch.layout.bounds, -(-batch.limits.vocab_size // 32)
    every = 1 + bounds.num_drafts
    mask_of_row = np.full(bounds.num_reqs * every, -1, np.int32)
    masks, num_masks, failed = [np.zeros((0, num_words), np.int32)], 0, dict[int, PurestepError]()
    for index in np.flatnonzero(step.samples).tolist():
        sample = known(book.live, step.req_ids[index])
        params = known(book.transcripts, sample.number).params.structured_outputs
        if params is None:
            continue
        told = [tokens[sample.number] for tokens in on_their_way if sample.number in tokens]
        outputs, drafts = np.concatenate([book.tokens_of(sample).array, *told]), own_drafts[index]
        into = np.zeros((1 + len(drafts), num_words), np.int32)
        try:
            count = grammars.masks(sample.number, params, outputs, drafts, into)
        except GrammarError as error:
            failed[index] = error
            continue
        masks.append(into[:count])
        mask_of_row[index * every : index * every + count] = num_masks + np.arange(count)
        num_masks += count
    grammars.forget(but=book.samples.__contains__)
    return GrammarMask(np.concatenate(masks), frozen(mask_of_row)), failed


def _tokens(flight: InFlight) -> dict[int, NDArray[np.int32]]:
    """What a step has brought each sample, by number; it waits for that."""
    told, readers = flight.pending.result().sampled_token_ids, flight.readers
    rows = [told[row] for row in readers.rows.tolist()]
    return {sample.number: row[row >= 0] for sample, row in zip(readers.samples, rows, strict=True)}


def _drafts(executed: Executed) -> list[NDArray[np.int32]]:
    """The drafts that each request of the batch can have verified, up to the first that is none; it waits for them."""
    layout = executed.batch.layout
    if executed.drafts is None:
        return [NOTHING] * layout.bounds.num_reqs
    drafts = executed.drafts.result()[layout.row_of_index, : layout.bounds.num_drafts]
    counts = np.logical_and.accumulate(drafts >= 0, axis=1).sum(axis=1)
    return [own[:count] for own, count in zip(drafts, counts.tolist(), strict=True)]
