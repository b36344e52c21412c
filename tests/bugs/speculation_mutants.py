"""Failures of speculation, brought back: see tests/test_mutants.py."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.arrays import frozen
from purestep.pure.constrain import constrain
from purestep.pure.grammar import GrammarMask, grammar_mask
from purestep.pure.inputs import prepare_inputs
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.inputs import StepInputs
from purestep.pure.records.outputs import ModelRunnerOutput
from purestep.pure.records.sampling_rows import BatchParams
from purestep.pure.records.scheduler_output import GrammarOutput
from purestep.pure.records.state import StepState
from purestep.state.stages import told_tokens
from tests.bugs import test_speculation
from tests.mutant import Mutant

sampling, step = map(importlib.import_module, ("purestep.pure.sampling", "purestep.pure.step"))
runner = importlib.import_module("purestep.state.runner")
_params_at_places = sampling._params_at_places

# H20: noise is consumed, by requests without drafts too.


def goes_on_after_every_place(params: BatchParams, drafts: Tensor) -> BatchParams:
    found: BatchParams = _params_at_places(params, drafts)
    return replace(found, num_output_tokens=found.num_output_tokens + drafts.shape[1])


# H21: rules and temperature are applied to the model's logits where they lie.


def constrains_in_place(state: StepState, params: BatchParams, logits: Tensor, *others: Any) -> Tensor:
    return logits.copy_(constrain(state, params, logits, *others))


# H24: stop ids are held back in every row of a request that begins short; rows slip where a request has no drafts.


def counts_no_drafts(params: BatchParams, drafts: Tensor) -> BatchParams:
    found: BatchParams = _params_at_places(params, drafts)
    return replace(found, num_output_tokens=params.num_output_tokens)


def leaves_out_requests_without_drafts(state: StepState, *, kernels: Kernels) -> StepInputs:
    inputs = prepare_inputs(state, kernels=kernels)
    if inputs.drafts is None:
        return inputs
    rows = inputs.logits_indices.unflatten(0, (len(inputs.drafts), -1))
    has_some = inputs.drafts[:, 0] >= 0
    packed = torch.cat([rows[has_some], rows[~has_some]])
    return replace(inputs, logits_indices=packed.flatten())


# H27: masks are counted by the drafts that are left.


def counts_masks_that_are_used(
    grammar: GrammarOutput, req_ids: Sequence[str], drafts: Mapping[str, Sequence[int]], **shape: int
) -> GrammarMask:
    found = grammar_mask(grammar, req_ids, drafts, **shape)
    unused = 2  # by the request that is first in the grammar's list, and last in the batch
    rows = found.mask_of_row.copy()
    rows[: 1 + shape["num_drafts"]] -= unused
    return replace(found, mask_of_row=frozen(rows))


# H32: only the last pipeline stage counts all tokens of a step.


def tells_the_first_token(batch: InputBatch, sampled: ModelRunnerOutput) -> np.ndarray:
    told = told_tokens(batch, sampled)
    told[:, 1:] = -1
    return told


SPECULATION_MUTANTS = [
    Mutant(
        "H20",
        "every request uses noise for drafts",
        test_speculation.test_a_request_without_drafts_draws_what_it_draws_without_speculation,
        sampling,
        {"_params_at_places": goes_on_after_every_place},
    ),
    Mutant(
        "H21",
        "raw log-probabilities of edited logits",
        test_speculation.test_raw_log_probabilities_are_the_models_and_processed_ones_those_that_tokens_are_drawn_from,
        sampling,
        {"constrain": constrains_in_place},
    ),
    Mutant(
        "H24",
        "min_tokens counts no drafts",
        test_speculation.test_min_tokens_and_missing_drafts_keep_every_row_in_its_place,
        sampling,
        {"_params_at_places": counts_no_drafts},
    ),
    Mutant(
        "H24",
        "requests without drafts are left out",
        test_speculation.test_min_tokens_and_missing_drafts_keep_every_row_in_its_place,
        step,
        {"prepare_inputs": leaves_out_requests_without_drafts},
    ),
    Mutant(
        "H27",
        "masks are counted by the drafts that are left",
        test_speculation.test_masks_follow_what_was_scheduled_and_tokens_what_is_verified,
        test_speculation,
        {"grammar_mask": counts_masks_that_are_used},
    ),
    Mutant(
        "H32",
        "stages before the last count one token a step",
        test_speculation.test_pipeline_stages_agree_on_how_many_drafts_were_accepted,
        runner,
        {"told_tokens": tells_the_first_token},
    ),
]
