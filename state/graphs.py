"""Captured steps: the very step, recorded on the buffers, for the shapes that batches are padded to.

A graph's key is the batch descriptor and the sampler's shape. What a key can not express (token constraints, more
log-probabilities than were captured) runs eagerly: the same function on the same buffers, only launched from the host.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from purestep.kernels.types import Kernels
from purestep.pure.errors import CaptureError
from purestep.pure.models.model import Model
from purestep.pure.padding import capture_layout
from purestep.pure.record import record
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.step import step
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.graph_api import Graph, GraphApi


@record(static=True)
class GraphKey:
    """What a captured step was made for."""

    descriptor: BatchDescriptor
    sampler: SamplerShape


@attrs.frozen
class CaptureReport:
    """What capturing took."""

    num_graphs: int
    seconds: float
    num_bytes: int


class CapturedSteps:
    """The graphs of one bound step, all on the same buffers and parameters."""

    def __init__(
        self, model: Model, params: Params, buffers: PersistentBuffers, kernels: Kernels, api: GraphApi
    ) -> None:
        self._model = model
        self._params = params
        self._buffers = buffers
        self._kernels = kernels
        self._api = api
        self._graphs: dict[GraphKey, Graph] = {}
        self._shapes: list[SamplerShape] = []  # those captured, the cheapest first

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What is captured, in the order of capture."""
        return tuple(self._graphs)

    def take(self, other: "CapturedSteps") -> None:
        """Have another's graphs, which are of the same step on the same storage; it has none afterwards."""
        self._graphs, self._shapes = other._graphs, other._shapes
        other._graphs, other._shapes = {}, []

    def capture(
        self, keys: Sequence[GraphKey], *, watch: Callable[[Iterable[GraphKey]], Iterable[GraphKey]] = iter
    ) -> CaptureReport:
        """Capture steps for these keys, in this order: put the largest first, later ones then share its memory.

        Nothing that a request could notice changes: the captured batches are padding, and the ledger is put back.
        `watch` wraps the keys, to show progress.

        Raises:
            CaptureError: a step that returns a leaf of the state in fresh storage.
        """
        begun, num_bytes = time.monotonic(), self._api.num_bytes()
        with _frozen_gc(), self._buffers.put_back():
            for key in watch(keys):
                if key not in self._graphs:
                    self._graphs[key] = self._api.capture(self._recorded(key))
                    self._shapes = sorted({*self._shapes, key.sampler}, key=_cost)
        seconds = time.monotonic() - begun
        return CaptureReport(len(self._graphs), seconds, self._api.num_bytes() - num_bytes)

    def covering(self, descriptor: BatchDescriptor, sampler: SamplerShape) -> GraphKey | None:
        """The key of a captured step that runs this batch exactly, the least that does; None: run it eagerly.

        A sampler that computes more than a batch needs changes nothing for it: neutral parameters are identities.
        """
        for shape in self._shapes:
            if covers(shape, sampler):
                key = GraphKey(descriptor, shape)
                if key in self._graphs:
                    return key
        return None

    def replay(self, key: GraphKey) -> StepOutput:
        """Run the step of this key on what the buffers hold; its output lies in storage that the next replay reuses."""
        graph = self._graphs[key]
        graph.replay()
        output: StepOutput = graph.result
        return output

    def clear(self) -> None:
        """Drop every graph, and with them their memory."""
        self._graphs.clear()
        self._shapes = []

    def _recorded(self, key: GraphKey) -> Callable[[], StepOutput]:
        """The function to record: one step on the buffers, in a layout of nothing but padding."""
        layout = capture_layout(key.descriptor, self._buffers.limits, sampler=key.sampler)
        state = self._buffers.laid_out(layout)

        def recorded() -> StepOutput:
            with torch.no_grad():
                after, output = step(self._model, self._params, state, kernels=self._kernels)
            for (name, old), (_, new) in zip(leaves(state), leaves(after), strict=True):
                if old.data_ptr() != new.data_ptr():
                    raise CaptureError(
                        f"{name} came back in fresh storage ({new.nbytes:,} bytes): a graph would write there, and no "
                        "step would read it. Give kernels that donate, such as cuda_donating()"
                    )
            return output

        return recorded


def covers(captured: SamplerShape, wanted: SamplerShape) -> bool:
    """Whether sampling captured for one shape gives what another wants."""
    flags = ("random", "truncated", "penalties", "min_tokens")
    if wanted.constraints or any(getattr(wanted, f) and not getattr(captured, f) for f in flags):
        return False
    if wanted.num_logprobs is None:
        return captured.num_logprobs is None
    enough = captured.num_logprobs is not None and captured.num_logprobs >= wanted.num_logprobs
    return enough and set(wanted.logprobs_modes) <= set(captured.logprobs_modes)


def _cost(shape: SamplerShape) -> tuple[int, ...]:
    """What a shape computes, in the order of what that takes."""
    return (shape.num_logprobs or 0, shape.penalties, shape.truncated, shape.random, shape.min_tokens)


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """No garbage collection: it could free memory in the midst of a capture, which CUDA forbids."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
