"""What the kernels share: the checks of their arguments, early launches, and floats as integers of the same order."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from purestep.kernels.reference.scales import FP8, check_scales

# The interpreter takes bfloat16 for integers in arithmetic, so what is loaded is widened at once; and it cuts bits off
# where a device rounds, so what is narrowed goes through `rounded`.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

LARGEST_FP8 = tl.constexpr(448.0)

LARGEST_KEY = tl.constexpr(2147483647)  # of NaN
SMALLEST_KEY = tl.constexpr(-2147483648)  # below that of -inf: a place that holds no number

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below a number: triton's own, which is for kernels too, takes 3 us a call."""
    return 1 << max(number - 1, 0).bit_length()


def cdiv(number: int, by: int) -> int:
    """How many parts of this size hold so many; triton's own takes as long."""
    return -(-number // by)


def check_floats(function: str, *tensors: Tensor) -> None:
    """Refuse what would be computed with less precision than it has.

    Raises:
        TypeError: a tensor is not float32, bfloat16 or float16.
    """
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{function} was given {tensor.dtype}; the Triton kernels compute in float32 and take float32, "
                "bfloat16 and float16: use purestep.kernels.reference for other types"
            )


def check_cache(function: str, kv: Tensor, kv_scales: Tensor | None) -> None:
    """Refuse a cache of another type than its scales tell of.

    Raises:
        TypeError: no type that is computed in, and not float8_e4m3fn with scales either; or scales of another type.
    """
    check_scales(kv, kv_scales)
    if kv_scales is None:
        check_floats(function, kv)
    elif kv_scales.dtype != torch.float32 or not kv_scales.is_contiguous():
        raise TypeError(
            f"{function} was given kv_scales of {kv_scales.dtype} with strides {kv_scales.stride()}: give float32 [2]"
        )


def in_bytes(kv: Tensor) -> Tensor:
    """The same storage; eight-bit floats as integers, which move about as well and have the same zero."""
    return kv.view(torch.uint8) if kv.dtype == FP8 else kv


def check_rows(function: str, **tensors: Tensor) -> None:
    """Refuse tensors that do not keep their last dimension together.

    Raises:
        ValueError: a last dimension has another stride than 1.
    """
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{function}: the last dimension of {name} {tuple(tensor.shape)} has stride {tensor.stride(-1)}; "
                "it has to be 1: call contiguous() first"
            )


def check_gated(function: str, bias: Tensor | None, *, gated: bool) -> None:
    """Refuse a bias of a gated product, whose gate alone it would be added to.

    Raises:
        ValueError: there is one.
    """
    if gated and bias is not None:
        raise ValueError(f"{function} was given a bias beside gated: gate and up have none, leave it out")


def early_launch() -> dict[str, bool]:
    """Options of a launch that may begin while the kernel before it still runs, if the device can do that.

    Such a kernel calls, in all of its programs, `let_next_begin` and `wait_for_previous`, or `take_turn`. Until the
    wait it reads nothing but weights, which no kernel of a step writes, and writes nothing: so results do not depend on
    timing. A kernel that ends has waited for the one before it, so that waiting for one is waiting for all.
    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide (programmatic dependent launch).
    """
    early = is_hopper_or_later()
    return {"EARLY": early, "launch_pdl": early}


def late_launch() -> dict[str, bool]:
    """Options of a launch that begins when all before it has ended, and behind which the next may begin early.

    So kernels behind it may read before their turn what was written before it was launched.
    """
    return early_launch() | {"launch_pdl": False}


@functools.cache
def is_hopper_or_later() -> bool:
    """Whether the device has early launches and copies of tiles."""
    if INTERPRETED.value:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The kernel behind this one may begin once all programs of this one have; it waits for their end by itself."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Until the kernel before this one has ended and what it wrote can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Both, for a kernel that has nothing to do until it can read what was written before."""
    let_next_begin(EARLY)
    wait_for_previous(EARLY)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """The float32 x in a narrower type, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, near, bits | 0x400000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of sums in float32, each rounded as if it had been written in `dtype`; in float32."""
    gate = rounded(gate, dtype).to(tl.float32)
    activated = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    return activated * rounded(up, dtype).to(tl.float32)


@triton.jit
def stored(x, scales, PLANE: tl.constexpr, dtype: tl.constexpr):
    """x as a cache of `dtype` holds it: keys (plane 0) or values (1), by their scale if there are scales."""
    x = x.to(tl.float32)
    if scales is not None:
        x = tl.div_rn(x, tl.load(scales + PLANE))
        x = tl.where(x > LARGEST_FP8, LARGEST_FP8, x)
        x = tl.where(x < -LARGEST_FP8, -LARGEST_FP8, x)
        if INTERPRETED:
            return _as_fp8(x)
    return rounded(x, dtype)


@triton.jit
def _as_fp8(x):
    """`rounded` to float8e4nv of numbers up to its largest one; the interpreter's own loses carries and NaN."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(
        tl.int32, bitcast=True
    ) & 0xFF  # in units of 2**-9, the distance of floats there
    near = tl.where(size < 0.015625, small, normal)
    near = tl.where(x == x, near, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (near | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def order_key(x):
    """int32 that orders like the float32 x: equal floats (0 and -0) are equal, NaN is the largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, LARGEST_KEY, key)


@triton.jit
def float_of(key):
    """The float32 whose `order_key` it is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
