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


def told_tokens(batch: InputBatch, sampled: ModelRunnerOutput) -> Int32[np.ndarray, " reqs"]:
    """What the last stage has sampled for each request of a batch and its padding, -1 for nothing.

    Raises:
        SchedulerOutputError: an output of other requests, or of several tokens for one.
    """
    if set(sampled.req_ids) != set(batch.req_ids) or any(len(own) > 1 for own in sampled.sampled_token_ids):
        raise SchedulerOutputError(
            f"sampled is an output of {list(sampled.req_ids)}, and the step is of {list(batch.req_ids)}: give that of "
            "the last stage for the same step, with one token a request at most"
        )
    told = np.full(batch.layout.bounds.num_reqs, -1, np.int32)
    for index, req_id in enumerate(batch.req_ids):
        told[index] = (*sampled.sampled_token_ids[sampled.req_id_to_index[req_id]], -1)[0]
    return told


def hear(bound: BoundStep, executed: Executed, told: Int32[np.ndarray, " reqs"]) -> tuple[Leased, Pending]:
    """The step of a stage that does not sample, with the tokens of the last one: the next lease, and its own output.

    A request that should have got a token and did not has ended there, and runs idle from here on.

    Raises:
        StaleStateError: the state was used already.
    """
    value, buffers = executed.value, bound.buffers
    with torch.no_grad():
        token_ids = upload(told, buffers.device)
        tokens = SampledTokens(
            token_ids=token_ids,
            stops=torch.zeros_like(token_ids, dtype=torch.bool),  # the scheduler says who has ended
            has_nan=(token_ids < 0) & ~value.inputs.discard,
            logprobs_tensors=None,
        )
        state = buffers.begin(executed.generation)
        state, output = advance(value.state, value.inputs, tokens, kernels=bound.kernels)
        pending = Pending(executed.batch, to_host(output))
    return buffers.adopt(state, executed.batch), pending
