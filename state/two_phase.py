"""A step as two launches: `execute` up to logits, `sample` from there on; what lies between is under a lease too.

In between the host may look at the tensors, wait for a grammar's masks, or schedule. Whole captured steps are one
launch; the graphs that take part here are those of the halves, and of the model's pieces.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from purestep.pure import step
from purestep.pure.dispatch import determine_batch_execution_and_padding
from purestep.pure.errors import DispatchError, StaleStateError
from purestep.pure.grammar import GrammarMask, apply_grammar
from purestep.pure.models.model import apply
from purestep.pure.padding import fill_batch, pad_batch
from purestep.pure.prompt_logprobs import PromptChunk, score_prompt
from purestep.pure.propose import propose
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.dispatch import BatchExecution, CUDAGraphMode, DispatchKeys
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.outputs import LogprobsTensors
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.state import ExecuteModelState
from purestep.pure.sampling_extras import sampling_extras
from purestep.state.graphs import GraphKey
from purestep.state.lease import Leased, Lender
from purestep.state.pending import Pending, ToHost, to_host
from purestep.state.run import BoundStep, begin, now_running
from purestep.state.staging import upload


class Executed:
    """A lease on what lies between the halves of a step: logits, hidden states, and the state itself."""

    __slots__ = ("_executed", "_leased", "drafts", "key")

    def __init__(
        self,
        leased: Leased,
        executed: ExecuteModelState,
        key: GraphKey | None = None,
        drafts: ToHost[Any] | None = None,
    ) -> None:
        self._leased = leased
        self._executed = executed
        self.key = key  # of the graphs that made it, if any
        self.drafts = drafts  # int32 [rows, drafts] on their way, if they were asked for and any are verified

    @property
    def batch(self) -> InputBatch:
        """The batch that runs, with its padding."""
        return self._leased.absorbed

    @property
    def generation(self) -> int:
        """The launch that made it."""
        return self._leased.generation

    @property
    def is_valid(self) -> bool:
        """Whether it can still be sampled."""
        return self._leased.is_valid

    @property
    def value(self) -> ExecuteModelState:
        """The tensors, which the next launch overwrites.

        Raises:
            StaleStateError: it was sampled, or a later step ran.
        """
        self._leased.value  # noqa: B018  # checks the lease
        return self._executed

    def is_on(self, buffers: Lender) -> bool:
        """Whether it is on these buffers."""
        return self._leased.is_on(buffers)

    def __repr__(self) -> str:
        if not self.is_valid:
            return f"ExecuteModelState(~consumed at step {self.generation}~)"
        return f"Executed(ExecuteModelState at step {self.generation}: {len(self.batch.req_ids)} requests)"


def execute(
    bound: BoundStep,
    leased: Leased,
    plan: StepPlan,
    *,
    key: GraphKey | None = None,
    intermediate: IntermediateTensors | None = None,
    tell_drafts: bool = False,
) -> Executed:
    """The step up to logits: the lease is consumed, and comes back when the result is sampled.

    With a `key` (see `dispatched`), the plan's batch is padded to its descriptor, and its graphs are replayed.
    `intermediate` is what a later pipeline stage takes in; it has no graphs. With `tell_drafts` the rows' drafts are
    sent to the host before the forward pass begins, so that whoever waits for them does not wait for that.

    An exception half-way leaves the buffers unusable until `buffers.lease()`, since part of them may be written.

    Raises:
        StaleStateError, PlanBaseError, DispatchError: as `run`, or the plan is of several steps; the lease stays good.
    """
    num_steps = plan.batch.layout.bounds.num_steps
    if num_steps > 1:
        raise DispatchError(
            f"a plan of {num_steps} steps at once has no halves: give it to run, or schedule single steps"
        )
    kernels, key = now_running(bound, key)
    with torch.no_grad():
        state = begin(bound, leased, plan)
        verifies = tell_drafts and plan.batch.layout.bounds.num_drafts
        drafts = to_host(state.ledger.drafts) if verifies else None
        assert key is None or bound.captured is not None, "a key was given for a step without graphs"
        if key is not None and key.half is not None:
            half = bound.captured.replay_execute(key)  # type: ignore[union-attr]
            executed = ExecuteModelState(state, half.inputs, half.logits, half.hidden_states)
        else:
            call: Any = apply if key is None else bound.captured.pieces(key).call  # type: ignore[union-attr]
            how: Any = {"kernels": kernels, "call": call, "intermediate": intermediate}
            executed = step.execute(bound.model, bound.prepared, state, **how)
    return Executed(bound.buffers.adopt(executed.state, plan.batch), executed, key, drafts)


def sample(
    bound: BoundStep,
    executed: Executed,
    *,
    grammar: GrammarMask | None = None,
    extras: SamplingExtras | None = None,
) -> tuple[Leased, Pending]:
    """The step from logits on: the next lease, and the step's output on its way.

    A grammar's masks come first, on the logits as the model gave them. `extras`, on the host, take the place of the
    batch's own logits processors and chosen ids.

    An exception half-way leaves the buffers unusable until `buffers.lease()`.

    Raises:
        StaleStateError: it was sampled before, or is on other buffers.
    """
    value, buffers = _checked(bound, executed), bound.buffers
    kernels, _ = now_running(bound, None)
    buffers.begin(executed.generation)
    with torch.no_grad():
        if grammar is not None:
            mask = GrammarMask(
                *(upload(part, buffers.device) for part in (grammar.bitmask, grammar.mask_of_row))
            )
            logits = value.logits
            value = apply_grammar(value, mask, kernels=bound.kernels)
            if executed.key is not None and executed.key.half is not None and value.logits is not logits:
                logits.copy_(value.logits)  # type: ignore[union-attr, arg-type]  # where the graph reads them
        key = _sampling(bound, executed)
        if key is None:
            if extras is None and executed.batch.layout.bounds.sampler.extras:
                extras = sampling_extras(executed.batch)
            moved = None if extras is None else extras.to(buffers.device)
            sampled = step.sample(value, kernels=bound.kernels, extras=moved)
            state, output = propose(bound.drafter, bound.prepared, value, *sampled, kernels=kernels)
            sent = to_host(output)
        else:
            state, sent = value.state, bound.captured.replay(key)  # type: ignore[union-attr]
        pending = Pending(executed.batch, sent)
    return buffers.adopt(state, executed.batch), pending


def _sampling(bound: BoundStep, executed: Executed) -> GraphKey | None:
    """The captured `sample` behind a captured `execute`, if there is one for what this batch asks."""
    if executed.key is None or executed.key.half is None or bound.captured is None:
        return None
    return bound.captured.sampling(executed.key, executed.batch.layout.bounds.sampler)


def take_in(bound: BoundStep, leased: Leased, plan: StepPlan) -> Leased:
    """The plan taken in, and no step run: blocks are zeroed and copied, and the next plan starts from its batch.

    Raises:
        StaleStateError, PlanBaseError, DispatchError: as `run`; the lease stays good.
    """
    with torch.no_grad():
        state = begin(bound, leased, plan)
    return bound.buffers.adopt(state, plan.batch)


def prompt_logprobs(
    bound: BoundStep, executed: Executed, chunks: Sequence[PromptChunk]
) -> tuple[LogprobsTensors, ...]:
    """The rows of each chunk, on the device: of the logits as the model gives them, whatever the sampler does.

    Raises:
        StaleStateError: it was sampled already, or is on other buffers.
    """
    value, device = _checked(bound, executed), bound.buffers.device
    scores = []
    with torch.no_grad():
        for chunk in chunks:
            targets = upload(np.array(chunk.targets, np.int32), device)
            rows = value.inputs.query_start_loc[chunk.index] + torch.arange(len(targets), device=device)
            hidden = value.hidden_states.index_select(0, rows)
            scores.append(
                score_prompt(
                    bound.model,
                    bound.prepared,
                    hidden,
                    targets,
                    num_logprobs=chunk.num_logprobs,
                    kernels=bound.kernels,
                )
            )
    return tuple(scores)


def dispatched(
    bound: BoundStep, keys: DispatchKeys | None, batch: InputBatch, absorbed: InputBatch
) -> tuple[InputBatch, GraphKey | None]:
    """The batch as the device is to see it, and the graphs that execute it; without any, the batch as it is."""
    captured = bound.captured
    if captured is None or keys is None:
        return batch, None

    def key_of(execution: BatchExecution, num_drafts: int) -> GraphKey | None:
        key = GraphKey(execution.descriptor, None)
        if execution.cudagraph_mode is CUDAGraphMode.FULL:
            key = GraphKey(execution.descriptor, None, half="execute", num_drafts=num_drafts)
        return key if key in captured else None

    return padded_to_graph(keys, batch, absorbed, key_of)


def padded_to_graph(
    keys: DispatchKeys,
    batch: InputBatch,
    absorbed: InputBatch,
    key_of: Callable[[BatchExecution, int], GraphKey | None],
) -> tuple[InputBatch, GraphKey | None]:
    """The batch padded to what was captured, and the key of that; without any, the batch as it is.

    A graph of uniform batches comes first, where one holds the batch. `key_of` gives what was captured for this
    execution of a batch whose requests have so many drafts at most, if anything was.
    """
    filled = fill_batch(batch, keys)
    for own in (filled,) if filled is batch else (filled, batch):
        execution = determine_batch_execution_and_padding(keys, own.layout.bounds)
        mode = execution.cudagraph_mode
        fits = mode is CUDAGraphMode.FULL if own is not batch else mode is not CUDAGraphMode.NONE
        key = key_of(execution, own.layout.bounds.num_drafts) if fits else None
        if key is not None:
            return pad_batch(own, execution.descriptor, before=absorbed.layout), key
    return batch, None


def _checked(bound: BoundStep, executed: Executed) -> ExecuteModelState:
    if not executed.is_on(bound.buffers):
        raise StaleStateError(
            "this ExecuteModelState is on other buffers than the step is bound to: sample it with the step that made it"
        )
    return executed.value
