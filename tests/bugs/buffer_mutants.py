"""Failures of steps in flight and of padding, brought back: see tests/test_mutants.py."""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.arrays import frozen
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.inputs import prepare_inputs
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.inputs import BatchDescriptor, StepInputs
from purestep.pure.records.layout import Layout
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.state import StepState
from tests.bugs import test_buffers
from tests.mutant import Mutant

# A package may hold a function of a module's name, so modules are fetched by their full names.
plan, step, two_phase, staging, pending = map(
    importlib.import_module,
    (
        "purestep.pure.plan",
        "purestep.pure.step",
        "purestep.state.two_phase",
        "purestep.state.staging",
        "purestep.state.pending",
    ),
)
_admitted = plan._admitted

# H8: dummies stand before the real requests; tokens are fed back by place in the batch.


def pads_in_front(
    batch: InputBatch, descriptor: BatchDescriptor, *, before: Layout | None = None
) -> InputBatch:
    padded = pad_batch(batch, descriptor)
    num_dummies = padded.layout.bounds.num_reqs - batch.layout.bounds.num_reqs
    starts = np.concatenate([np.zeros(num_dummies, np.int32), batch.layout.query_start_loc])
    rows = np.roll(padded.layout.row_of_index, num_dummies)
    return replace(padded, layout=Layout(frozen(rows), frozen(starts), padded.layout.bounds))


def feeds_by_index(state: StepState, *, kernels: Kernels) -> StepInputs:
    inputs = prepare_inputs(state, kernels=kernels)
    index, _ = kernels.ragged_index(inputs.query_start_loc, len(inputs.positions))
    return replace(inputs, input_ids=state.token_ids[index, inputs.positions])


# H28: the host writes the next plan where the last one is still to be read.


class ReusedMemory:
    words = np.zeros(4096, np.int32)
    pinned: Any = None

    @classmethod
    def plan_step(cls, batch: InputBatch, absorbed: InputBatch) -> StepPlan:
        plan = plan_step(batch, absorbed)
        words = cls.words[: len(plan.inbox.data)]
        words[:] = plan.inbox.data
        return replace(plan, inbox=replace(plan.inbox, data=words))

    @classmethod
    def upload(cls, words: np.ndarray, device: torch.device) -> Tensor:
        if cls.pinned is None:
            cls.pinned = staging.torch.empty((4096,), dtype=torch.int32, pin_memory=True)
        pinned = cls.pinned[: len(words)]
        pinned.numpy()[:] = words
        return pinned.to(device, non_blocking=True)


# H36: a request that was taken back is not written anew.


def admits_new_ids_only(batch: InputBatch, absorbed: InputBatch) -> list[int]:
    ids = [request and request.req_id for request in absorbed.rows.requests]
    return [row for row in _admitted(batch, absorbed) if batch.rows.requests[row].req_id != ids[row]]


BUFFER_MUTANTS = [
    Mutant(
        "H8",
        "dummies stand first",
        test_buffers.test_dummies_among_decodes_never_shift_the_token_that_a_request_goes_on_from,
        two_phase,
        {"pad_batch": pads_in_front},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H8",
        "tokens are fed back by place in the batch",
        test_buffers.test_dummies_among_decodes_never_shift_the_token_that_a_request_goes_on_from,
        step,
        {"prepare_inputs": feeds_by_index},
    ),
    Mutant(
        "H28",
        "plans share their words",
        test_buffers.test_a_plan_says_what_it_said_however_late_it_is_read,
        test_buffers,
        {"plan_step": ReusedMemory.plan_step},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H28",
        "plans share one pinned buffer",
        test_buffers.test_plans_are_staged_through_memory_that_nobody_writes_while_it_is_copied,
        staging,
        {"upload": ReusedMemory.upload},
    ),
    Mutant(
        "H29",
        "results stay where the next step writes",
        test_buffers.test_a_pending_token_is_read_as_it_was_whatever_padded_steps_were_begun_since,
        pending,
        {"_on_its_way": lambda leaf: leaf},
        error=SchedulerOutputError,
    ),
    Mutant(
        "H36",
        "the row of a request that was taken back is kept",
        test_buffers.test_steps_that_are_taken_back_leave_nothing_behind,
        plan,
        {"_admitted": admits_new_ids_only},
        error=SchedulerOutputError,
    ),
]
