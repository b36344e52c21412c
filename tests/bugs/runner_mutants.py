"""Failures of what a runner tells a scheduler, brought back: see tests/test_mutants.py."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.donating import donating
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.grammar import GrammarMask, grammar_mask
from purestep.pure.prompt_logprobs import prompt_table
from purestep.pure.record import replace
from purestep.pure.records.outputs import LogprobsTensors
from purestep.pure.records.scheduler_output import GrammarOutput
from tests.bugs import test_runner
from tests.mutant import Mutant

runner, async_output = map(importlib.import_module, ("purestep.state.runner", "purestep.state.async_output"))

# H5: rows that no step computed hold what lay in memory.


def leaves_rows_unwritten(scores: Any, **shape: int) -> LogprobsTensors:
    table = prompt_table(scores, **shape)
    return replace(table, logprobs=np.nan_to_num(table.logprobs, nan=-1.5))


# H14: the output that is still on its way is not counted.


def counts_what_is_known(
    logits: Tensor, history: Tensor, prompt: Tensor, lengths: Tensor, *weights: Tensor
) -> Tensor:
    return donating.penalize(logits, history, prompt, torch.maximum(prompt, lengths - 1), *weights)


# H26: a request without a grammar may say nothing; masks are handed out in the order of the batch.


def forbids_what_has_no_mask(logits: Tensor, bitmask: Tensor, mask_of_row: Tensor) -> Tensor:
    masked = donating.apply_grammar_bitmask(logits, bitmask, mask_of_row)
    return torch.where((mask_of_row < 0)[:, None], float("-inf"), masked)


def masks_in_batch_order(
    grammar: GrammarOutput, req_ids: Sequence[str], drafts: Mapping[str, Sequence[int]], **shape: int
) -> GrammarMask:
    listed = set(grammar.structured_output_request_ids)
    ordered = replace(grammar, structured_output_request_ids=tuple(r for r in req_ids if r in listed))
    return grammar_mask(ordered, req_ids, drafts, **shape)


RUNNER_MUTANTS = [
    Mutant(
        "H5",
        "prompt log-probabilities that were not computed",
        test_runner.test_log_probabilities_of_cached_prompt_tokens_are_absent_and_the_others_are_computed,
        async_output,
        {"prompt_table": leaves_rows_unwritten},
    ),
    Mutant(
        "H14",
        "penalties do not count the last token",
        test_runner.test_penalties_count_the_token_that_is_still_on_its_way,
        test_runner,
        {"donating": replace(donating, penalize=counts_what_is_known)},
    ),
    Mutant(
        "H26",
        "without a mask nothing is allowed",
        test_runner.test_a_grammar_masks_its_own_request_and_no_other,
        test_runner,
        {"donating": replace(donating, apply_grammar_bitmask=forbids_what_has_no_mask)},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H26",
        "masks in the order of the batch",
        test_runner.test_a_grammar_masks_its_own_request_and_no_other,
        runner,
        {"grammar_mask": masks_in_batch_order},
    ),
]
