"""Kernels for the CPU in C: `cpu_native(library)` is `donating` with these in the place of its functions, for float32.

The C sources lie beside this file; `purestep.state.native` compiles them. All means the same as in `kernels/reference`,
up to rounding; what is of another type is left to `donating`.
"""

import ctypes
from functools import partial

from purestep.kernels.donating import donating
from purestep.kernels.native.attention import attend_qkv
from purestep.kernels.native.dense import (
    add_rms_norm,
    embed,
    linear,
    norm_gate_up,
    prepare,
    rms_norm,
    silu_and_mul,
)
from purestep.kernels.record import replace
from purestep.kernels.types import Kernels

assert __name__ == "purestep.kernels.native", (
    f"import this package as purestep.kernels.native, not as {__name__}"
)

_at, _long, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
SIGNATURES = {
    "pack": (_int, _at, _at, _long, _long, _int),
    "multiply": (_at,),
    "rms_norm": (_at, _at, _at, ctypes.c_float, _at, _at, _long, _long, _int),
    "silu_and_mul": (_at, _at, _long, _long, _int),
    "turn_and_write": (_at,) * 9,
    "attend_one_each": (_at, _at, _at, _at, _long, _long),
    "attend_prompt": (_at, _long, _long, _long, _long),
}


def cpu_native(library: ctypes.CDLL) -> Kernels:
    """The kernels for a state in persistent memory of the CPU, with the functions of the compiled sources.

    Every one has the signature and the meaning of its namesake in `kernels/reference`.
    """
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return replace(
        donating,
        prepare=partial(prepare, library),
        embed=embed,
        linear=partial(linear, library),
        rms_norm=partial(rms_norm, library),
        add_rms_norm=partial(add_rms_norm, library),
        silu_and_mul=partial(silu_and_mul, library),
        norm_gate_up=partial(norm_gate_up, library),
        attend_qkv=partial(attend_qkv, library),
    )
