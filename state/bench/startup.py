"""Start-up of an engine: from import to first token, in fresh processes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import purestep.state
from purestep.pure.errors import BenchmarkError
from purestep.state.bench.rows import Row
from purestep.state.bench.shapes import Subject

CHILD = "purestep.state.bench.child"
# Where kernels that were compiled are kept from process to process; here a new folder: the first process finds nothing.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}

# A command and what its environment has beyond ours, to what it writes.
Launch = Callable[[Sequence[str], Mapping[str, str]], str]


def launch(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command to its end.

    Raises:
        BenchmarkError: it failed; the last thing that it said is in the message.
    """
    finished = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if finished.returncode:
        said = [line for line in finished.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise BenchmarkError(f"a fresh process ended with status {finished.returncode}: {said[-1]}")
    return finished.stdout


def startup_rows(subject: Subject, who: str, name: str, *, launch: Launch = launch) -> Iterator[Row]:
    """Seconds from import to first token, with caches of compiled kernels empty, then as the first process left them.

    The files themselves, of packages and weights, may be in memory already.

    Raises:
        BenchmarkError: the process failed.
    """
    told = json.dumps({"who": who, "subject": attrs.asdict(subject)})
    source = str(Path(purestep.state.__path__[0]).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        environment = {variable: os.path.join(folder, name) for variable, name in CACHES.items()}
        for caches in ("cold", "warm"):
            said = launch([sys.executable, "-P", "-m", CHILD, told], environment | {"PYTHONPATH": path})
            seconds: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
            yield Row(
                bench="startup",
                shape=name,
                who=who,
                unit="s",
                value=sum(seconds.values()),
                facts={"caches": caches, **seconds},
            )
