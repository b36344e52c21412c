"""Where a SchedulerOutput contradicts the batch that it is applied to: checked whole, before anything is laid out."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.records.batch import Holders, InputBatch
from purestep.pure.records.scheduler_output import NewRequestData, SchedulerOutput


def check_ids(output: SchedulerOutput) -> None:
    """Every scheduled id is described exactly once, and columns have one entry per id.

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


def check_counts(
    batch: InputBatch, output: SchedulerOutput, at: NDArray[np.intp], start: NDArray[Any], end: NDArray[Any]
) -> None:
    """Every scheduled token is known and has a place, and starts where the device stands.

    Tokens `start` up to `end` of the rows `at` are to be computed. While a step is unsettled a row may run one token
    ahead of what is known: the one that its last step will have sampled, if that step completed its history.

    Raises:
        SchedulerOutputError: otherwise.
    """
    columns, clock = batch.columns, batch.clock
    counts, known = output.num_scheduled_tokens, columns.num_tokens[at]
    settled, room = columns.num_computed_tokens_settled[at], columns.room[at]
    if clock.num_begun == clock.num_settled:
        wrong = (start != settled) | (end > known)
    else:
        reached = columns.num_computed_tokens_bound[at]
        ahead = (counts == 1) & (start == reached) & (start > settled) & (end <= batch.limits.max_model_len)
        wrong = (start > reached) | ((end > known) & ~ahead)
    wrong |= (counts < 1) | (start < 0) | (end > room)
    if np.count_nonzero(wrong):
        i = int(np.flatnonzero(wrong)[0])
        raise SchedulerOutputError(
            f"request {output.req_ids[i]!r}: {counts[i]} tokens scheduled after {start[i]} computed ones; it has "
            f"{known[i]} known tokens, {settled[i]} of them computed for certain, room for {room[i]} in its "
            f"blocks, and max_model_len is {batch.limits.max_model_len}: schedule at least one token, from where "
            "it stands, and no further than all three"
        )
