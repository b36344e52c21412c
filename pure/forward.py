"""From a laid-out step to logits: `preprocess`, `model_forward`, `compute_logits`."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.models.model import Model, apply, head_logits
from purestep.pure.records.inputs import AttentionMetadata, IntermediateTensors, ModelInputs, StepInputs
from purestep.pure.records.params import Params


def preprocess(
    inputs: StepInputs,
    *,
    inputs_embeds: Float[Tensor, "tokens hidden"] | None = None,
    intermediate: IntermediateTensors | None = None,
    wanted: Int[Tensor, " wanted"] | None = None,
) -> ModelInputs:
    """What the model reads: token ids, or embeddings in their place where they are given.

    `wanted` are the tokens whose hidden states are asked for, all by default.

    Source: vllm/v1/worker/gpu_model_runner.py, `_preprocess`.
    """
    return ModelInputs(
        input_ids=inputs.input_ids if inputs_embeds is None else None,
        positions=inputs.positions,
        inputs_embeds=inputs_embeds,
        intermediate=intermediate,
        wanted=wanted,
    )


def model_forward(
    model: Model,
    params: Params,
    inputs: ModelInputs,
    kv: tuple[Tensor, ...],
    metadata: AttentionMetadata,
    *,
    kernels: Kernels,
    call: Callable[..., Any] = apply,
) -> tuple[Float[Tensor, "tokens hidden"], tuple[Tensor, ...]]:
    """Hidden states of every token, and the KV cache (one tensor a layer) with this step's keys and values.

    Where the inputs name wanted tokens, and the model `narrows`, hidden states are those of these tokens alone.
    `call` applies a piece; replaying a captured piece is another way to do it.
    """
    carried: tuple[Tensor, ...] = ()
    cache = list(kv)
    for piece in model.pieces:
        weights = piece.weights(params.tree)
        if piece.is_attention:
            own = tuple(cache[layer] for layer in piece.layers)
            carried, own = call(piece, weights, carried, inputs, own, metadata, kernels=kernels)
            for layer, written in zip(piece.layers, own, strict=True):
                cache[layer] = written
        else:
            carried = call(piece, weights, carried, inputs, kernels=kernels)
    (hidden,) = carried
    return hidden, tuple(cache)


def compute_logits(
    model: Model,
    params: Params,
    hidden: Float[Tensor, "tokens hidden"],
    logits_indices: Int[Tensor, " logits"] | None,
    *,
    kernels: Kernels,
    call: Callable[..., Any] = apply,
) -> Float[Tensor, "logits vocab"]:
    """Logits of the tokens in `logits_indices` (None: all), in float32 or wider: the head is applied to those alone.

    Source: vllm/model_executor/layers/logits_processor.py.
    """
    chosen = hidden if logits_indices is None else hidden.index_select(0, logits_indices)
    weights = None if model.head is None else model.head.weights(params.tree)
    return head_logits(model, weights, chosen, kernels=kernels, call=call)
