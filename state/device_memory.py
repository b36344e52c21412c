"""How much memory a device has, as values that tests can make up."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import attrs
import torch

AvailableBytes = Callable[[torch.device], int]


class DeviceMemory(Protocol):
    """What is known of one device's memory, in bytes."""

    def total(self) -> int:
        """All that the device has."""

    def free(self) -> int:
        """What nobody has taken, torch in this process included."""

    def reserved(self) -> int:
        """What torch in this process has taken, in use or kept for reuse."""

    def peak(self) -> int:
        """The most that tensors of this process held at once since `reset_peak`."""

    def reset_peak(self) -> None:
        """Give back what torch keeps for reuse, and begin to measure the peak anew."""


@attrs.frozen
class CudaMemory:
    """The memory of a GPU."""

    device: torch.device

    def total(self) -> int:
        """All that the device has."""
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        """What nobody has taken."""
        return torch.cuda.mem_get_info(self.device)[0]

    def reserved(self) -> int:
        """What torch in this process has taken."""
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        """The most that tensors held at once."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Give back what torch keeps for reuse, and begin anew."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)


def available_bytes(device: torch.device) -> int:
    """Bytes that tensors on `device` can be given now.

    On a GPU what is free and what torch keeps for reuse; elsewhere what Linux can free without swapping, or the
    machine's whole memory where nothing says so.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, amount, *_ = line.split()
            if name == "MemAvailable:":
                return int(amount) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
