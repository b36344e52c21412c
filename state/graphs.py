"""Captured steps: the very step, recorded on the buffers, for the shapes that batches are padded to.

A full graph's key is the batch descriptor, the sampler's shape and a number of steps. What a key can not express
(token constraints, more log-probabilities than were captured) runs eagerly: the same function on the same buffers,
only launched from the host. A key without a sampler stands for the graphs of the model's pieces, between which
attention and all of sampling run eagerly.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.errors import CaptureError
from purestep.pure.models.model import Model
from purestep.pure.padding import capture_layout
from purestep.pure.propose import propose
from purestep.pure.record import record, replace
from purestep.pure.records.dispatch import BatchExecution, CUDAGraphMode
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.inputs import BatchDescriptor, StepInputs
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.state import ExecuteModelState, StepState
from purestep.pure.step import execute, joined, sample, unroll
from purestep.state.buffers import PersistentBuffers, leaves
from purestep.state.graph_api import Graph, GraphApi
from purestep.state.pending import Sender, ToHost
from purestep.state.pieces import CapturedPieces, Places, capture_pieces

Answered = tuple[tuple[Any, ...], "GraphKey | None"]  # what `covering` was asked, and its answer
UNASKED: Answered = ((None,), None)


@record(static=True)
class GraphKey:
    """What was captured: steps with this sampler, or a half of one; without a sampler and whole, the model's pieces."""

    descriptor: BatchDescriptor
    sampler: SamplerShape | None  # None: whatever is sampled
    num_steps: int = 1
    half: Literal["execute", "sample"] | None = None  # None: whole steps
    num_drafts: int = 0  # that a request may have verified; the model's pieces are the same for any


@record
class Half:
    """What a captured `execute` leaves at fixed addresses, where the captured `sample` finds it."""

    inputs: StepInputs
    logits: Tensor
    hidden_states: Tensor


@attrs.frozen
class Replayed:
    """A graph that has been replayed, and what copies its results to the host."""

    graph: Graph
    sender: Sender[StepOutput]


@attrs.frozen
class CaptureReport:
    """What capturing took."""

    num_graphs: int
    seconds: float
    num_bytes: int


class CapturedSteps:
    """The graphs of one bound step, all on the same buffers and parameters."""

    def __init__(
        self,
        model: Model,
        params: Params,
        buffers: PersistentBuffers,
        kernels: Kernels,
        api: GraphApi,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._params = params
        self._buffers = buffers
        self._kernels = kernels
        self._api = api
        self._drafter = drafter
        self._graphs: dict[GraphKey, Graph] = {}
        self._replayed: dict[GraphKey, Replayed] = {}
        self._pieces: dict[GraphKey, CapturedPieces] = {}
        self._places = Places()
        self._execute: GraphKey | None = None  # the last one captured, while its samples may follow
        self._shapes: list[SamplerShape] = []  # those captured, the cheapest first
        self._wanted: tuple[GraphKey, ...] = ()  # what was to be captured, and is unless that was interrupted
        self._before: CapturedSteps | None = None  # who has it yet
        self._answered = UNASKED

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs or key in self._pieces

    def __len__(self) -> int:
        return len(self._graphs) + sum(map(len, self._pieces.values()))

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What is captured, in the order of capture."""
        return (*self._pieces, *self._graphs)

    def share(self, other: "CapturedSteps") -> None:
        """Have another's graphs, which are of the same step on the same storage."""
        self._graphs, self._pieces, self._shapes = other._graphs, other._pieces, other._shapes
        self._forget_covering()
        self._wanted = other._wanted

    def follow(self, other: "CapturedSteps") -> None:
        """Have nothing yet of what another has; `complete` captures it, and takes it from the other."""
        self._wanted, self._before = other._wanted, other

    def complete(self) -> None:
        """Capture what was to be captured, if anything of it is missing."""
        if len(self._graphs) + len(self._pieces) < len(self._wanted):
            if self._before is not None:
                self._before.clear()  # there may be no room for both
            self._before = None
            self._drop()
            self.capture(self._wanted)

    def capture(
        self, keys: Sequence[GraphKey], *, watch: Callable[[Iterable[GraphKey]], Iterable[GraphKey]] = iter
    ) -> CaptureReport:
        """Capture steps for these keys, in this order: put the largest first, later ones then share its memory.

        Nothing that a request could notice changes: the captured batches are padding, and the ledger is put back.
        `watch` wraps the keys, to show progress.

        Upstream locks a workspace afterwards, because one that grew would leave graphs with the address of the old one.
        Here kernels allocate their scratch where they run: under capture it comes from the graphs' own pool, which
        keeps its addresses as long as they live, in sizes that a graph's key fixes. Nothing that a graph reads can
        grow, so nothing has to be locked.

        Raises:
            CaptureError: a step that returns a leaf of the state in fresh storage; a `sample` that does not follow the
                `execute` whose logits it reads, or another such `sample`.
        """
        begun, num_bytes = time.monotonic(), self._api.num_bytes()
        self._wanted = tuple(dict.fromkeys((*self._wanted, *keys)))
        try:
            self._capture(watch(keys))
        except Exception:
            self._wanted = self.keys
            raise
        seconds = time.monotonic() - begun
        return CaptureReport(len(self), seconds, self._api.num_bytes() - num_bytes)

    def _capture(self, keys: Iterable[GraphKey]) -> None:
        self._forget_covering()
        with _frozen_gc(), self._buffers.put_back():
            for key in keys:
                if key in self:
                    continue
                if key.half == "execute":
                    self._disown_execute()
                    self._execute = key
                if key.sampler is None and key.half is None:
                    self._pieces[key] = capture_pieces(
                        self._model,
                        self._params,
                        self._state(key),
                        kernels=self._kernels,
                        api=self._api,
                        places=self._places,
                    )
                else:
                    self._graphs[key] = self._api.capture(self._recorded(key))
                if key.sampler is not None:
                    self._shapes = sorted({*self._shapes, key.sampler}, key=_cost)
            self._disown_execute()

    def covering(
        self, execution: BatchExecution, sampler: SamplerShape, *, num_steps: int = 1, num_drafts: int = 0
    ) -> GraphKey | None:
        """The key of what was captured that runs this batch exactly, the least that does; None: run it eagerly.

        A sampler that computes more than a batch needs changes nothing for it: neutral parameters are identities.
        Steady steps ask with the same objects, and are given the last answer.
        """
        asked = (execution.cudagraph_mode, execution.descriptor, sampler, num_steps, num_drafts)
        before, answer = self._answered
        if not all(map(is_, asked, before)):
            answer = self._find(execution, sampler, num_steps, num_drafts)
            self._answered = asked, answer  # at once, whatever interrupts it
        return answer

    def _forget_covering(self) -> None:
        """What is captured has changed, so that `covering` looks again."""
        self._answered = UNASKED

    def _find(
        self, execution: BatchExecution, sampler: SamplerShape, num_steps: int, num_drafts: int
    ) -> GraphKey | None:
        if execution.cudagraph_mode is CUDAGraphMode.PIECEWISE:
            key = GraphKey(execution.descriptor, None)
            return key if key in self._pieces and num_steps == 1 else None
        return self._least(GraphKey(execution.descriptor, sampler, num_steps, num_drafts=num_drafts))

    def sampling(self, executed: GraphKey, sampler: SamplerShape) -> GraphKey | None:
        """The key of the captured `sample` behind this captured `execute`; None: sample eagerly."""
        return self._least(replace(executed, sampler=sampler, half="sample"))

    def _least(self, wanted: GraphKey) -> GraphKey | None:
        assert wanted.sampler is not None
        for shape in self._shapes:
            if covers(shape, wanted.sampler) and (key := replace(wanted, sampler=shape)) in self._graphs:
                return key
        return None

    def replay(self, key: GraphKey) -> ToHost[StepOutput]:
        """Run the steps of this key on what the buffers hold; what they return, as one, is on its way to the host."""
        found = self._replayed.get(key)
        if found is None:
            graph = self._graphs[key]
            found = self._replayed[key] = Replayed(graph, Sender(graph.result))
        found.graph.replay()
        return found.sender.send()

    def replay_execute(self, key: GraphKey) -> Half:
        """Run a step up to its logits; no other replay but that of its `sample` may come before they are used up."""
        graph = self._graphs[key]
        graph.replay()
        half: Half = graph.result
        return half

    def pieces(self, key: GraphKey) -> CapturedPieces:
        """The model's pieces, captured for this key's number of tokens."""
        return self._pieces[key]

    def clear(self) -> None:
        """Drop every graph, and with them their memory."""
        self._wanted = ()
        self._drop()

    def _drop(self) -> None:
        self._graphs.clear()
        self._replayed.clear()
        self._forget_covering()
        self._pieces.clear()
        self._places = Places()
        self._shapes = []

    def _state(self, key: GraphKey) -> StepState:
        """The buffers, in a layout of nothing but padding."""
        sampler = SamplerShape() if key.sampler is None else key.sampler
        limits, num_drafts = self._buffers.limits, key.num_drafts
        layout = capture_layout(
            key.descriptor, limits, sampler=sampler, num_drafts=num_drafts, num_steps=key.num_steps
        )
        return self._buffers.laid_out(layout)

    def _disown_execute(self) -> None:
        """Let those that are captured from now on have the memory of the last `execute`: its samples are captured."""
        if self._execute is not None:
            self._graphs[self._execute].disown()
            self._execute = None

    def _recorded(self, key: GraphKey) -> Callable[[], Any]:
        """The function to record on the buffers: steps, or a half of one."""
        state, kernels = self._state(key), self._kernels
        model, params, drafter = self._model, self._params, self._drafter

        def steps() -> StepOutput:
            after, outputs = unroll(model, params, state, key.num_steps, kernels=kernels, drafter=drafter)
            _check_in_place(state, after)
            return joined(outputs)

        def executing() -> Half:
            executed = execute(model, params, state, kernels=kernels)
            _check_in_place(state, executed.state)
            assert executed.logits is not None
            return Half(executed.inputs, executed.logits, executed.hidden_states)

        def sampling() -> StepOutput:
            executed = ExecuteModelState(state, half.inputs, half.logits, half.hidden_states)
            after, output = propose(
                drafter, params, executed, *sample(executed, kernels=kernels), kernels=kernels
            )
            _check_in_place(state, after)
            return output

        if key.half == "sample":
            before = replace(key, sampler=None, half="execute")
            if before != self._execute:
                raise CaptureError(
                    f"a sample of {key.descriptor} is to be captured, and no execute of it was just before: give "
                    f"{before} first in the same call, and all samples that read its logits behind it"
                )
            half: Half = self._graphs[before].result
            return torch.no_grad()(sampling)
        return torch.no_grad()(executing if key.half == "execute" else steps)


def _check_in_place(state: StepState, after: StepState) -> None:
    for (name, old), (_, new) in zip(leaves(state), leaves(after), strict=True):
        if old.data_ptr() != new.data_ptr():
            raise CaptureError(
                f"{name} came back in fresh storage ({new.nbytes:,} bytes): a graph would write there, and no "
                "step would read it. Give kernels that donate, such as cuda_donating()"
            )


def covers(captured: SamplerShape, wanted: SamplerShape) -> bool:
    """Whether sampling captured for one shape gives what another wants."""
    flags = ("random", "truncated", "penalties", "min_tokens", "kept_mass")
    if wanted.constraints or wanted.extras:
        return False
    if any(getattr(wanted, f) and not getattr(captured, f) for f in flags):
        return False
    if wanted.num_logprobs is None:
        return captured.num_logprobs is None
    enough = captured.num_logprobs is not None and captured.num_logprobs >= wanted.num_logprobs
    return enough and set(wanted.logprobs_modes) <= set(captured.logprobs_modes)


def _cost(shape: SamplerShape) -> tuple[int, ...]:
    """What a shape computes, in the order of what that takes."""
    wide = (shape.num_logprobs or 0, shape.penalties, shape.truncated, shape.kept_mass)
    return (*wide, shape.random, shape.min_tokens)


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """No garbage collection: it could free memory in the midst of a capture, which CUDA forbids."""
    gc.collect()
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
