"""Norms, rotary embedding and activation: one pass each, in float32, rounded where the reference rounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import (
    cdiv,
    check_floats,
    check_rows,
    early_launch,
    let_next_begin,
    next_power_of_2,
    rounded,
    take_turn,
    wait_for_previous,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, rounded to x's dtype before the weight is applied."""
    return _normed(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and x + residual."""
    return _normed(x, residual, weight, eps)


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    other = x if residual is None else residual
    check_floats("rms_norm", x, other, weight)
    check_rows("rms_norm", x=x, residual=other)
    dtype = torch.result_type(other, x)
    out = torch.empty(x.shape, dtype=torch.promote_types(dtype, weight.dtype), device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out, total
    groups, x_steps, other_steps = _groups(x), _steps(x), _steps(other)
    num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
    block = next_power_of_2(width)
    rows = max(1, 1024 // block)
    _rms_norm[(cdiv(num_rows, rows),)](
        x, other, weight, out, total, eps, num_rows, groups, *x_steps, *other_steps,
        WIDTH=width, BLOCK=block, ROWS=rows, ADD=residual is not None,
        num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16, **early_launch(),
    )  # fmt: skip
    return out, total


def _groups(x: Tensor) -> int:
    """Rows that follow each other at one stride: x is [rows, width] or [tokens, heads, width]."""
    if not 1 <= x.ndim <= 3:
        raise ValueError(f"rms_norm takes one to three dimensions, not {tuple(x.shape)}: flatten it first")
    return x.shape[1] if x.ndim == 3 else 1


def _steps(x: Tensor) -> tuple[int, int]:
    return (x.stride(0), x.stride(1)) if x.ndim == 3 else (x.stride(0) if x.ndim == 2 else 0, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, residual, weight, out, total, eps, num_rows, groups, x_outer, x_inner, r_outer, r_inner, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(EARLY)
    outer, inner = (row // groups)[:, None], (row % groups)[:, None]
    value = tl.load(x + outer * x_outer + inner * x_inner + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    place = row[:, None] * WIDTH + column[None, :]
    if ADD:
        kept = tl.load(residual + outer * r_outer + inner * r_inner + column[None, :], mask=mask, other=0.0)
        summed = rounded(value + kept.to(tl.float32), total.dtype.element_ty)
        tl.store(total + place, summed, mask=mask)
        value = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    normal = rounded(value * scale, total.dtype.element_ty).to(tl.float32)
    tl.store(out + place, rounded(gain * normal, out.dtype.element_ty), mask=mask)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q [tokens, heads, dim] and k [tokens, kv_heads, dim], NeoX halves.

    cos and sin [tokens, dim/2], contiguous, in q's dtype.
    """
    check_floats("rotate", q, k)
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        raise TypeError(
            f"rotate: q {q.dtype}, k {k.dtype}, cos {cos.dtype} and sin {sin.dtype} have to agree"
        )
    check_rows("rotate", q=q, k=k)
    turned = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
    )
    num_tokens, half = q.shape[0], q.shape[-1] // 2
    if num_tokens:
        _rotate[(num_tokens, 2)](
            q, k, cos.contiguous(), sin.contiguous(), *turned, *q.stride()[:2], *k.stride()[:2],
            Q_HEADS=q.shape[1], K_HEADS=k.shape[1], HALF=half,
            Q_BLOCK=next_power_of_2(q.shape[1]), K_BLOCK=next_power_of_2(k.shape[1]),
            BLOCK=next_power_of_2(half), enable_fp_fusion=False,
        )  # fmt: skip
    return turned


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_token, q_head, k_token, k_head, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    cosine = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        _turn(
            q + token * q_token,
            q_out + token * Q_HEADS * HALF * 2,
            q_head,
            cosine,
            sine,
            Q_HEADS,
            HALF,
            Q_BLOCK,
            BLOCK,
        )
    else:
        _turn(
            k + token * k_token,
            k_out + token * K_HEADS * HALF * 2,
            k_head,
            cosine,
            sine,
            K_HEADS,
            HALF,
            K_BLOCK,
            BLOCK,
        )


@triton.jit
def _turn(
    x,
    out,
    step,
    cosine,
    sine,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The heads of one token; each product and each sum is rounded to the type of x, as torch's are."""
    head = tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (pair < HALF)
    dtype = out.dtype.element_ty
    low = tl.load(x + head * step + pair, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + head * step + pair + HALF, mask=mask, other=0.0).to(tl.float32)
    low_cosine, high_sine = (
        rounded(low * cosine, dtype).to(tl.float32),
        rounded(high * sine, dtype).to(tl.float32),
    )
    high_cosine, low_sine = (
        rounded(high * cosine, dtype).to(tl.float32),
        rounded(low * sine, dtype).to(tl.float32),
    )
    place = out + head * (2 * HALF) + pair
    tl.store(place, rounded(low_cosine - high_sine, dtype), mask=mask)
    tl.store(place + HALF, rounded(high_cosine + low_sine, dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up = [gate, up] along the last dimension: [n, 2 * width] to [n, width]."""
    check_floats("silu_and_mul", gate_up)
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(next_power_of_2(width), 1024)
        _silu_and_mul[(out.numel() // width, cdiv(width, block))](
            gate_up.contiguous(), out, WIDTH=width, BLOCK=block, **early_launch()
        )
    return out


@triton.jit
def _silu_and_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, rounded(activated * up, dtype), mask=mask)
