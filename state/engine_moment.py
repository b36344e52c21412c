"""`EngineMoment`: all that an engine knew, to go back to as often as one likes."""

import weakref
from collections import deque
from types import TracebackType
from typing import Any, Self

import attrs

from purestep.pure.errors import StaleStateError
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.queue import Queue
from purestep.state.book import Book
from purestep.state.flights import InFlight
from purestep.state.moments import Moment


@attrs.frozen
class Known:
    """What an engine knew beside what the device did."""

    queue: Queue
    batch: InputBatch
    book: Book
    in_flight: tuple[InFlight, ...]
    kept: Any = None  # what a drafter on the host kept


class EngineMoment:
    """Requests with their tokens, text and draws to come, as they were. It holds their blocks until it is dropped.

    It is dropped by `close`, at the end of a `with` block, or when nobody refers to it any more.
    """

    def __init__(self, number: int, known: Known, device: Moment, dropped: deque[int]) -> None:
        self._known: Known | None = known
        self._device: Moment | None = device
        self._dropped = dropped
        self._number = number
        # The engine takes a dropped moment out of its queue between two turns: here it may be in the midst of one.
        self._close = weakref.finalize(self, dropped.append, number)
        self._close.atexit = False

    @property
    def device(self) -> Moment:
        """What the device knew."""
        assert self._device is not None, "a closed moment was not refused"
        return self._device

    def known_to(self, dropped: deque[int]) -> Known:
        """What was known, for the engine whose dropped moments are collected here.

        Raises:
            StaleStateError: the moment is closed, or it is of another engine.
        """
        if self._known is None or not self._close.alive:
            raise StaleStateError(
                "this moment is closed and holds nothing: remember() a new one before it is needed"
            )
        if self._dropped is not dropped:
            raise StaleStateError("this moment is of another engine: rewind the one that gave it")
        return self._known

    def close(self) -> None:
        """Give back its blocks. Closing twice is allowed."""
        self._close()
        self._known = self._device = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._known is None:
            return "EngineMoment(closed)"
        queue = self._known.queue
        num_blocks = [len(blocks) for blocks in queue.moments[self._number]]
        return f"EngineMoment({len(queue.running)} running, {len(queue.waiting)} waiting, holds {num_blocks} blocks)"
