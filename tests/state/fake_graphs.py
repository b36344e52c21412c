"""A stand-in for CUDA graphs on the CPU: it records what is captured, and replays by calling the function again.

Like a real graph, a replay reads whatever lies at the captured addresses and overwrites the captured result.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.record import replace
from purestep.pure.records.layout import SamplerShape
from purestep.state.engine import Engine
from purestep.state.graphs import GraphKey


class FakeGraph:
    """One captured function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.result = function()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        fresh = pytree.tree_leaves(self._function())
        with torch.no_grad():
            for place, value in zip(pytree.tree_leaves(self.result), fresh, strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)

    def disown(self) -> None:
        """As if others might write there from now on: what was captured is gone, and the next replay brings it."""
        with torch.no_grad():
            for place in pytree.tree_leaves(self.result):
                if isinstance(place, Tensor):
                    place.fill_(float("nan") if place.is_floating_point() else -1)


class FakeGraphs:
    """Captures by calling."""

    def __init__(self) -> None:
        self.captured: list[FakeGraph] = []

    def capture(self, function: Callable[[], Any]) -> FakeGraph:
        graph = FakeGraph(function)
        self.captured.append(graph)
        return graph

    def num_bytes(self) -> int:
        return 0

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.captured)


def unrolled(num_steps: int, num_reqs: int = 8) -> dict[str, Any]:
    """Settings of an engine that replays so many steps at once, of so many requests; 1: it has no graphs."""
    if num_steps == 1:
        return {}
    sizes = {"capture_sizes": (num_reqs,), "capture_samplers": ()}
    return {"graph_api": FakeGraphs(), "unroll": num_steps, **sizes}


def capture_samplers(own: Engine, num_steps: int) -> None:
    """Have graphs of so many steps for whatever samplers graphs can be of, at the engine's batch sizes."""
    shape = SamplerShape(random=True, truncated=True, penalties=True, min_tokens=True, kept_mass=True)
    shapes = shape, replace(shape, num_logprobs=3, logprobs_modes=("raw_logprobs",))
    captured, full = own.turns.bound.captured, own.turns.dispatch_keys.full
    assert captured is not None
    captured.capture([GraphKey(d, s, num_steps) for d in full.values() if d.uniform for s in shapes])
