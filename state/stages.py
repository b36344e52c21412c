"""What a runner of one pipeline stage does otherwise: it takes activations in, hands them over, and is told tokens."""

import numpy as np
import torch
from jaxtyping import Int32

from purestep.pure.advance import advance
from purestep.pure.errors import SchedulerOutputError
from purestep.pure.models.stages import HANDED_OVER
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.outputs import ModelRunnerOutput, SampledTokens
from purestep.state.lease import Leased
from purestep.state.pending import Pending, to_host
from purestep.state.run import BoundStep
from purestep.state.staging import upload
from purestep.state.two_phase import Executed


def checked(
    tensors: IntermediateTensors | None, *, is_first: bool, num_tokens: int
) -> IntermediateTensors | None:
    """What a stage takes in of what it was given: the rows of the step's tokens.

    Raises:
        SchedulerOutputError: a first stage was given some, a later one none, others than it reads, or too few rows.
    """
    if is_first:
        if tensors is not None:
            raise SchedulerOutputError(
                f"intermediate_tensors {sorted(tensors.tensors)} were given: no piece reads them, since this runner "
                "has the first layer of its model; send None"
            )
        return None
    found = {} if tensors is None else {name: len(tensor) for name, tensor in tensors.tensors.items()}
    if tensors is None or set(found) != set(HANDED_OVER) or min(found.values()) < num_tokens:
        raise SchedulerOutputError(
            f"intermediate_tensors are {found or None} (rows by name), and this stage of {num_tokens} tokens reads "
            f"{' and '.join(HANDED_OVER)}: send what execute_model of the stage before gave for the same step"
        )
    return tensors[:num_tokens]


def told_tokens(batch: InputBatch, sampled: ModelRunnerOutput) -> Int32[np.ndarray, "reqs width"]:
    """What the last stage has kept for each request of a batch and its padding, -1 behind the last.

    Raises:
        SchedulerOutputError: an output of other requests, or of more tokens for one than it has drafts and one.
    """
    width = 1 + batch.layout.bounds.num_drafts
    if set(sampled.req_ids) != set(batch.req_ids) or max(map(len, sampled.sampled_token_ids)) > width:
        raise SchedulerOutputError(
            f"sampled is an output of {list(sampled.req_ids)}, and the step is of {list(batch.req_ids)}: give that of "
            f"the last stage for the same step, with {width} tokens a request at most"
        )
    told = np.full((batch.layout.bounds.num_reqs, width), -1, np.int32)
    for index, req_id in enumerate(batch.req_ids):
        own = sampled.sampled_token_ids[sampled.req_id_to_index[req_id]]
        told[index, : len(own)] = own
    return told


def hear(
    bound: BoundStep, executed: Executed, told: Int32[np.ndarray, "reqs width"]
) -> tuple[Leased, Pending]:
    """The step of a stage that does not sample, with the tokens of the last one: the next lease, and its own output.

    A request that should have got a token and did not has ended there, and runs idle from here on.

    Raises:
        StaleStateError: the state was used already.
    """
    value, buffers = executed.value, bound.buffers
    with torch.no_grad():
        kept = upload(told, buffers.device)
        token_ids = kept[:, 0] if value.inputs.drafts is None else kept
        tokens = SampledTokens(
            token_ids=token_ids,
            stops=torch.zeros_like(token_ids, dtype=torch.bool),  # the scheduler says who has ended
            has_nan=(kept[:, 0] < 0) & ~value.inputs.discard,
            logprobs_tensors=None,
        )
        state = buffers.begin(executed.generation)
        state, output = advance(value.state, value.inputs, tokens, kernels=bound.kernels)
        pending = Pending(executed.batch, to_host(output))
    return buffers.adopt(state, executed.batch), pending
