"""Structured output: the masks that the scheduler sends between the two halves of a step, and where they apply."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from purestep.kernels.types import Kernels
from purestep.pure.arrays import Array, frozen
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import record, replace
from purestep.pure.records.scheduler_output import GrammarOutput
from purestep.pure.records.state import ExecuteModelState


@record
class GrammarMask:
    """Masks, and which row of logits each is for."""

    bitmask: Int32[Array, "masks words"]
    mask_of_row: Int32[Array, " logits"]  # -1: the row has no grammar


def grammar_mask(
    grammar: GrammarOutput,
    req_ids: Sequence[str],
    drafts: Mapping[str, Sequence[int]],
    *,
    num_rows: int,
    vocab_size: int,
    num_drafts: int = 0,
) -> GrammarMask:
    """The masks, found by request id, for the `num_rows` rows of logits of a batch and its padding.

    A request has 1 + `num_drafts` rows of logits (the layout's), in the order of the batch, and 1 + its scheduled
    drafts masks, in the order of the grammar's ids: two numbers, and a mask is for the row with its place. Requests
    that do not run use up theirs; a request without a grammar has no mask, which is not the same as one that allows
    nothing.

    Raises:
        SchedulerOutputError: another number of masks than that, or masks of another vocabulary.
    Source: vllm/v1/structured_output/utils.py apply_grammar_bitmask.
    """
    names, masks = grammar.structured_output_request_ids, grammar.grammar_bitmask
    counts = [1 + len(drafts.get(req_id, ())) for req_id in names]
    wanted = sum(counts), -(-vocab_size // 32)
    if masks.shape != wanted:
        raise SchedulerOutputError(
            f"grammar_bitmask has shape {masks.shape}, but {len(names)} structured requests with "
            f"{sum(counts) - len(names)} drafts and a vocabulary of {vocab_size} take {wanted}: send 1 + drafts masks "
            "for each id, of 32 tokens a word"
        )
    first_mask = dict(zip(names, np.cumsum([0, *counts]).tolist(), strict=False))
    mask_of_row = np.full(num_rows, -1, np.int32)
    for index, req_id in enumerate(req_ids):
        if req_id in first_mask:
            row, count = index * (1 + num_drafts), 1 + min(len(drafts.get(req_id, ())), num_drafts)
            mask_of_row[row : row + count] = first_mask[req_id] + np.arange(count)
    return GrammarMask(masks, frozen(mask_of_row))


def apply_grammar(executed: ExecuteModelState, mask: GrammarMask, *, kernels: Kernels) -> ExecuteModelState:
    """The same with logits as the grammars allow them: before sampling, raw log-probabilities included."""
    if not len(mask.bitmask):
        return executed
    logits = kernels.apply_grammar_bitmask(executed.logits, mask.bitmask, mask.mask_of_row)
    return replace(executed, logits=logits)
