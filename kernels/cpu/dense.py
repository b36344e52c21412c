"""The dense parts of a decoder layer, with copies of the weights in the order in which they are read fastest.

A product with few rows is bound by reading the weight. oneDNN's blocked order runs near the speed of memory (1.9 to
2.5 times `functional.linear` at 1 and 8 rows on two cores), where row order would be brought into it by every call. For
one row and a small weight even that is outdone by MKL, given the transpose in one part for each thread.
"""

import torch
from torch import Tensor
from torch.nn import functional

from purestep.kernels.record import record
from purestep.kernels.reference import reference

ROWS_PACKED_FOR = 512  # oneDNN's order for many rows is as fast for one; that for one row is slow for many
FEW_THREADS = 4  # up to which a row is multiplied in parts
SMALL_BYTES = 8 * 2**20  # weights up to which it is: larger ones are bound by memory in either way


@record
class PackedWeight:
    """A weight [out, in], and copies of it that are read faster."""

    dense: Tensor
    packed: Tensor  # in oneDNN's blocked order
    parts: Tensor | None  # the transpose by rows, [parts, in / parts, out]


def prepare(weight: Tensor) -> Tensor | PackedWeight:
    """What `linear` and `embed` take in the place of `weight` [out, in]: with packed copies where they are faster.

    Copies take as much memory again, small weights twice as much, and do not follow later changes of the weight.
    Weights of other types than float32 and (if the CPU has it) bfloat16, and all weights where torch has no oneDNN,
    stay as they are.
    """
    if not _is_packable(weight):
        return weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_PACKED_FOR)
    return PackedWeight(dense=weight, packed=packed, parts=_parts(weight.detach()))


def _is_packable(weight: Tensor) -> bool:
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.ndim != 2 or weight.numel() == 0 or weight.device.type != "cpu" or not has_onednn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _parts(weight: Tensor) -> Tensor | None:
    """The transpose with a part for each thread, where it is faster: for small float32 weights and few threads."""
    num_in, num_parts = weight.shape[1], torch.get_num_threads()
    is_faster = weight.nbytes <= SMALL_BYTES and num_parts <= FEW_THREADS
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not (is_faster and has_mkl and weight.dtype == torch.float32 and num_in % num_parts == 0):
        return None
    return weight.T.contiguous().view(num_parts, num_in // num_parts, -1)


def embed(weight: Tensor | PackedWeight, ids: Tensor) -> Tensor:
    """Rows of `weight` [vocab, hidden] by `ids` [n]: [n, hidden]."""
    return functional.embedding(ids, weight.dense if isinstance(weight, PackedWeight) else weight)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times the transpose of weight [out, in], plus bias [out]: [n, out]."""
    if not isinstance(weight, PackedWeight):
        return functional.linear(x, weight, bias)
    parts = weight.parts
    if parts is not None and x.shape[:-1] == (1,):
        y = torch.bmm(x.reshape(parts.shape[0], 1, -1), parts).sum(0)
        return y if bias is None else y.add_(bias)
    packed: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight.packed, bias, "none", [], "")
    return packed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype; narrow types as the reference rounds them."""
    if x.dtype.itemsize < 4:
        narrow: Tensor = reference.rms_norm(x, weight, eps)
        return narrow
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(x.new_full((), eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    scaled: Tensor = (x * scale).mul_(weight)
    return scaled


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and x + residual."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, NeoX halves: the pair (i, i + dim/2) turns by its angle.

    q [tokens, heads, dim], k [tokens, kv_heads, dim]; cos and sin [tokens, dim/2].
    """
    cos, sin = cos[:, None, None], sin[:, None]
    return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, dim] turned, its halves never copied; cos [tokens, 1, 1, dim/2], sin [tokens, 1, dim/2]."""
    halves = torch.unflatten(x, -1, (2, -1))
    low, high = halves.unbind(-2)
    both = halves * cos
    new_low, new_high = both.unbind(-2)
    new_low.addcmul_(high, sin, value=-1)
    new_high.addcmul_(low, sin)
    return both.flatten(-2)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up = [gate, up] along the last dimension: [n, 2 * width] to [n, width]."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes([width, width], -1)
    return functional.silu(gate).mul_(up)
