"""What capturing needs of a device, as a value: CUDA graphs here, a recording fake in the tests."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
import torch.utils._pytree as pytree
from torch import Tensor


class Graph(Protocol):
    """A captured function: its result lies in storage of its own, which every replay overwrites."""

    result: Any

    def replay(self) -> None: ...

    def disown(self) -> None:
        """Let graphs that are captured later have the memory of the result: no replay of theirs may come between a
        replay of this one and the last use of its result."""


@runtime_checkable
class GraphApi(Protocol):
    """How to capture. Graphs of one api share their memory, so those captured first should be the largest."""

    def capture(self, function: Callable[[], Any]) -> Graph: ...

    def num_bytes(self) -> int: ...


@attrs.define
class CudaGraph:
    """One torch.cuda.CUDAGraph and what its function returned while it was captured."""

    graph: torch.cuda.CUDAGraph
    result: Any

    def replay(self) -> None:
        """Run it again on what its addresses hold now."""
        self.graph.replay()

    def disown(self) -> None:
        """Keep the addresses of the result, and not its memory."""
        self.result = pytree.tree_map(_without_memory, self.result)


class _Address:
    """What lies at an address, for torch to look at: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, tensor: Tensor) -> None:
        num_bytes = tensor.untyped_storage().nbytes()
        self.__cuda_array_interface__ = {
            "data": (tensor.untyped_storage().data_ptr(), False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _without_memory(leaf: Any) -> Any:
    """The same tensor, at the same address, whose memory somebody else owns."""
    if not isinstance(leaf, Tensor) or leaf.numel() == 0:
        return leaf
    words = torch.as_tensor(_Address(leaf), device=leaf.device).view(leaf.dtype)
    return words.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: torch keeps 32 MB of cuBLAS workspace for every stream that ever ran a product."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaGraphs:
    """Captures on a stream apart, in one memory pool.

    `torch.cuda.graph` would give all cached memory back before each capture, which takes longer than the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def capture(self, function: Callable[[], Any]) -> CudaGraph:
        """Run the function once, so that kernels are compiled and handles made, then capture it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                function()
                graph.capture_begin(pool=self._pool)
                try:
                    result = function()
                except BaseException:
                    with suppress(
                        RuntimeError
                    ):  # what was captured is no graph, as the error says that goes on
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:  # what runs next may write what the function still reads
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CudaGraph(graph, result)

    def num_bytes(self) -> int:
        """Device memory that torch holds, the pools of graphs included, once it has given back what it only caches."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)
