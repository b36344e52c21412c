"""`Pending`: a step's output on its way to the host."""

from typing import Generic, TypeVar

import attrs
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import StepOutput

T = TypeVar("T")

PACKED_BYTES = 2**16  # allocations up to which it costs less to copy all of one than to launch several copies


@attrs.frozen
class Place:
    """Where a tensor lies in its allocation."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    offset: int  # bytes

    @staticmethod
    def of(leaf: Tensor) -> "Place":
        """The place of this tensor."""
        size = leaf.itemsize
        dtype = torch.empty(0, dtype=leaf.dtype).numpy().dtype
        strides = tuple([step * size for step in leaf.stride()])
        return Place(dtype, tuple(leaf.shape), strides, int(leaf.storage_offset()) * size)

    def within(self, allocation: np.ndarray) -> np.ndarray:
        """What lies there in a copy of the allocation, uint8."""
        return np.ndarray(self.shape, self.dtype, allocation.data, self.offset, self.strides)


@attrs.frozen(eq=False)
class Landing:
    """Memory of the host for one copy, pinned where it comes from a GPU, and the event behind that."""

    memory: list[Tensor]
    event: torch.cuda.Event | None

    def read(self) -> list[np.ndarray]:
        """What has landed, once it has; the memory may be used for another copy then."""
        if self.event is not None:
            self.event.synchronize()
        return [memory.numpy().copy() for memory in self.memory]


class Sender(Generic[T]):
    """How a tree of tensors is copied to the host, worked out once for what lies in the same place after every step.

    Tensors that share a small allocation on a GPU come in one copy.
    """

    __slots__ = ("_is_cuda", "_places", "_sources", "_spare", "_spec")

    def __init__(self, tree: T) -> None:
        leaves, self._spec = pytree.tree_flatten(tree)
        self._is_cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
        self._spare: list[Landing] = []  # of copies that were taken in
        self._sources: list[Tensor] = []
        self._places: list[
            tuple[int, Place | None] | None
        ] = []  # which source, and where in it if it is more
        found: dict[int, int] = {}
        for leaf in leaves:
            if leaf is None:
                self._places.append(None)
                continue
            storage = leaf.untyped_storage()
            if not leaf.is_cuda or storage.nbytes() > PACKED_BYTES:
                self._places.append((len(self._sources), None))
                self._sources.append(leaf.detach())
                continue
            if storage.data_ptr() not in found:
                found[storage.data_ptr()] = len(self._sources)
                self._sources.append(torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(storage))
            self._places.append((found[storage.data_ptr()], Place.of(leaf)))

    def send(self) -> "ToHost[T]":
        """Copy what the tensors hold now."""
        landing = self._spare.pop() if self._spare else self._new_landing()
        _copy(landing.memory, self._sources)
        if landing.event is not None:
            landing.event.record()
        return ToHost(self, landing)

    def _new_landing(self) -> Landing:
        memory = [torch.empty(s.shape, dtype=s.dtype, pin_memory=s.is_cuda) for s in self._sources]
        return Landing(memory, torch.cuda.Event() if self._is_cuda else None)  # type: ignore[no-untyped-call]

    def spare(self, landing: Landing) -> None:
        """This memory is free for another copy: pinned memory is too dear to be asked for anew each time."""
        self._spare.append(landing)

    def unpacked(self, copies: list[np.ndarray]) -> T:
        """The tree, of copies of what was sent."""
        leaves = [place and _found(copies[place[0]], place[1]) for place in self._places]
        tree: T = pytree.tree_unflatten(leaves, self._spec)
        return tree


class ToHost(Generic[T]):
    """A tree of tensors on its way to the host; `result` waits for it.

    It is copied at once, since the next replay overwrites what a captured step returned. On a GPU the copies are queued
    behind what made the tensors; `result` waits for them and for nothing that came later.
    """

    __slots__ = ("_copies", "_landing", "_sender")

    def __init__(self, sender: Sender[T], landing: Landing) -> None:
        self._sender = sender
        self._landing: Landing | None = landing
        self._copies: list[np.ndarray] = []

    def result(self) -> T:
        """The same tree of numpy arrays."""
        landing = self._landing
        if (
            landing is not None
        ):  # in this order, so that no interrupt gives others memory that is to be read again
            self._copies = landing.read()
            self._landing = None
            self._sender.spare(landing)
        return self._sender.unpacked(self._copies)


class Pending:
    """The output of the step of `batch`; `result` waits for it. Settle with both: settle(now, batch, result())."""

    __slots__ = ("_output", "batch")

    def __init__(self, batch: InputBatch, output: ToHost[StepOutput]) -> None:
        self.batch = batch
        self._output = output

    def result(self) -> StepOutput:
        """The output on the host, numpy arrays in the order of `batch.req_ids`."""
        return self._output.result()


def to_host(tree: T) -> ToHost[T]:
    """Send a tree of tensors that is sent once."""
    return Sender(tree).send()


def _found(copy: np.ndarray, place: Place | None) -> np.ndarray:
    return copy if place is None else place.within(copy)


def _copy(memory: list[Tensor], sources: list[Tensor]) -> None:
    for own, source in zip(memory, sources, strict=True):
        own.copy_(source, non_blocking=True)
