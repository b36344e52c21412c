"""A stand-in for CUDA graphs on the CPU: it records what is captured, and replays by calling the function again.

Like a real graph, a replay reads whatever lies at the captured addresses and overwrites the captured result.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


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
