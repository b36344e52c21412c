"""The dense parts of a decoder layer. Shapes: n is any number of leading dimensions."""

import torch
from torch import Tensor
from torch.nn import functional


def prepare(weight: Tensor) -> Tensor:
    """What `linear` and `embed` take in the place of `weight` [out, in]: here the weight itself."""
    return weight


def embed(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of `weight` [vocab, hidden] by `ids` [n]: [n, hidden]."""
    return functional.embedding(ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times the transpose of weight [out, in], plus bias [out]: [n, out]."""
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype.

    Types narrower than float32 are normalised in float32 and rounded before the weight is applied; float64
    stays float64. Source: https://arxiv.org/abs/1910.07467; rounding as in transformers' LlamaRMSNorm.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and x + residual."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, NeoX halves: the pair (i, i + dim/2) turns by its angle.

    q [tokens, heads, dim], k [tokens, kv_heads, dim]; cos and sin [tokens, dim/2], in q's dtype.
    Source: https://arxiv.org/abs/2104.09864.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def turn(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    return turn(q), turn(k)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up = [gate, up] along the last dimension: [n, 2 * width] to [n, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
