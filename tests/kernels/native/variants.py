"""The CPU's kernels in C, in two forms: for this processor, and for one with narrower vectors and fewer registers."""

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from purestep.kernels import native
from purestep.kernels.types import Kernels
from purestep.state.native import FLAGS, compiled

VARIANTS = ("this processor", "narrow")


@functools.cache
def kernels_of(variant: str) -> Kernels:
    """The kernels of a variant, compiled once in a process."""
    if variant == "this processor":
        return native.cpu_native(ctypes.CDLL(str(compiled())))
    sources = [str(path) for path in Path(native.__file__).parent.glob("*.c")]
    machine = ["-march=x86-64-v2"] if platform.machine() == "x86_64" else []
    with tempfile.TemporaryDirectory() as folder:
        compiler, target = shutil.which("cc") or "gcc", f"{folder}/narrow.so"
        command = [compiler, *FLAGS, *machine, "-fopenmp", *sources, "-o", target, "-lm"]
        subprocess.run(command, check=True, timeout=120)
        return native.cpu_native(ctypes.CDLL(target))
