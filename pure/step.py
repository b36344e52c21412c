"""The step: a composition of stages, and nothing else.

What is not needed by every step does not belong here. `execute` is the step up to logits; `sample` is the rest.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.absorb import absorb
from purestep.pure.advance import advance
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.inputs import build_attention_metadata, prepare_inputs
from purestep.pure.models.model import Model, apply
from purestep.pure.record import replace
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
) -> ExecuteModelState:
    """The step up to logits. It consumes the state and hands it on inside what it returns.

    Source: vllm/v1/worker/gpu_model_runner.py execute_model.
    """
    state = absorb(state, kernels=kernels)
    inputs = prepare_inputs(state, kernels=kernels)
    metadata = build_attention_metadata(state, inputs)
    hidden, kv = model_forward(
        model, params, preprocess(inputs), state.kv, metadata, kernels=kernels, call=call
    )
    logits = compute_logits(model, params, hidden, inputs.logits_indices, kernels=kernels, call=call)
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


def step(model: Model, params: Params, state: StepState, *, kernels: Kernels) -> tuple[StepState, StepOutput]:
    """One step of inference: absorb the plan, run the batch once, keep one token per finished history."""
    return sample(execute(model, params, state, kernels=kernels), kernels=kernels)


def unroll(
    model: Model, params: Params, state: StepState, num_steps: int, *, kernels: Kernels
) -> tuple[StepState, tuple[StepOutput, ...]]:
    """`num_steps` steps of one layout, in which every request runs one token: rows that stop are frozen.

    A row whose blocks are full runs idle from there on (its token is -1, and nothing of it changes) and goes on once a
    plan brings more: grant blocks for num_steps tokens. Only the bound on lengths is wider than the layout's: the last
    step sees num_steps - 1 tokens more than the first.

    Raises:
        ValueError: a layout (or a plan that is still to be absorbed) that runs more than one token of a request.
    """
    bounds = state.inbox.bounds or state.layout.bounds
    if num_steps > 1 and bounds.max_query_len > 1:
        raise ValueError(
            f"unroll of {num_steps} steps over a layout that runs up to {bounds.max_query_len} tokens of a request: "
            "it repeats one layout, so every request must be decoding; run the prefill by single steps first"
        )
    state = absorb(state, kernels=kernels)
    layout = state.layout
    wider = replace(layout.bounds, max_seq_len=bucket(layout.bounds.max_seq_len + max(num_steps - 1, 0)))
    state = replace(state, layout=replace(layout, bounds=wider))
    outputs = []
    for _ in range(num_steps):
        state, output = step(model, params, state, kernels=kernels)
        outputs.append(output)
    return replace(state, layout=layout), tuple(outputs)
