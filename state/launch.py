"""`launch`: a batch's step, in one launch where one is enough, in two where the host has something to do in between.

Two it takes for log-probabilities of prompts, which are made of the hidden states, for the masks of grammars, and for
what sampling takes beside the state (logits processors, chosen ids). The first half is captured or not, as ever; with
the latter sampling runs eagerly.
"""

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType

import attrs

from purestep.pure.dispatch import determine_batch_execution_and_padding
from purestep.pure.errors import PurestepError
from purestep.pure.grammar import GrammarMask
from purestep.pure.plan import plan_step
from purestep.pure.prompt_logprobs import PromptChunk, prompt_chunks
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchKeys
from purestep.pure.records.layout import LayoutBounds
from purestep.state.async_output import ScoredChunk
from purestep.state.graphs import GraphKey
from purestep.state.guarded import guarded
from purestep.state.lease import Leased
from purestep.state.pending import Pending, to_host
from purestep.state.run import BoundStep, run
from purestep.state.two_phase import Executed, dispatched, execute, padded_to_graph, prompt_logprobs, sample

NOBODY: Mapping[int, PurestepError] = MappingProxyType({})


@attrs.frozen
class Launched:
    """A step under way."""

    leased: Leased
    pending: Pending
    prompts: tuple[ScoredChunk, ...] = ()  # parts of prompts that it scored
    failed: Mapping[int, PurestepError] = NOBODY  # by place in the batch: their tokens are none


Masks = Callable[[Executed], tuple[GrammarMask, Mapping[int, PurestepError]]]


def launch(
    bound: BoundStep,
    leased: Leased,
    batch: InputBatch,
    keys: DispatchKeys,
    *,
    unscored: Container[str],
    masks: Masks,
) -> Launched:
    """Begin the step of this batch. The prompts of `unscored` are scored, as far as the step runs them.

    Where requests have grammars, `masks` is called while the forward pass runs: it gives the masks by rows of logits,
    and the requests that can have none.

    Raises:
        StaleStateError, PlanBaseError, DispatchError: as `run`.
    """
    absorbed, sampler = leased.absorbed, batch.layout.bounds.sampler
    chunks: tuple[PromptChunk, ...] = ()
    if sampler.prompt_logprobs:
        chunks = tuple([chunk for chunk in prompt_chunks(batch, unscored) if chunk.targets])
    if not chunks and not sampler.extras and not sampler.grammar:
        padded, key = whole_step(bound, keys, batch, absorbed)
        return Launched(*run(bound, leased, plan_step(padded, absorbed), key=key))
    padded, key = dispatched(bound, keys, batch, absorbed)
    executed = execute(bound, leased, plan_step(padded, absorbed), key=key, tell_drafts=sampler.grammar)
    scores = [to_host(rows) for rows in prompt_logprobs(bound, executed, chunks)]
    prompts = tuple(map(ScoredChunk, chunks, scores))
    mask, failed = None, dict[int, PurestepError]()
    if sampler.grammar:
        mask, without = masks(executed)
        failed.update(without)
    extras = guarded(executed.batch, failed)
    return Launched(*sample(bound, executed, grammar=mask, extras=extras), prompts, failed)


def whole_step(
    bound: BoundStep, keys: DispatchKeys, batch: InputBatch, absorbed: InputBatch
) -> tuple[InputBatch, GraphKey | None]:
    """The batch as the device is to see it, and the graph of its whole step; without one, the batch as it is."""
    captured = bound.captured
    if captured is None:
        return batch, None
    bounds = batch.layout.bounds
    return padded_to_graph(
        keys,
        batch,
        absorbed,
        lambda execution, num_drafts: captured.covering(
            execution, bounds.sampler, num_steps=bounds.num_steps, num_drafts=num_drafts
        ),
    )


def steps_at_once(bound: BoundStep, keys: DispatchKeys, bounds: LayoutBounds, unroll: int) -> int:
    """How many steps of batches with these bounds one launch is of: `unroll` where a graph of so many is there, else 1.

    Where the host has something to do in the midst of a step it is 1.
    """
    captured, sampler = bound.captured, bounds.sampler
    if (
        unroll == 1
        or captured is None
        or bounds.max_query_len != 1
        or sampler.grammar
        or sampler.prompt_logprobs
    ):
        return 1
    execution = determine_batch_execution_and_padding(keys, bounds)
    if execution.cudagraph_mode is not CUDAGraphMode.FULL:
        return 1
    return 1 if captured.covering(execution, sampler, num_steps=unroll) is None else unroll
