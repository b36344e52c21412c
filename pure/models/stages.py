"""A Llama-like model cut into pipeline stages: each runs some of its layers on KV caches of its own.

Every stage is a model: a later one takes activations in where the first one embeds, an earlier one hands them over
where the last one norms. All are given the whole parameter tree, and read their own leaves of it.
Source: vllm/model_executor/models/utils.py make_layers (PPMissingLayer); vllm/sequence.py IntermediateTensors.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from purestep.kernels.record import replace
from purestep.kernels.types import Kernels
from purestep.pure.errors import InvalidParameterError
from purestep.pure.models.llama import embed, norm
from purestep.pure.models.model import Model, Piece
from purestep.pure.models.rope import rope_cos_sin
from purestep.pure.records.inputs import IntermediateTensors, ModelInputs

HANDED_OVER = ("hidden_states", "residual")


def split(model: Model, first_layers: Sequence[int]) -> tuple[Model, ...]:
    """The stages of a model of the Llama family, where all but the first begin with these layers.

    Raises:
        InvalidParameterError: another model, or layers that are not ascending, or none of the model's.
    """
    bounds, num_layers = (0, *first_layers, len(model.kv_layers)), len(model.kv_layers)
    if (model.pieces[0].function, model.pieces[-1].function) != (embed, norm):
        raise InvalidParameterError(
            f"{model.name} does not begin with an embedding and end with a norm, as models of the Llama family do: it "
            "can not be split"
        )
    if any(end <= first for first, end in pairwise(bounds)):
        raise InvalidParameterError(
            f"first_layers={list(first_layers)}: they ascend, from 1 to {num_layers - 1}, so that no stage is empty"
        )
    return tuple(_stage(model, first, end) for first, end in pairwise(bounds))


def handed_over(hidden: Tensor, num_tokens: int) -> IntermediateTensors:
    """What the next stage takes in, of the hidden states that a stage gives: those of its first tokens."""
    return IntermediateTensors(dict(zip(HANDED_OVER, hidden[:num_tokens].chunk(2, -1), strict=True)))


def take_in(
    piece: Piece, weights: Any, carried: tuple[Tensor, ...], inputs: ModelInputs, *, kernels: Kernels
) -> tuple[Tensor, ...]:
    """The step's rotary angles, and the activations that the stage before has handed over."""
    assert inputs.intermediate is not None, "a later stage was given no intermediate tensors"
    hidden, residual = (inputs.intermediate.tensors[name] for name in HANDED_OVER)
    config = piece.config
    cos, sin = rope_cos_sin(
        config.rope, inputs.positions, config.attention.head_dim, hidden.dtype, kernels=kernels
    )
    return cos, sin, hidden, residual


def hand_over(
    piece: Piece, weights: Any, carried: tuple[Tensor, ...], inputs: ModelInputs, *, kernels: Kernels
) -> tuple[Tensor, ...]:
    """Activations and residual, side by side."""
    _, _, hidden, residual = carried
    return (torch.cat((hidden, residual), -1),)


def _stage(model: Model, first: int, end: int) -> Model:
    is_first, is_last = first == 0, end == len(model.kv_layers)
    pieces = [_renumbered(piece, first, end) for piece in model.pieces[1 + 3 * first : 1 + 3 * end]]
    begins = model.pieces[0] if is_first else Piece("take_in", take_in, config=model.config)
    ends = model.pieces[-1] if is_last else Piece("hand_over", hand_over)
    own = {("layers", layer) for layer in range(first, end)}
    return replace(
        model,
        pieces=(begins, *pieces, ends),
        head=model.head if is_last else None,
        kv_layers=model.kv_layers[first:end],
        narrows=model.narrows and is_last,
        linear_paths=tuple(
            [path for path in model.linear_paths if path[:2] in own or (is_last and path[0] != "layers")]
        ),
    )


def _renumbered(piece: Piece, first: int, end: int) -> Piece:
    """The piece, whose layers are counted from the stage's first one."""
    attention = piece.config.attention
    windows = attention.sliding_window
    if windows is not None:
        attention = replace(attention, sliding_window=windows[first:end])
    config = replace(piece.config, attention=attention)
    return replace(piece, layers=tuple([layer - first for layer in piece.layers]), config=config)
