"""Failures of steps in flight and of padding, brought back: see tests/test_mutants.py."""

import importlib
from typing import Any

import attrs
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
from purestep.pure.records.state import ExecuteModelState, StepState
from purestep.state.kv_scales import DueScales
from purestep.state.run import BoundStep
from tests.bugs import test_buffers, test_kv_cache
from tests.mutant import Mutant

# A package may hold a function of a module's name, so modules are fetched by their full names.
plan, step, two_phase, staging, pending, profile, buffers, run = map(
    importlib.import_module,
    (
        "purestep.pure.plan",
        "purestep.pure.step",
        "purestep.state.two_phase",
        "purestep.state.staging",
        "purestep.state.pending",
        "purestep.state.profile",
        "purestep.state.buffers",
        "purestep.state.run",
    ),
)
_admitted, _execute = plan._admitted, profile._execute

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


# H34: scales are made of made-up batches, in every step, or in none.


def runs_dummies_as_first_steps(bound: BoundStep, *layout: Any) -> ExecuteModelState:
    due = bound.buffers.due_scales
    executed = _execute(attrs.evolve(bound, kernels=due.calculating(bound.kernels)), *layout)
    due.keep()
    return executed


class AlwaysDue(DueScales):
    def keep(self) -> None:
        return


class OfPadding(DueScales):
    def _calculate(self, kernels: Kernels, k: Tensor, v: Tensor, kv: Tensor, *rest: Any) -> None:
        super()._calculate(kernels, k, v, kv[:, :, :0], *rest)


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
        {
            "_copy": lambda memory, sources: [
                own.set_(source) for own, source in zip(memory, sources, strict=True)
            ]
        },
        error=SchedulerOutputError,
    ),
    Mutant(
        "H34",
        "scales are made of dummies",
        test_kv_cache.test_scales_are_made_of_the_first_real_step_and_never_again,
        profile,
        {"_execute": runs_dummies_as_first_steps},
    ),
    Mutant(
        "H34",
        "scales are made of padding",
        test_kv_cache.test_scales_are_made_of_the_first_real_step_and_never_again,
        buffers,
        {"DueScales": OfPadding},
    ),
    Mutant(
        "H34",
        "scales are made in every step",
        test_kv_cache.test_scales_are_made_of_the_first_real_step_and_never_again,
        buffers,
        {"DueScales": AlwaysDue},
    ),
    Mutant(
        "H34",
        "scales are not made in a step with a graph",
        test_kv_cache.test_scales_are_made_of_the_first_real_step_and_never_again,
        run,
        {"now_running": lambda bound, key: (bound.kernels, key)},
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
