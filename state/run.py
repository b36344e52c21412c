"""`run`: the single seam between immutable records and the buffers that change.

What is not needed by every step does not belong here.
"""

import attrs
import torch

from purestep.kernels.types import Kernels
from purestep.pure.absorb import absorb
from purestep.pure.errors import DispatchError, ExtrasError, PlanBaseError, StaleStateError
from purestep.pure.models.model import Model, prepare_params
from purestep.pure.propose import propose
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.state import StepState
from purestep.pure.step import execute, joined, sample, unroll
from purestep.state.buffers import PersistentBuffers
from purestep.state.graph_api import GraphApi
from purestep.state.graphs import CapturedSteps, GraphKey
from purestep.state.lease import Leased
from purestep.state.pending import Pending, to_host
from purestep.state.staging import stage
from purestep.state.weights import same_storage


@attrs.frozen
class BoundStep:
    """A step bound to buffers: the model, its parameters, kernels that write in place, and captured graphs if any."""

    buffers: PersistentBuffers
    model: Model
    params: Params
    kernels: Kernels
    graph_api: GraphApi | None = None
    drafter: Drafter | None = None  # on the device: each step proposes drafts for the next one
    prepared: Params = attrs.field(init=False, repr=False)  # `params` as the kernels want them
    captured: CapturedSteps | None = attrs.field(init=False, repr=False)

    @prepared.default
    def _prepare(self) -> Params:
        return prepare_params(self.model, self.params, kernels=self.kernels)

    @captured.default
    def _no_graphs(self) -> CapturedSteps | None:
        if self.graph_api is None:
            return None
        return CapturedSteps(
            self.model, self.prepared, self.buffers, self.kernels, self.graph_api, drafter=self.drafter
        )


def rebind(bound: BoundStep, params: Params) -> BoundStep:
    """The same step with other parameters; the old one stays as it is.

    Graphs read fixed addresses: they are the same if the tensors are. Else `captured.complete()` makes them, and
    drops the old ones.
    """
    new = attrs.evolve(bound, params=params)
    if bound.captured is not None and new.captured is not None:
        if same_storage(bound.prepared.tree, new.prepared.tree):
            new.captured.share(bound.captured)
        else:
            new.captured.follow(bound.captured)
    return new


def run(
    bound: BoundStep, leased: Leased, plan: StepPlan, *, key: GraphKey | None = None
) -> tuple[Leased, Pending]:
    """Run one step on the buffers: the lease is consumed, the next one and the step's output come back.

    If the plan's layout says so it is run several times: the plan is for the first of these steps, and rows that end on
    the way are frozen. Their output is one too, as `joined` makes it.

    With a `key`, the plan's batch is padded to its descriptor, and its graphs are replayed. The plan is absorbed
    before, by the same function as ever: a graph has no inbox, since a steady step brings nothing.

    An exception half-way leaves the buffers unusable until `buffers.lease()`, since part of them may be written.

    Raises:
        StaleStateError: the lease was consumed by another step.
        PlanBaseError: the plan starts from another batch than the state reflects; the lease stays good.
        DispatchError: the plan's batch is padded to more requests than the buffers hold, or the graphs are of another
            number of steps; the lease stays good.
        ExtrasError: requests with logits processors or chosen ids, which two launches serve; the lease stays good.
    """
    bounds = plan.batch.layout.bounds
    if bounds.sampler.extras:
        raise ExtrasError(
            "a whole step of requests with logits_processors or logprob_token_ids: run it by two_phase.execute and "
            "two_phase.sample, which gives them to the sampler"
        )
    if key is not None and key.num_steps != bounds.num_steps:
        raise DispatchError(
            f"a plan of {bounds.num_steps} steps, and graphs of {key.num_steps}: give a key of as many, or none"
        )
    buffers, captured = bound.buffers, bound.captured
    kernels, key = now_running(bound, key)
    state = begin(bound, leased, plan)
    if key is not None and key.sampler is not None:
        assert captured is not None, "a key was given for a step without graphs"
        sent = captured.replay(key)
    else:
        with torch.no_grad():
            state, output = _launched(bound, state, bounds.num_steps, key, kernels)
            sent = to_host(output)
    return buffers.adopt(state, plan.batch), Pending(plan.batch, sent)


def _launched(
    bound: BoundStep, state: StepState, num_steps: int, key: GraphKey | None, kernels: Kernels
) -> tuple[StepState, StepOutput]:
    """Steps launched from the host: of the model's captured pieces where there is a key, else kernel by kernel."""
    model, params, drafter = bound.model, bound.prepared, bound.drafter
    if key is None:
        state, outputs = unroll(model, params, state, num_steps, kernels=kernels, drafter=drafter)
        return state, joined(outputs)
    assert bound.captured is not None, "a key was given for a step without graphs"
    executed = execute(model, params, state, kernels=kernels, call=bound.captured.pieces(key).call)
    return propose(drafter, params, executed, *sample(executed, kernels=kernels), kernels=kernels)


def now_running(bound: BoundStep, key: GraphKey | None) -> tuple[Kernels, GraphKey | None]:
    """The kernels of the step that begins, and its graphs: none while scales are due, on whatever padding it has."""
    due = bound.buffers.due_scales
    return (due.calculating(bound.kernels), None) if due else (bound.kernels, key)


def begin(bound: BoundStep, leased: Leased, plan: StepPlan) -> StepState:
    """The state with the plan taken in, to be written by steps: the lease is void until it is adopted."""
    _check(bound, leased, plan)
    buffers, inbox = bound.buffers, plan.inbox
    state = buffers.begin(leased.generation)
    if inbox.is_empty:
        return state
    with torch.no_grad():
        staged = replace(state, inbox=stage(inbox, buffers.device))
        return buffers.place(absorb(staged, kernels=bound.kernels))


def _check(bound: BoundStep, leased: Leased, plan: StepPlan) -> None:
    """Raise before anything is written if this plan can not be run on this lease."""
    if not leased.is_on(bound.buffers):
        raise StaleStateError(
            "this lease is on other buffers than the step is bound to: use the one they gave"
        )
    leased.value  # noqa: B018  # a stale lease is refused before its plan is judged
    if plan.base is not leased.absorbed:
        raise PlanBaseError(
            f"this plan starts from a batch of {len(plan.base.row_of)} requests that is not the one which the state at "
            f"step {leased.generation} reflects: make it with plan_step(batch, leased.absorbed)"
        )
    bound.buffers.check_layout(plan.batch.layout)
