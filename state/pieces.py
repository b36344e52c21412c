"""Captured pieces: graphs of what lies between attention layers, for batches padded to a number of tokens.

Consecutive pieces without attention share one graph, so a forward pass is replay, attention, replay, attention, and
so on. Attention runs eagerly between them, on the true lengths, whatever the batch is made of.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.forward import model_forward, preprocess
from purestep.pure.inputs import build_attention_metadata, prepare_inputs
from purestep.pure.models.model import Model, Piece, apply
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs
from purestep.pure.records.params import Params
from purestep.pure.records.state import StepState
from purestep.state.graph_api import Graph, GraphApi

Carried = tuple[Tensor, ...]


@attrs.frozen
class Segment:
    """A graph of consecutive pieces, and where its arguments are to lie; None: where the segment before left them."""

    pieces: tuple[Piece, ...]
    places: tuple[Tensor | None, ...]
    graph: Graph

    def replay(self, carried: Carried) -> Carried:
        """What the last of the pieces hands on; it lies in storage that the next replay reuses."""
        for place, value in zip(self.places, carried, strict=True):
            if place is not None:
                place.copy_(value)
        self.graph.replay()
        result: Carried = self.graph.result
        return result


class CapturedPieces:
    """The segments of one number of tokens. `call` takes the place of `apply` in `execute`."""

    def __init__(self, segments: tuple[Segment, ...], inputs: ModelInputs) -> None:
        self._inputs = inputs
        self._segments = {segment.pieces[0].name: segment for segment in segments}
        self._others = frozenset(piece.name for segment in segments for piece in segment.pieces[1:])

    def __len__(self) -> int:
        return len(self._segments)

    def call(
        self,
        piece: Piece,
        weights: Any,
        carried: Carried,
        inputs: ModelInputs,
        kv: Carried = (),
        metadata: AttentionMetadata | None = None,
        *,
        kernels: Kernels,
    ) -> Any:
        """Apply a piece. The first of a segment runs all of it, and the others hand on what that gave.

        Attention and the head, whose number of rows is the batch's own, are applied as they are.
        """
        segment = self._segments.get(piece.name)
        if segment is not None:
            if not carried:  # the first one, which reads the step's inputs
                for place, value in zip(
                    pytree.tree_leaves(self._inputs), pytree.tree_leaves(inputs), strict=True
                ):
                    place.copy_(value)
            return segment.replay(carried)
        if piece.name in self._others:
            return carried
        return apply(piece, weights, carried, inputs, kv, metadata, kernels=kernels)


def capture_pieces(
    model: Model, params: Params, state: StepState, *, kernels: Kernels, api: GraphApi, places: "Places"
) -> CapturedPieces:
    """Capture the pieces of `model` for as many tokens as the layout of `state` has, which must be padding only."""
    with torch.no_grad():
        step_inputs = prepare_inputs(state, kernels=kernels)
        inputs = pytree.tree_map(torch.clone, preprocess(step_inputs))
        recorder = _Recorder(model, params, inputs, kernels=kernels, api=api, places=places)
        metadata = build_attention_metadata(state, step_inputs, kernels=kernels)
        model_forward(model, params, inputs, state.kv, metadata, kernels=kernels, call=recorder.call)
    for segment in recorder.segments:
        segment.graph.disown()
    return CapturedPieces(tuple(recorder.segments), inputs)


class Places:
    """Where the arguments of segments lie that attention makes: one place serves all layers and numbers of tokens."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], Tensor] = {}

    def of(self, index: int, value: Tensor) -> Tensor:
        """A place for the argument at `index`; capture the largest number of tokens first."""
        key = (index, value.shape[1:], value.dtype)
        place = self._places.get(key)
        if place is None or len(place) < len(value):
            place = self._places[key] = torch.zeros_like(value, memory_format=torch.contiguous_format)
        return place[: len(value)]


class _Recorder:
    """A `call` that captures segments instead of applying pieces."""

    def __init__(
        self,
        model: Model,
        params: Params,
        inputs: ModelInputs,
        *,
        kernels: Kernels,
        api: GraphApi,
        places: Places,
    ) -> None:
        self._params, self._inputs, self._kernels = params, inputs, kernels
        self._api, self._places = api, places
        self._runs = {run[0].name: run for run in _runs(model)}
        self._handed_on: Carried = ()
        self.segments: list[Segment] = []

    def call(
        self,
        piece: Piece,
        weights: Any,
        carried: Carried,
        inputs: ModelInputs,
        kv: Carried = (),
        metadata: AttentionMetadata | None = None,
        *,
        kernels: Kernels,
    ) -> Any:
        if piece.is_attention:
            return apply(piece, weights, carried, inputs, kv, metadata, kernels=kernels)
        pieces = self._runs.get(piece.name)
        if pieces is None:  # it was captured with the one before it
            return carried
        own = {id(value) for value in self._handed_on}
        places = tuple(None if id(v) in own else self._places.of(i, v) for i, v in enumerate(carried))
        arguments = tuple(v if place is None else place for v, place in zip(carried, places, strict=True))
        graph = self._api.capture(lambda: self._applied(pieces, arguments))
        self.segments.append(Segment(pieces, places, graph))
        self._handed_on = graph.result
        return self._handed_on

    def _applied(self, pieces: tuple[Piece, ...], carried: Carried) -> Carried:
        with torch.no_grad():
            for piece in pieces:
                weights = piece.weights(self._params.tree)
                carried = apply(piece, weights, carried, self._inputs, kernels=self._kernels)
        return carried


def _runs(model: Model) -> Iterator[tuple[Piece, ...]]:
    """The longest runs of consecutive pieces without attention."""
    run: list[Piece] = []
    for piece in model.pieces:
        if not piece.is_attention:
            run.append(piece)
        elif run:
            yield tuple(run)
            run = []
    if run:
        yield tuple(run)
