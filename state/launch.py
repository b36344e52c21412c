"""`launch`: a batch's step, in one launch where one is enough, in two where the host has something to do in between.

Two it takes for log-probabilities of prompts, which are made of the hidden states, and for what sampling takes beside
the state (logits processors, chosen ids). The first half is captured or not, as ever; sampling then runs eagerly.
"""

from collections.abc import Container

import attrs

from purestep.pure.dispatch import determine_batch_execution_and_padding
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.prompt_logprobs import PromptChunk, prompt_chunks
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchKeys
from purestep.state.async_output import ScoredChunk
from purestep.state.graphs import GraphKey
from purestep.state.lease import Leased
from purestep.state.pending import Pending, ToHost
from purestep.state.run import BoundStep, run
from purestep.state.two_phase import dispatched, execute, prompt_logprobs, sample


@attrs.frozen
class Launched:
    """A step under way."""

    leased: Leased
    pending: Pending
    prompts: tuple[ScoredChunk, ...] = ()  # parts of prompts that it scored


def launch(
    bound: BoundStep, leased: Leased, batch: InputBatch, keys: DispatchKeys, *, unscored: Container[str]
) -> Launched:
    """Begin the step of this batch. The prompts of `unscored` are scored, as far as the step runs them.

    Raises:
        StaleStateError, PlanBaseError, DispatchError: as `run`.
    """
    absorbed, sampler = leased.absorbed, batch.layout.bounds.sampler
    chunks: tuple[PromptChunk, ...] = ()
    if sampler.prompt_logprobs:
        chunks = tuple([chunk for chunk in prompt_chunks(batch, unscored) if chunk.targets])
    if not chunks and not sampler.extras:
        padded, key = whole_step(bound, keys, batch, absorbed)
        return Launched(*run(bound, leased, plan_step(padded, absorbed), key=key))
    padded, key = dispatched(bound, keys, batch, absorbed)
    executed = execute(bound, leased, plan_step(padded, absorbed), key=key)
    scores = [ToHost(rows) for rows in prompt_logprobs(bound, executed, chunks)]
    prompts = tuple(map(ScoredChunk, chunks, scores))
    return Launched(*sample(bound, executed), prompts)


def whole_step(
    bound: BoundStep, keys: DispatchKeys, batch: InputBatch, absorbed: InputBatch
) -> tuple[InputBatch, GraphKey | None]:
    """The batch as the device is to see it, and the graph of its whole step; without one, the batch as it is."""
    captured = bound.captured
    if captured is None:
        return batch, None
    execution = determine_batch_execution_and_padding(keys, batch.layout.bounds)
    if execution.cudagraph_mode is CUDAGraphMode.NONE:
        return batch, None
    key = captured.covering(execution, batch.layout.bounds.sampler)
    if key is None:
        return batch, None
    return pad_batch(batch, execution.descriptor, before=absorbed.layout), key
