"""Drafts for the next step, as the host has them: from a drafter of its own, or from the device's output."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.errors import DrafterError
from purestep.pure.propose import host_drafts
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.outputs import DraftTokenIds
from purestep.pure.records.queue import Queue
from purestep.pure.rows import occupied
from purestep.pure.scheduler import take_drafts


def proposed(
    drafter: HostDrafter, kept: Any, batch: InputBatch, req_ids: Sequence[str], limits: Sequence[int]
) -> tuple[Any, DraftTokenIds]:
    """What the drafter keeps now, and its drafts for these requests, which stop at so many tokens.

    Raises:
        DrafterError: a draft that is no token id.
    """
    histories = [occupied(batch.rows.tokens[batch.row_of[req_id]]).array for req_id in req_ids]
    kept, drafts = host_drafts(drafter, kept, histories, limits)
    return kept, DraftTokenIds(
        tuple(req_ids), tuple([_checked(own, batch.limits.vocab_size) for own in drafts])
    )


def _checked(drafts: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    for token in drafts:
        if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise DrafterError(
                f"the drafter proposed {token!r}: drafts are token ids, whole numbers from 0 to {vocab_size - 1}. The "
                "step goes on without its drafts"
            )
    return tuple(map(int, drafts))


def drafted(drafter: HostDrafter, kept: Any, queue: Queue, batch: InputBatch) -> tuple[Any, Queue]:
    """What the drafter keeps now, and the queue with drafts for the requests that say their next token next."""
    counts, facts = queue.running.counts, queue.running.facts
    decodes = (counts.num_known > facts.num_prompt) & (counts.num_computed + 1 == counts.num_known)
    rows = np.flatnonzero(decodes & counts.ran).tolist()
    req_ids = [queue.running.req_ids[row] for row in rows]
    kept, drafts = proposed(drafter, kept, batch, req_ids, facts.length_limit[rows].tolist())
    return kept, take_drafts(queue, drafts)


def of_output(req_ids: Sequence[str], drafts: NDArray[np.int32]) -> DraftTokenIds:
    """What the device has proposed in a step of these requests; what lies behind them is padding."""
    own = drafts[: len(req_ids)].tolist()
    return DraftTokenIds(tuple(req_ids), tuple([tuple([t for t in row if t >= 0]) for row in own]))
