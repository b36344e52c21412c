"""The sampling stage alone: a state that requests with histories have put there, and given logits."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.absorb import absorb
from purestep.pure.initial import initial_state
from purestep.pure.inputs import prepare_inputs
from purestep.pure.models.model import Model
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import SampledTokens
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import ExecuteModelState
from purestep.pure.sampling import sample_tokens
from purestep.pure.sampling_extras import sampling_extras
from purestep.pure.update import update_states
from tests.tiny import column, new_request, scheduled

BLOCK_SIZE = 16
EVERY = -1  # number of log-probabilities


@attrs.frozen
class Asker:
    """A request that is about to be sampled."""

    params: SamplingParams
    prompt: Sequence[int] = (0,)
    outputs: Sequence[int] = ()
    stream: int = 0


def batch_of(askers: Sequence[Asker], vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> InputBatch:
    """The batch in which each of these requests completes its history, in this order."""
    longest = max(len(asker.prompt) + len(asker.outputs) for asker in askers)
    blocks = -(-longest // BLOCK_SIZE)
    limits = BatchLimits(
        max_num_reqs=len(askers),
        max_model_len=max(longest + 1, *(asker.params.min_tokens for asker in askers)),
        vocab_size=vocab_size,
        block_sizes=(BLOCK_SIZE,),
        num_blocks=(1 + blocks * len(askers),),
        eos_token_ids=eos_token_ids,
    )
    histories = {str(i): (*asker.prompt, *asker.outputs) for i, asker in enumerate(askers)}
    new = [
        new_request(
            req_id,
            history,
            (tuple(range(1 + i * blocks, 1 + (i + 1) * blocks)),),
            askers[i].params,
            stream=askers[i].stream,
        )
        for i, (req_id, history) in enumerate(histories.items())
    ]
    counts = {req_id: len(history) for req_id, history in histories.items()}
    batch = update_states(InputBatch.make_empty(limits), scheduled(*new, counts=counts))
    return replace(
        batch, columns=replace(batch.columns, num_prompt_tokens=column(*(len(a.prompt) for a in askers)))
    )


def executed(
    askers: Sequence[Asker], logits: Tensor, *, eos_token_ids: tuple[int, ...] = ()
) -> ExecuteModelState:
    """What `execute` leaves when the model says these logits [askers, vocab] after the requests' histories."""
    return executed_batch(batch_of(askers, logits.shape[-1], eos_token_ids), logits)


def executed_batch(batch: InputBatch, logits: Tensor) -> ExecuteModelState:
    """The same of a batch whose requests complete their histories."""
    model = Model("nothing", (), None, (), batch.limits.vocab_size, batch.limits.max_model_len)
    plan = plan_step(batch, InputBatch.make_empty(batch.limits))
    state = replace(initial_state(model, batch.limits), inbox=plan.inbox.to("cpu"))
    state = absorb(state, kernels=reference)
    inputs = prepare_inputs(state, kernels=reference)
    return ExecuteModelState(state, inputs, logits, hidden_states=logits)


def sampled(
    askers: Sequence[Asker],
    logits: Tensor,
    *,
    eos_token_ids: tuple[int, ...] = (),
    kernels: Kernels = reference,
    exponential: Tensor | None = None,
) -> SampledTokens:
    """What the stage makes of these logits."""
    batch = batch_of(askers, logits.shape[-1], eos_token_ids)
    given, extras = executed_batch(batch, logits), sampling_extras(batch).to("cpu")
    return sample_tokens(given, kernels=kernels, exponential=exponential, extras=extras)


def final_logits(tokens: SampledTokens) -> Tensor:
    """The logits [askers, vocab] that tokens were drawn from, of requests that asked for all processed logits."""
    found = tokens.logprobs_tensors
    assert found is not None
    ids, values = found.logprob_token_ids[:, 1:].to(torch.int64), found.logprobs[:, 1:]
    return torch.zeros_like(values).scatter(1, ids, values)
