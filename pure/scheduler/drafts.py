"""Drafts: guesses at what follows a request's known tokens, which its next step verifies."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Int32

from purestep.pure.arrays import frozen
from purestep.pure.errors import InvalidParameterError
from purestep.pure.record import replace
from purestep.pure.records.outputs import DraftTokenIds
from purestep.pure.records.queue import Queue
from purestep.pure.records.scheduler_output import NOTHING
from purestep.pure.scheduler.kinds import check_drafts
from purestep.pure.scheduler.rows import rows_of

Tokens = Int32[np.ndarray, " rows"]


def take_drafts(queue: Queue, drafts: DraftTokenIds) -> Queue:
    """The queue that has these verified in the next steps of the requests, as far as budget and lengths allow.

    A request keeps its drafts while it sits out, until it is given others or preempted. Those of requests that do not
    run are dropped: they may just have ended.

    Raises:
        InvalidParameterError: more drafts for a request than `num_spec_tokens`, drafts where the device has them, or
            what is no drafts.
    Source: vllm/v1/core/sched/scheduler.py update_draft_token_ids.
    """
    check_drafts(drafts)
    config = queue.config
    most = 0 if config.drafts_on_device else config.num_spec_tokens
    longest = max(map(len, drafts.draft_token_ids), default=0)
    if longest > most:
        raise InvalidParameterError(
            f"{longest} drafts for a request, and it may have {most} (num_spec_tokens={config.num_spec_tokens}, "
            f"drafts_on_device={config.drafts_on_device}): propose no more"
        )
    tickets = dict(zip(queue.running.req_ids, queue.running.facts.ticket.tolist(), strict=True))
    given = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
    own = {tickets[req_id]: tuple(tokens) for req_id, tokens in given if req_id in tickets}
    both = {ticket: tokens for ticket, tokens in {**queue.drafts, **own}.items() if tokens}
    return replace(queue, drafts=MappingProxyType(both))


def num_drafts(queue: Queue, wanted: Tokens) -> Tokens | None:
    """How many drafts each row has for a step that computes the wanted tokens; None if nobody has any.

    They follow a row's last token, so only a step that gets there verifies them, and no token is to lie beyond the
    row's limit. On the device a row may have drafts once it has sampled in the last step: it is not known how many.
    """
    counts, facts, config = queue.running.counts, queue.running.facts, queue.config
    if config.drafts_on_device:
        has = counts.ran & (wanted == 1) & (counts.num_tokens > facts.num_prompt)
        most = np.where(has, config.num_spec_tokens, 0)
    elif queue.drafts:
        most = np.array([len(queue.drafts.get(ticket, ())) for ticket in facts.ticket.tolist()])
        most = np.where(wanted > 0, most, 0)
    else:
        return None
    gets_there = counts.num_computed + wanted == counts.num_tokens
    room = np.where(gets_there, facts.length_limit - 1 - counts.num_tokens, 0)
    found: Tokens = np.clip(most, 0, np.maximum(room, 0)).astype(np.int32)
    return found if found.any() else None


def verified(queue: Queue, num_drafts: Tokens) -> Mapping[str, tuple[int, ...]]:
    """The first so many drafts of each row, by request id, of those that the scheduler has."""
    if queue.config.drafts_on_device:
        return NOTHING
    req_ids, tickets = queue.running.req_ids, queue.running.facts.ticket
    return MappingProxyType(
        {
            req_ids[row]: queue.drafts[int(tickets[row])][: num_drafts[row]]
            for row in np.flatnonzero(num_drafts).tolist()
        }
    )


def num_computed_least(queue: Queue) -> Tokens:
    """Tokens that each running row will have computed after all steps on their way, if no draft is accepted.

    The same object as the counts' `num_computed` if no draft is on its way.
    """
    running, steps = queue.running, [step for step in queue.in_flight if step.num_drafts is not None]
    if not steps:
        return running.counts.num_computed
    least = running.counts.num_computed.copy()
    for step in steps:
        rows = rows_of(running, step.ticket)
        least[rows[rows >= 0]] -= step.num_drafts[rows >= 0]  # type: ignore[index]
    return frozen(least)
