"""`Pending`: a step's output on its way to the host."""

from typing import Generic, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import StepOutput

T = TypeVar("T")


class ToHost(Generic[T]):
    """A tree of tensors on its way to the host; `result` waits for it.

    It is copied at once, since the next replay overwrites what a captured step returned. On a GPU the copies are queued
    behind what made the tensors; `result` waits for them and for nothing that came later.
    """

    __slots__ = ("_event", "_tree")

    def __init__(self, tree: T) -> None:
        self._event: torch.cuda.Event | None = None
        self._tree: T = pytree.tree_map(_on_its_way, tree)
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(tree)):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> T:
        """The same tree of numpy arrays."""
        if self._event is not None:
            self._event.synchronize()
        tree: T = pytree.tree_map(_as_numpy, self._tree)
        return tree


class Pending:
    """The output of the step of `batch`; `result` waits for it. Settle with both: settle(now, batch, result())."""

    __slots__ = ("_output", "batch")

    def __init__(self, batch: InputBatch, output: StepOutput) -> None:
        self.batch = batch
        self._output = ToHost(output)

    def result(self) -> StepOutput:
        """The output on the host, numpy arrays in the order of `batch.req_ids`."""
        return self._output.result()


def _on_its_way(leaf: Tensor | None) -> Tensor | None:
    if leaf is None:
        return None
    if not leaf.is_cuda:
        return leaf.clone()
    pinned = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
    return pinned.copy_(leaf, non_blocking=True)


def _as_numpy(leaf: Tensor | None) -> np.ndarray | None:
    return None if leaf is None else leaf.detach().numpy()
