"""The dense parts of a layer: products with weights in panels, norms and activations in one pass.

A product of few rows takes as long as reading the weight. Weights that were stored in four, eight or sixteen bits are
read as such, if every number of the float32 weight is one of those: the product is still that of float32, bit by bit.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import Parameter

from purestep.kernels.cpu import dense
from purestep.kernels.cpu.dense import PackedWeight
from purestep.kernels.record import record, static
from purestep.kernels.types import Kernels

PANEL = 32  # rows of a weight that lie together, and inputs that share scales
FLOAT32, BFLOAT16, EIGHT_BITS, FOUR_BITS = range(4)  # kinds of numbers
BLOCK_BYTES = {FLOAT32: 4096, BFLOAT16: 2048, EIGHT_BITS: 1152, FOUR_BITS: 768}  # of PANEL x PANEL numbers


@record
class PanelWeight:
    """A weight [out, in], and its panels, which are read in its place."""

    dense: Tensor
    panels: Tensor  # uint8
    kind: int = static()


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "x", "bias", "y")),
        *((name, ctypes.c_long) for name in ("n", "in_", "out")),
        *((name, ctypes.c_int) for name in ("kind", "is_gated", "threads")),
    ]


def prepare(library: ctypes.CDLL, weight: Tensor) -> Tensor | PackedWeight | PanelWeight:
    """What `linear`, `norm_gate_up` and `embed` take in the place of `weight` [out, in].

    For float32 panels of the smallest numbers that are the weight's own: a sixth of its bytes to all of them again.
    Like all copies they do not follow later changes of the weight. Other types as `donating` prepares them.
    """
    numbers = weight.detach().contiguous()
    if not (is_float(numbers) and weight.ndim == 2 and weight.numel()):
        return dense.prepare(weight)
    num_threads = torch.get_num_threads()
    for kind in (FOUR_BITS, EIGHT_BITS, BFLOAT16):
        # The first rows tell nearly always.
        if _packed(library, numbers[:PANEL], kind, num_threads=1) is not None:
            panels = _packed(library, numbers, kind, num_threads=num_threads)
            if panels is not None:
                return PanelWeight(dense=weight, panels=panels, kind=kind)
    panels = _packed(library, numbers, FLOAT32, num_threads=num_threads)
    assert panels is not None, "float32 holds every float32"
    return PanelWeight(dense=weight, panels=panels, kind=FLOAT32)


def _packed(library: ctypes.CDLL, weight: Tensor, kind: int, *, num_threads: int) -> Tensor | None:
    """The panels of a weight [out, in], None if some of its numbers are not of this kind."""
    num_out, num_in = weight.shape
    if num_in % PANEL and kind in (FOUR_BITS, EIGHT_BITS):
        return None
    panels = torch.zeros(-(-num_out // PANEL) * -(-num_in // PANEL) * BLOCK_BYTES[kind], dtype=torch.uint8)
    is_whole = library.pack(kind, weight.data_ptr(), panels.data_ptr(), num_out, num_in, num_threads)
    return panels if is_whole else None


def is_float(*tensors: Tensor | None) -> bool:
    """Whether all of them are what the C kernels read: float32 of the CPU whose numbers follow each other in memory.

    Not what is traced or transformed, nor what is differentiated: of that C knows nothing.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    is_tracked = torch.is_grad_enabled()
    return all(
        x is None
        or (
            x.dtype is torch.float32
            and x.is_cpu
            and x.is_contiguous()
            and not (is_tracked and x.requires_grad)
            and not x.is_neg()
            and type(x) in (Tensor, Parameter)
        )
        for x in tensors
    )


def embed(weight: Tensor | PackedWeight | PanelWeight, ids: Tensor) -> Tensor:
    """Rows of `weight` [vocab, hidden] by `ids` [n]: [n, hidden]."""
    return dense.embed(weight.dense if isinstance(weight, PanelWeight) else weight, ids)


def linear(
    library: ctypes.CDLL, x: Tensor, weight: Tensor | PackedWeight | PanelWeight, bias: Tensor | None = None
) -> Tensor:
    """x [n, in] times the transpose of weight [out, in], plus bias [out]: [n, out].

    In float32 the bits of a row do not depend on the others.
    """
    if not isinstance(weight, PanelWeight):
        return dense.linear(x, weight, bias)
    x = x.contiguous()
    if not _fits(x, weight, bias):
        return dense.linear(x, weight.dense, bias)
    return _multiply(library, x, weight, bias, is_gated=False)


def norm_gate_up(
    library: ctypes.CDLL,
    kernels: Kernels,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor | PackedWeight | PanelWeight,
) -> tuple[Tensor, Tensor]:
    """As the reference's; the activation follows each pair of products, while they are in registers."""
    if residual is None:
        normed, total = kernels.rms_norm(x, gain, eps), x
    else:
        normed, total = kernels.add_rms_norm(x, residual, gain, eps)
    if isinstance(weight, PanelWeight) and weight.dense.shape[0] % (2 * PANEL) == 0 and _fits(normed, weight):
        return _multiply(library, normed, weight, None, is_gated=True), total
    return kernels.silu_and_mul(kernels.linear(normed, weight, None)), total


def _fits(x: Tensor, weight: PanelWeight, bias: Tensor | None = None) -> bool:
    """Whether C may multiply these: float32, and of the shapes that it takes for granted."""
    num_out, num_in = weight.dense.shape
    return x.shape[1:] == (num_in,) and is_float(x, bias) and (bias is None or bias.shape == (num_out,))


def _multiply(
    library: ctypes.CDLL, x: Tensor, weight: PanelWeight, bias: Tensor | None, *, is_gated: bool
) -> Tensor:
    num_out, num_in = weight.dense.shape
    y = x.new_empty(x.shape[0], num_out // 2 if is_gated else num_out)
    sizes = (x.shape[0], num_in, y.shape[1], weight.kind, is_gated, torch.get_num_threads())
    bias_at = None if bias is None else bias.data_ptr()
    product = _Product(weight.panels.data_ptr(), x.data_ptr(), bias_at, y.data_ptr(), *sizes)
    if not library.multiply(ctypes.byref(product)):
        raise MemoryError("no memory for a product")
    return y


def rms_norm(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    if not (is_float(x, weight) and weight.shape == x.shape[-1:]):
        return dense.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    sizes = (x.numel() // x.shape[-1], x.shape[-1], torch.get_num_threads())
    library.rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, None, out.data_ptr(), *sizes)
    return out


def add_rms_norm(
    library: ctypes.CDLL, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and x + residual."""
    if not (is_float(x, residual, weight) and residual.shape == x.shape and weight.shape == x.shape[-1:]):
        return dense.add_rms_norm(x, residual, weight, eps)
    out, total = torch.empty_like(x), torch.empty_like(x)
    sizes = (x.numel() // x.shape[-1], x.shape[-1], torch.get_num_threads())
    tensors = (x.data_ptr(), residual.data_ptr(), weight.data_ptr())
    library.rms_norm(*tensors, eps, total.data_ptr(), out.data_ptr(), *sizes)
    return out, total


def silu_and_mul(library: ctypes.CDLL, gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up = [gate, up] along the last dimension: [n, 2 * width] to [n, width]."""
    if not is_float(gate_up) or gate_up.shape[-1] % 2:
        return dense.silu_and_mul(gate_up)
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    if width:
        library.silu_and_mul(
            gate_up.data_ptr(), y.data_ptr(), y.numel() // width, width, torch.get_num_threads()
        )
    return y
