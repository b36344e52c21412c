"""`run`: the single seam between immutable records and the buffers that change.

What is not needed by every step does not belong here.
"""

from collections.abc import Sequence

import attrs
import torch

from purestep.kernels.types import Kernels
from purestep.pure.absorb import absorb
from purestep.pure.errors import ExtrasError, PlanBaseError, StaleStateError
from purestep.pure.models.model import Model, prepare_params
from purestep.pure.propose import propose
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.params import Params
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.state import StepState
from purestep.pure.step import execute, sample, unroll
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

    With a `key`, the plan's batch is padded to its descriptor, and its graphs are replayed. The plan is absorbed
    before, by the same function as ever: a graph has no inbox, since a steady step brings nothing.

    An exception half-way leaves the buffers unusable until `buffers.lease()`, since part of them may be written.

    Raises:
        StaleStateError: the lease was consumed by another step.
        PlanBaseError: the plan starts from another batch than the state reflects; the lease stays good.
        DispatchError: the plan's batch is padded to more requests than the buffers hold; the lease stays good.
        ExtrasError: requests with logits processors or chosen ids, which two launches serve; the lease stays good.
    """
    leased, (pending,) = run_unrolled(bound, leased, (plan,), key=key)
    return leased, pending


def run_unrolled(
    bound: BoundStep, leased: Leased, plans: Sequence[StepPlan], *, key: GraphKey | None = None
) -> tuple[Leased, tuple[Pending, ...]]:
    """Run one step for each plan, in one graph where a `key` of so many steps is given: as `run` in a loop.

    Every plan but the first is for the batch as the step before leaves it, and brings the device nothing: rows that
    stop on the way are frozen by it.

    Raises:
        StaleStateError, PlanBaseError: as `run`; the latter also for a plan, after the first, that brings something.
        ExtrasError: as `run`.
    """
    num_steps = len(plans)
    if any(plan.batch.layout.bounds.sampler.extras for plan in plans):
        raise ExtrasError(
            f"{num_steps} whole steps, of requests with logits_processors or logprob_token_ids: run these by "
            "two_phase.execute and two_phase.sample, which gives them to the sampler"
        )
    buffers, captured = bound.buffers, bound.captured
    kernels, key = now_running(bound, key)
    with torch.no_grad():
        state = begin(bound, leased, plans)
        if key is None:
            state, outputs = unroll(
                bound.model, bound.prepared, state, num_steps, kernels=kernels, drafter=bound.drafter
            )
            sent = tuple(map(to_host, outputs))
        else:
            assert captured is not None, "a key was given for a step without graphs"
            if key.sampler is None:
                call = captured.pieces(key).call
                executed = execute(bound.model, bound.prepared, state, kernels=bound.kernels, call=call)
                state, output = propose(
                    bound.drafter,
                    bound.prepared,
                    executed,
                    *sample(executed, kernels=bound.kernels),
                    kernels=bound.kernels,
                )
                sent = (to_host(output),)
            else:
                sent = captured.replay(key)
        pending = tuple([Pending(p.batch, output) for p, output in zip(plans, sent, strict=True)])
    return buffers.adopt(state, plans[-1].batch), pending


def now_running(bound: BoundStep, key: GraphKey | None) -> tuple[Kernels, GraphKey | None]:
    """The kernels of the step that begins, and its graphs: none while scales are due, on whatever padding it has."""
    due = bound.buffers.due_scales
    return (due.calculating(bound.kernels), None) if due else (bound.kernels, key)


def begin(bound: BoundStep, leased: Leased, plans: Sequence[StepPlan]) -> StepState:
    """The state with the first of the plans taken in, to be written by steps: the lease is void until it is adopted."""
    _check(bound, leased, plans)
    buffers, inbox = bound.buffers, plans[0].inbox
    state = buffers.begin(leased.generation)
    if inbox.is_empty:
        return state
    staged = replace(state, inbox=stage(inbox, buffers.device))
    return buffers.place(absorb(staged, kernels=bound.kernels))


def _check(bound: BoundStep, leased: Leased, plans: Sequence[StepPlan]) -> None:
    """Raise before anything is written if these plans can not be run on this lease."""
    if not leased.is_on(bound.buffers):
        raise StaleStateError(
            "this lease is on other buffers than the step is bound to: use the one they gave"
        )
    leased.value  # noqa: B018  # a stale lease is refused before its plan is judged
    base = leased.absorbed
    for i, plan in enumerate(plans):
        if plan.base is not base:
            raise PlanBaseError(
                f"plan {i} starts from a batch of {len(plan.base.row_of)} requests that is not the one which the "
                f"state at step {leased.generation + i} reflects: make it with plan_step(batch, leased.absorbed), and "
                "a later one from the batch of the plan before it"
            )
        if i and plan.inbox.brings_data:
            raise PlanBaseError(
                f"plan {i} of {len(plans)} brings the device {len(plan.inbox.data)} words: unrolled steps take in the "
                "first plan only; run this one in a step of its own"
            )
        bound.buffers.check_layout(plan.batch.layout)
        base = plan.batch
