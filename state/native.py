"""The CPU's kernels in C, compiled for this processor and loaded.

The library lies in purestep's folder of the user's cache ($XDG_CACHE_HOME, or ~/.cache), named by all that it follows
from: sources, command, compiler and processor. It is made in a temporary file and then moved there, so that processes
which start at once do not read half of one.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from purestep.kernels.donating import (
    donating,  # torch comes with it, whose OpenMP runtime the library then shares
)
from purestep.kernels.types import Kernels

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-Wno-psabi")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 120  # that a compiler may take


class CompilerError(RuntimeError):
    """There is no C compiler, or it does not compile."""


@functools.cache
def cpu_kernels() -> Kernels:
    """The kernels of the CPU: those in C; `donating`, with a warning, where they can not be compiled."""
    from purestep.kernels.native import cpu_native

    try:
        path = compiled()
    except CompilerError as error:
        warnings.warn(f"{error}; torch's are used, and a step takes longer", stacklevel=2)
        return donating
    return cpu_native(ctypes.CDLL(str(path)))


def compiled() -> Path:
    """The library with the kernels, compiled if this has not been done yet.

    Raises:
        CompilerError: what is said there.
    """
    compiler = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise CompilerError(
            f"the CPU's kernels need a C compiler, and none of {', '.join(COMPILERS)} was found"
        )
    return _made(compiler)


def _made(compiler: str) -> Path:
    from purestep.kernels import native

    sources = sorted(Path(native.__file__).parent.glob("*.[ch]"))
    files = [str(path) for path in sources if path.suffix == ".c"]
    # Apple's clang has no OpenMP, and old compilers do not know every processor: what they know has to do.
    commands = [
        (compiler, *FLAGS, *more, *files) for more in (("-march=native", "-fopenmp"), ("-march=native",), ())
    ]
    facts = [path.read_bytes() for path in sources]
    facts += [" ".join(commands[0]).encode(), _run(compiler, "--version")[1].encode(), _processor()]
    name = f"native-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:20]}.so"
    folder = _folder()
    if (folder / name).exists():
        return folder / name
    with tempfile.TemporaryDirectory(dir=folder) as work:
        target = Path(work) / name
        for command in commands:
            code, said = _run(*command, "-o", str(target), "-lm")
            if code == 0:
                return target.replace(folder / name)
    raise CompilerError(f"{compiler} does not compile the CPU's kernels: {said.strip()[-500:]}")


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purestep"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # a home that can not be written to
        return Path(tempfile.mkdtemp(prefix="purestep-"))


def _run(*command: str) -> tuple[int, str]:
    """Its exit status, and what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} can not be run: {error}") from error
    return done.returncode, done.stdout + done.stderr


def _processor() -> bytes:
    """What `-march=native` follows from."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode() + platform.machine().encode()
    return "".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model"))})
    ).encode()
