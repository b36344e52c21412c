"""Where a SchedulerOutput contradicts the batch that it is applied to: checked whole, before anything is laid out."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.records.batch import Holders, InputBatch
from purestep.pure.records.scheduler_output import NewRequestData, SchedulerOutput


def check_ids(output: SchedulerOutput) -> None:
    """Every scheduled id is described exactly once, none runs on that was preempted, columns have an entry per id.

    Raises:
        SchedulerOutputError: otherwise.
    """
    cached = output.scheduled_cached_reqs
    named = cached.req_ids + tuple(new.req_id for new in output.scheduled_new_reqs)
    distinct = set(named)
    if len(distinct) != len(named) or len(output.req_ids) != len(named) or set(output.req_ids) != distinct:
        raise SchedulerOutputError(
            f"the output schedules tokens for {len(output.req_ids)} ids and describes {len(named)} requests, "
            f"{len(distinct)} of them distinct: every scheduled id must be described exactly once"
        )
    if not has_full_columns(output):
        raise SchedulerOutputError(
            f"the output has {len(output.num_scheduled_tokens)} counts of tokens for {len(output.req_ids)} requests, "
            f"and {len(cached.num_computed_tokens)} and {len(cached.num_output_tokens)} counts of computed and output "
            f"tokens for {len(cached.req_ids)} known ones: give one for each"
        )
    runs_on = distinct & output.preempted_req_ids if output.preempted_req_ids else frozenset()
    if wrong := runs_on - cached.resumed_req_ids - {new.req_id for new in output.scheduled_new_reqs}:
        raise SchedulerOutputError(
            f"request {min(wrong)!r} is scheduled as one that runs on, and it is among the "
            f"{len(output.preempted_req_ids)} preempted ones: leave it out, or resume it with all its blocks"
        )
    stray = (cached.new_block_ids.keys() | cached.resumed_req_ids) - set(cached.req_ids)
    if stray:
        raise SchedulerOutputError(
            f"request {min(stray)!r} is resumed or given blocks, but it is not among the {len(cached.req_ids)} known "
            "requests that the output schedules: schedule it too"
        )


def check_supported(new: NewRequestData) -> None:
    """A new request brings nothing that no stage reads.

    Raises:
        SchedulerOutputError: otherwise.
    """
    brought = [
        name for name in ("pooling_params", "prompt_embeds", "lora_request") if getattr(new, name) is not None
    ]
    brought += ["mm_features"] if len(new.mm_features) else []
    brought += [] if all(new.prompt_is_token_ids or ()) else ["prompt_is_token_ids"]
    if brought:
        raise SchedulerOutputError(
            f"new request {new.req_id!r} brings {' and '.join(brought)}: not supported, no stage reads them; send a "
            "prompt of token ids, with sampling_params"
        )


def check_block_orders(batch: InputBatch, output: SchedulerOutput, holders: Holders) -> None:
    """Blocks to copy and to zero exist, and are not the null block (which pads what is sent to the device).

    A block that is copied into is held by one row at most, and named once.

    Raises:
        SchedulerOutputError: otherwise.
    """
    copied = [[block for pair in pairs for block in pair] for pairs in output.block_copies]
    for what, groups in (("copy", copied), ("zero", output.new_block_ids_to_zero)):
        if len(groups) > len(batch.limits.num_blocks):
            raise SchedulerOutputError(
                f"blocks to {what} for {len(groups)} KV groups; the cache has {len(batch.limits.num_blocks)}"
            )
        for group, (blocks, num_blocks) in enumerate(zip(groups, batch.limits.num_blocks, strict=False)):
            if blocks and not 1 <= min(blocks) <= max(blocks) < num_blocks:
                raise SchedulerOutputError(
                    f"blocks {min(blocks)} to {max(blocks)} are to be part of a {what} in KV group {group}, which has "
                    f"blocks 1 to {num_blocks - 1} beside the null block"
                )
    for group, (pairs, zeroed) in enumerate(
        zip(output.block_copies, output.new_block_ids_to_zero, strict=False)
    ):
        if lost := {source for source, _ in pairs}.intersection(zeroed):
            raise SchedulerOutputError(
                f"block {min(lost)} of KV group {group} is to be copied, and to be zeroed, which is done first: zero "
                "only blocks that nobody reads yet"
            )
    for group, pairs in enumerate(output.block_copies):
        targets = np.array([target for _, target in pairs], np.int32)
        wrong = targets[holders.counts[group][targets] > 1].tolist()
        wrong += [block for block, times in Counter(targets.tolist()).items() if times > 1]
        if wrong:
            raise SchedulerOutputError(
                f"block {wrong[0]} of KV group {group} is to be copied into, but several rows hold it or several "
                "copies name it: give each request a block of its own to copy into"
            )


def has_full_columns(output: SchedulerOutput) -> bool:
    """Whether every column is as long as the ids that it is in parallel with."""
    cached = output.scheduled_cached_reqs
    num_cached = len(cached.req_ids)
    return (
        len(output.num_scheduled_tokens) == len(output.req_ids)
        and len(cached.num_computed_tokens) == num_cached
        and len(cached.num_output_tokens) == num_cached
    )


def check_draft_kinds(output: SchedulerOutput) -> None:
    """Drafts are a mapping of ids to tuples of whole numbers, or the counts of them a column of the scheduled requests.

    Raises:
        SchedulerOutputError: otherwise.
    """
    given, counts = output.scheduled_spec_decode_tokens, output.num_device_drafts
    if not isinstance(given, Mapping):
        raise SchedulerOutputError(
            f"scheduled_spec_decode_tokens={given!r}: give a mapping of request ids to tuples of token ids"
        )
    for req_id, drafts in given.items():
        if (
            not isinstance(req_id, str)
            or not isinstance(drafts, tuple | list)
            or not all(map(_is_whole, drafts))
        ):
            raise SchedulerOutputError(
                f"request {req_id!r} has drafts {drafts!r}: ids are text, and drafts a tuple of token ids"
            )
    if counts is None:
        return
    if (
        not isinstance(counts, np.ndarray)
        or counts.dtype.kind != "i"
        or counts.shape != (len(output.req_ids),)
    ):
        raise SchedulerOutputError(
            f"num_device_drafts={counts!r} for {len(output.req_ids)} scheduled requests: give an array of whole "
            "numbers, one for each"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def check_drafts(batch: InputBatch, output: SchedulerOutput, num_drafts: NDArray[Any]) -> None:
    """Drafts are of requests that the step schedules, token ids, no more than a row can have, and follow a known token.

    `num_drafts` has how many of each request's scheduled tokens are drafts.

    Raises:
        SchedulerOutputError: otherwise.
    """
    given, limits = output.scheduled_spec_decode_tokens, batch.limits
    if given and output.num_device_drafts is not None:
        raise SchedulerOutputError(
            f"scheduled_spec_decode_tokens of {len(given)} requests, and num_device_drafts: give one of them; -1 in "
            "the first stands for a draft that the device has"
        )
    if stray := given.keys() - set(output.req_ids):
        raise SchedulerOutputError(
            f"request {min(stray)!r} has drafts, but it is not among the {len(output.req_ids)} requests that the "
            "output schedules: schedule it too, or keep its drafts for later"
        )
    most = np.minimum(output.num_scheduled_tokens - 1, limits.num_drafts)
    wrong = (num_drafts < 0) | (num_drafts > most)
    if np.count_nonzero(wrong):
        i = int(np.flatnonzero(wrong)[0])
        raise SchedulerOutputError(
            f"request {output.req_ids[i]!r}: {num_drafts[i]} of {output.num_scheduled_tokens[i]} scheduled tokens are "
            f"drafts; a row has up to num_drafts={limits.num_drafts} of them, and they follow a token that is none"
        )
    for req_id, drafts in given.items():
        if drafts and not -1 <= min(drafts) <= max(drafts) < limits.vocab_size:
            raise SchedulerOutputError(
                f"request {req_id!r} has drafts {drafts}: they are ids from 0 to {limits.vocab_size - 1}, or -1 for "
                "what the device has"
            )


def check_steps(
    batch: InputBatch, output: SchedulerOutput, at: NDArray[np.intp], start: NDArray[Any]
) -> None:
    """Of several steps each request has one token at most, from its last known one on, and no drafts.

    Raises:
        SchedulerOutputError: otherwise.
    """
    counts, num_steps, drafts = output.num_scheduled_tokens, output.num_steps, output.num_device_drafts
    if num_steps < 1 or output.scheduled_spec_decode_tokens or drafts is not None:
        raise SchedulerOutputError(
            f"{num_steps} steps at once, with drafts of {len(output.scheduled_spec_decode_tokens)} requests and "
            f"num_device_drafts={drafts}: schedule at least one step, and drafts in steps of their own"
        )
    known = batch.columns.num_tokens[at]
    wrong = (counts > num_steps) | (start + 1 < known)
    if np.count_nonzero(wrong):
        i = int(np.flatnonzero(wrong)[0])
        raise SchedulerOutputError(
            f"request {output.req_ids[i]!r}: {counts[i]} tokens scheduled in {num_steps} steps at once, after "
            f"{start[i]} computed ones of {known[i]} known: each step computes one token, so schedule no more than "
            "there are steps, and prompts before"
        )


def check_counts(
    batch: InputBatch,
    output: SchedulerOutput,
    at: NDArray[np.intp],
    start: NDArray[Any],
    end: NDArray[Any],
    num_drafts: NDArray[Any] | None = None,
) -> None:
    """Every scheduled token is known or a draft and has a place, and starts where the device stands.

    Tokens `start` up to `end` of the rows `at` are to be computed, of which the last `num_drafts` are drafts. While a
    step is unsettled a row may run one token ahead of what is known: the one that its last step will have sampled, if
    that step completed its history. Drafts follow the last known token, or that one.

    Raises:
        SchedulerOutputError: otherwise.
    """
    columns, clock, max_model_len = batch.columns, batch.clock, batch.limits.max_model_len
    counts, known = output.num_scheduled_tokens, columns.num_tokens[at]
    settled, room = columns.num_computed_tokens_settled[at], columns.room[at]
    unknown: NDArray[Any] = end > known
    ahead_by: Any = 1
    if num_drafts is not None:
        unknown = (end > known + num_drafts) | ((num_drafts > 0) & (end != known + num_drafts))
        unknown |= end > max_model_len
        ahead_by = num_drafts + 1
    if clock.num_begun == clock.num_settled:
        wrong = (start != settled) | unknown
    else:
        reached = columns.num_computed_tokens_bound[at]
        ahead = (counts == ahead_by) & (start == reached) & (start > settled) & (end <= max_model_len)
        wrong = (start > reached) | (unknown & ~ahead)
    wrong |= (counts < 1) | (start < 0) | (end > room)
    if np.count_nonzero(wrong):
        i = int(np.flatnonzero(wrong)[0])
        drafts = "" if num_drafts is None else f" ({num_drafts[i]} of them drafts)"
        raise SchedulerOutputError(
            f"request {output.req_ids[i]!r}: {counts[i]} tokens scheduled{drafts} after {start[i]} computed ones; it "
            f"has {known[i]} known tokens, {settled[i]} of them computed for certain, room for {room[i]} in its "
            f"blocks, and max_model_len is {max_model_len}: schedule at least one token, from where it stands, and no "
            "further than all three"
        )
