"""`Pending`: a step's output on its way to the host."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import StepOutput

T = TypeVar("T")

PACKED_BYTES = 2**16  # allocations up to which it costs less to copy all of one than to launch several copies


class ToHost(Generic[T]):
    """A tree of tensors on its way to the host; `result` waits for it.

    It is copied at once, since the next replay overwrites what a captured step returned. On a GPU the copies are queued
    behind what made the tensors; `result` waits for them and for nothing that came later.
    """

    __slots__ = ("_event", "_leaves", "_spec")

    def __init__(self, tree: T) -> None:
        leaves, self._spec = pytree.tree_flatten(tree)
        self._event: torch.cuda.Event | None = None
        self._leaves = _sent(leaves)
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> T:
        """The same tree of numpy arrays."""
        if self._event is not None:
            self._event.synchronize()
        tree: T = pytree.tree_unflatten([_as_numpy(leaf) for leaf in self._leaves], self._spec)
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


def _sent(leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The leaves on the host, or on their way there; those that share a small allocation come in one copy."""
    allocations: dict[int, Tensor] = {}
    sent = []
    for leaf in leaves:
        if leaf is None or not leaf.is_cuda or leaf.untyped_storage().nbytes() > PACKED_BYTES:
            sent.append(_on_its_way(leaf))
            continue
        storage = leaf.untyped_storage()
        address = storage.data_ptr()
        if address not in allocations:
            whole = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(storage)
            allocations[address] = _pinned(whole)
        sent.append(like(leaf, allocations[address]))
    return sent


def like(leaf: Tensor, data: Tensor) -> Tensor:
    """The tensor that lies in `data`, bytes of an allocation, where `leaf` lies in its own."""
    words = data[: len(data) // leaf.itemsize * leaf.itemsize].view(leaf.dtype)
    return words.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def _on_its_way(leaf: Tensor | None) -> Tensor | None:
    if leaf is None:
        return None
    return _pinned(leaf) if leaf.is_cuda else leaf.clone()


def _pinned(leaf: Tensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf, non_blocking=True)


def _as_numpy(leaf: Tensor | None) -> np.ndarray | None:
    return None if leaf is None else leaf.detach().numpy()
