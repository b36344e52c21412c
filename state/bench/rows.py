"""What was measured, a row each, as JSON too."""

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch

Unit = Literal["ms", "tok_s", "us", "s"]


@attrs.frozen(kw_only=True)
class Row:
    """One number, and what the device allows at best: a floor for times, a ceiling for tokens per second."""

    bench: str  # decode, sampled, prefill, startup, host
    shape: str  # the model
    unit: Unit
    value: float | None  # None: it could not be measured, and `why` says why
    batch: int | None = None
    who: str = "purestep"
    level: Literal["engine", "step"] = "engine"
    bound: float | None = None  # in the same unit
    facts: Mapping[str, Any] = MappingProxyType({})  # whatever else belongs to it
    why: str | None = None

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit == "tok_s"

    @property
    def share(self) -> float | None:
        """Of what the device allows; None where that is unknown, or a difference of times came out as no time."""
        if self.bound is None or self.value is None or self.value <= 0:
            return None
        return self.value / self.bound if self.is_rate else self.bound / self.value

    def as_json(self) -> dict[str, Any]:
        """Plain values: the number under its unit's name, the bound as floor or ceiling; what is None is left out."""
        row = {
            "bench": self.bench,
            "shape": self.shape,
            "batch": self.batch,
            self.unit: self.value,
            "who": self.who,
            "level": self.level,
            "ceiling" if self.is_rate else "floor": self.bound,
            "why": self.why,
        }
        return {key: value for key, value in row.items() if value is not None} | dict(self.facts)


def about(device: torch.device | str) -> dict[str, Any]:
    """What belongs to every row: versions, the device, today's date; on a CPU the number of threads too."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("purestep", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    if torch.device(device).type == "cuda":
        return {"versions": versions | {"device": torch.cuda.get_device_name(device)}, "date": date}
    threads = torch.get_num_threads()
    return {"versions": versions | {"device": processor()}, "date": date, "threads": threads}


def processor() -> str:
    """The name of this machine's processor, as far as it is known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
