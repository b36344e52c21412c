"""The step: a composition of stages, and nothing else.

What is not needed by every step does not belong here. `execute` is the step up to logits; `sample` is the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from jaxtyping import Float
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.absorb import absorb
from purestep.pure.advance import advance
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.inputs import build_attention_metadata, prepare_inputs
from purestep.pure.models.model import Model, apply
from purestep.pure.propose import propose
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.layout import bucket
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.state import ExecuteModelState, StepState
from purestep.pure.sampling import sample_tokens


def execute(
    model: Model,
    params: Params,
    state: StepState,
    *,
    kernels: Kernels,
    call: Callable[..., Any] = apply,
    intermediate: IntermediateTensors | None = None,
    narrow: bool = False,
) -> ExecuteModelState:
    """The step up to logits. It consumes the state and hands it on inside what it returns.

    `intermediate` is what a later pipeline stage takes in. To `narrow` is to give up hidden states of tokens that have
    no logits, so that the last layer may leave them out.
    Source: vllm/v1/worker/gpu_model_runner.py execute_model.
    """
    state = absorb(state, kernels=kernels)
    inputs = prepare_inputs(state, kernels=kernels)
    metadata = build_attention_metadata(state, inputs, kernels=kernels)
    indices = inputs.logits_indices
    narrow = narrow and model.narrows and indices.shape[0] < inputs.positions.shape[0]
    read = preprocess(inputs, intermediate=intermediate, wanted=indices if narrow else None)
    hidden, kv = model_forward(model, params, read, state.kv, metadata, kernels=kernels, call=call)
    logits = compute_logits(model, params, hidden, None if narrow else indices, kernels=kernels, call=call)
    return ExecuteModelState(state=replace(state, kv=kv), inputs=inputs, logits=logits, hidden_states=hidden)


def sample(
    executed: ExecuteModelState,
    *,
    kernels: Kernels,
    exponential: Float[Tensor, "reqs vocab"] | None = None,
    extras: SamplingExtras | None = None,
) -> tuple[StepState, StepOutput]:
    """The step from logits to the next state; it gives back the state that `execute` consumed.

    Raises:
        ExtrasError: the batch has logits processors or chosen ids, and no `extras` (see `sampling_extras`).
    Source: vllm/v1/worker/gpu_model_runner.py sample_tokens.
    """
    sampled = sample_tokens(executed, kernels=kernels, exponential=exponential, extras=extras)
    return advance(executed.state, executed.inputs, sampled, kernels=kernels)


def step(
    model: Model, params: Params, state: StepState, *, kernels: Kernels, drafter: Drafter | None = None
) -> tuple[StepState, StepOutput]:
    """One step of inference: absorb the plan, run the batch once, keep the token of every finished history.

    Where drafts were verified those that stand are kept before it; with a drafter the next step's are proposed.
    """
    executed = execute(model, params, state, kernels=kernels, narrow=drafter is None)
    state, output = sample(executed, kernels=kernels)
    return propose(drafter, params, executed, state, output, kernels=kernels)


def unroll(
    model: Model,
    params: Params,
    state: StepState,
    num_steps: int,
    *,
    kernels: Kernels,
    drafter: Drafter | None = None,
) -> tuple[StepState, tuple[StepOutput, ...]]:
    """`num_steps` steps of one layout, in which every request runs one token and drafts: rows that stop are frozen.

    A row whose blocks are full runs idle from there on (its token is -1, and nothing of it changes) and goes on once a
    plan brings more: grant blocks for num_steps tokens, and as many times the drafts. A bound on lengths that is that
    of fewer steps is widened: the last step sees that many tokens more than the first, but for its own.

    Raises:
        ValueError: a layout (or a plan that is still to be absorbed) that runs more than one token of a request beside
            drafts.
    """
    bounds = state.inbox.bounds or state.layout.bounds
    most = 1 + bounds.num_drafts
    if num_steps > 1 and bounds.max_query_len > most:
        raise ValueError(
            f"unroll of {num_steps} steps over a layout that runs up to {bounds.max_query_len} tokens of a request: "
            "it repeats one layout, so every request must be decoding; run the prefill by single steps first"
        )
    state = absorb(state, kernels=kernels)
    layout = state.layout
    longest = layout.bounds.max_seq_len + most * max(num_steps - layout.bounds.num_steps, 0)
    wider = replace(layout.bounds, max_seq_len=bucket(longest))
    state = replace(state, layout=replace(layout, bounds=wider))
    outputs = []
    for _ in range(num_steps):
        state, output = step(model, params, state, kernels=kernels, drafter=drafter)
        outputs.append(output)
    return replace(state, layout=layout), tuple(outputs)


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """What several steps of one layout have brought, as one output: tokens [reqs, steps], those of one that ends first.

    Log-probabilities and kept mass of a request lie one step after the other, as where drafts are verified. The rest is
    what the last step says, and whether logits were NaN in any.
    """
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    told = [(output.logprobs_tensors, output.id_logprobs, output.kept_mass) for output in outputs]
    logprobs_tensors, id_logprobs, kept_mass = pytree.tree_map(_in_turn, *told)
    return StepOutput(
        sampled_token_ids=torch.cat([output.sampled_token_ids for output in outputs], dim=1),
        num_computed_tokens=last.num_computed_tokens,
        active=last.active,
        has_nan=torch.stack([output.has_nan for output in outputs]).any(dim=0),
        logprobs_tensors=logprobs_tensors,
        id_logprobs=id_logprobs,
        kept_mass=kept_mass,
        draft_token_ids=last.draft_token_ids,
    )


def _in_turn(*columns: Tensor | None) -> Tensor | None:
    """The entries of each request one after the other."""
    return None if columns[0] is None else torch.stack(columns, dim=1).flatten(0, 1)  # type: ignore[arg-type]
