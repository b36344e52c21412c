"""`run`: the single seam between immutable records and the buffers that change.

What is not needed by every step does not belong here.
"""

import attrs
import torch

from purestep.kernels.types import Kernels
from purestep.pure.errors import PlanBaseError
from purestep.pure.models.model import Model, prepare_params
from purestep.pure.record import replace
from purestep.pure.records.params import Params
from purestep.pure.records.plan import StepPlan
from purestep.pure.step import step
from purestep.state.buffers import PersistentBuffers
from purestep.state.lease import Leased
from purestep.state.pending import Pending


@attrs.frozen
class BoundStep:
    """A step bound to buffers: the model, its parameters, and kernels that write in place."""

    buffers: PersistentBuffers
    model: Model
    params: Params
    kernels: Kernels
    prepared: Params = attrs.field(init=False, repr=False)  # `params` as the kernels want them

    @prepared.default
    def _prepare(self) -> Params:
        return prepare_params(self.model, self.params, kernels=self.kernels)


def run(bound: BoundStep, leased: Leased, plan: StepPlan) -> tuple[Leased, Pending]:
    """Run one step on the buffers: the lease is consumed, the next one and the step's output come back.

    An exception half-way leaves the buffers unusable until `buffers.lease()`, since part of them may be written.

    Raises:
        StaleStateError: the lease was consumed by another step.
        PlanBaseError: the plan starts from another batch than the state reflects; the lease stays good.
    """
    leased.value  # noqa: B018  # a stale lease is refused before its plan is judged
    if plan.base is not leased.absorbed:
        raise PlanBaseError(
            f"the plan starts from a batch of {len(plan.base.row_of)} requests that is not the one which the state at "
            f"step {leased.generation} reflects: make it with plan_step(batch, leased.absorbed)"
        )
    inbox = plan.inbox.to(bound.buffers.device)
    state = bound.buffers.begin(leased.generation)
    with torch.no_grad():
        state, output = step(bound.model, bound.prepared, replace(state, inbox=inbox), kernels=bound.kernels)
    return bound.buffers.adopt(state, plan.batch), Pending(plan.batch, output)
