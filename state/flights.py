"""`InFlight`: a step whose output is on its way, and `Landed`, one whose output is known: what each is to whom."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from purestep.pure.errors import PurestepError
from purestep.pure.persistent import Map
from purestep.pure.prompt_logprobs import PromptScores
from purestep.pure.record import record
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Finished
from purestep.state.async_output import ScoredChunk
from purestep.state.pending import Pending

Failures = Mapping[int, PurestepError]  # of requests that have ended with a step, by the rows of its output
NO_FAILURES: Failures = MappingProxyType({})
NO_SCORES: Mapping[int, PromptScores] = MappingProxyType({})


@record
class Sample:
    """One sample that runs, waits, or has something to tell."""

    sample_id: str
    number: int  # which no other sample ever has
    owner: int  # the number of its submission
    place: int | None = None  # of its tokens, among all; None: it has not run yet


@record
class Readers:
    """The samples that a step brings something, in parallel with rows of its output; one object for steady steps."""

    samples: tuple[Sample, ...]
    rows: NDArray[np.intp]
    places: NDArray[np.intp]
    news: Mapping[int, None]  # their submissions
    watched: tuple[int, ...]  # which of them have to be looked at in every step
    live: Map[str, Sample]  # the samples that ran or waited when this was made


@record
class InFlight:
    """A step whose output is on its way, and the samples that it ran, or that were forked from those since."""

    req_ids: tuple[str, ...]
    readers: Readers
    pending: Pending
    prompts: tuple[ScoredChunk, ...] = ()  # parts of prompts that it scored
    failed: Failures = NO_FAILURES

    def scores(self) -> Mapping[int, PromptScores]:
        """What it tells of prompts, by the rows of its output; it waits for that."""
        rows = {req_id: row for row, req_id in enumerate(self.req_ids)} if self.prompts else {}
        return {
            rows[part.chunk.req_id]: PromptScores(part.chunk.first_row, part.rows.result())
            for part in self.prompts
        }


@record
class Landed:
    """A step whose output is known: whom it concerns, what it brought, which requests ended with it."""

    readers: Readers
    output: StepOutput
    finished: tuple[Finished, ...]
    scores: Mapping[int, PromptScores] = NO_SCORES  # of prompts, by the rows of the output
    failed: Failures = NO_FAILURES
