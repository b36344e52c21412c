"""The CPU's kernels in C, compiled for this processor and loaded.

The library lies in purestep's folder of the user's cache ($XDG_CACHE_HOME, or ~/.cache), named by all that it follows
from (sources, command, compiler and processor) and by what it holds: one that is damaged is not loaded. It is made in a
temporary folder and then moved there, so that processes which start at once do not read half of one.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
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
        return cpu_native(ctypes.CDLL(str(compiled())))
    except (CompilerError, OSError) as error:  # OSError: the loader's, or that of a full disk
        text = (
            f"the CPU's kernels in C: {error}; torch's are used, and a step takes two to three times as long"
        )
        warnings.warn_explicit(text, UserWarning, "purestep", 0)  # no line of code would tell more
        return donating


def compiled() -> Path:
    """The library with the kernels, compiled if this has not been done yet.

    Raises:
        CompilerError: what is said there.
    """
    from purestep.kernels import native

    compiler = shlex.split(os.environ.get("CC", "")) or [name for name in COMPILERS if shutil.which(name)][:1]
    if not compiler:
        raise CompilerError(f"they need a C compiler, and none of {', '.join(COMPILERS)} was found")
    sources = sorted(Path(native.__file__).parent.glob("*.[ch]"))
    facts = [path.read_bytes() for path in sources]
    facts += [" ".join((*compiler, *FLAGS)).encode(), _run(*compiler, "--version")[1].encode(), _processor()]
    name, folder = f"native-{_digest(b'|'.join(facts))}", _folder()
    found = [] if folder is None else [path for path in folder.glob(f"{name}-*.so") if _is_whole(path)]
    if found:
        return found[0]
    with _workplace(folder) as work:
        made = Path(work) / "native.so"
        _compile(compiler, [str(path) for path in sources if path.suffix == ".c"], made)
        target = (
            Path(folder if Path(work).parent == folder else _own_folder())
            / f"{name}-{_digest(made.read_bytes())}.so"
        )
        return Path(shutil.move(made, target))


def _compile(compiler: Sequence[str], sources: Sequence[str], target: Path) -> None:
    said = ""
    # Apple's clang has no OpenMP, and old compilers do not know every processor: what they know has to do.
    for more in (("-march=native", "-fopenmp"), ("-march=native",), ()):
        code, said = _run(*compiler, *FLAGS, *more, *sources, "-o", str(target), "-lm")
        if code == 0:
            return
    raise CompilerError(f"{' '.join(compiler)} does not compile them: {said.strip()[-500:]}")


def _folder() -> Path | None:
    """Where libraries are kept, None if nobody knows a home."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "purestep"


def _workplace(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A new folder in this one, or, if that can not be written to, anywhere."""
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(dir=folder)
    return tempfile.TemporaryDirectory()


def _own_folder() -> str:
    """One that is gone when this process ends."""
    folder = tempfile.mkdtemp(prefix="purestep-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.endswith("-" + _digest(path.read_bytes()))
    except OSError:
        return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]


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
