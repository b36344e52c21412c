"""Clocks: of the host, and of when the device has done what it was given."""

import time
from collections.abc import Callable

import attrs
import torch


def _nothing() -> None:
    """Nothing to wait for: a CPU is done when a call returns."""


@attrs.frozen
class Clock:
    """Seconds. What is timed is given the clock, so that a test can hand it another one."""

    now: Callable[[], float] = time.perf_counter
    wait: Callable[[], None] = _nothing  # until the device has done all that was begun

    def idle(self) -> float:
        """The time at which the device has nothing left to do."""
        self.wait()
        return self.now()


def clock_of(device: torch.device | str) -> Clock:
    """The clock for what runs on this device."""
    place = torch.device(device)
    if place.type != "cuda":
        return Clock()
    return Clock(wait=lambda: torch.cuda.synchronize(place))
