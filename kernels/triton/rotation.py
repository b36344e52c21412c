"""Heads on their way from the projection to attention: norm over the head, rotation, and the cache.

Every product and every sum is rounded to the type, as the reference's are: what is written are the reference's bits,
but for the order in which a norm adds up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.triton.shared import early_launch, next_power_of_2, rounded, stored, take_turn
from purestep.kernels.triton.softmax import lanes


@record
class Rotation:
    """How queries and keys are turned: cos and sin [tokens, dim / 2]; before that normed, if gains [dim] are given."""

    cos: Tensor
    sin: Tensor
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float


def check_rotation(function: str, q: Tensor, rotation: Rotation) -> None:
    """Refuse other types than that of the queries.

    Raises:
        TypeError: cos, sin or a gain has another type than q.
    """
    others = (rotation.cos, rotation.sin, rotation.q_gain, rotation.k_gain)
    types = [q.dtype, *(x.dtype for x in others if x is not None)]
    if len(set(types)) > 1:
        raise TypeError(f"{function}: queries, cos, sin and gains have to be of one type, and are {types}")


def turn_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    rotation: Rotation,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """The turned q [tokens, heads, dim]; the turned k [tokens, kv_heads, dim], and v, are written into their slots."""
    num_tokens, num_heads, dim = q.shape
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        _turn_and_write[(num_tokens, 2)](
            q, k, v, kv, turned, rotation.cos, rotation.sin, rotation.q_gain, rotation.k_gain, slot_mapping,
            kv_scales, rotation.eps, kv.shape[0], q.stride(0), q.stride(1), *k.stride()[:2], *v.stride()[:2],
            *kv.stride()[:4], Q_HEADS=num_heads, KV_HEADS=k.shape[1], Q_ROWS=next_power_of_2(num_heads),
            KV_ROWS=next_power_of_2(k.shape[1]), DIM=dim, WIDTH=lanes(dim), BLOCK_SIZE=kv.shape[2],
            enable_fp_fusion=False, **early_launch(),
        )  # fmt: skip
    return turned


@triton.jit
def load_angles(cos, sin, token, lane, DIM: tl.constexpr):
    """What each lane of a head is multiplied by, and its partner in the other half: [1, WIDTH] each, float32."""
    low = lane < DIM // 2
    pair = token.to(tl.int64) * (DIM // 2) + tl.where(low, lane, lane - DIM // 2)
    cosine = tl.load(cos + pair, mask=lane < DIM, other=0.0).to(tl.float32)
    sine = tl.load(sin + pair, mask=lane < DIM, other=0.0).to(tl.float32)
    return cosine, tl.where(low, -sine, sine)


@triton.jit
def load_turned(heads, lane, exists, cosine, sine, gain, eps, DIM: tl.constexpr, dtype: tl.constexpr):
    """Heads [rows, WIDTH] of one token, normed if there is a gain, and turned; rows and lanes past the end are 0.

    heads: pointers [rows, 1]; lane [1, WIDTH]; exists bool [rows, 1].
    """
    partner = tl.where(lane < DIM // 2, lane + DIM // 2, lane - DIM // 2)
    mask = exists & (lane < DIM)
    own = tl.load(heads + lane, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads + partner, mask=mask, other=0.0).to(tl.float32)
    if gain is not None:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        own_gain = tl.load(gain + lane, mask=lane < DIM, other=0.0).to(tl.float32)
        other_gain = tl.load(gain + partner, mask=lane < DIM, other=0.0).to(tl.float32)
        own = rounded(own_gain * rounded(own * scale, dtype).to(tl.float32), dtype).to(tl.float32)
        other = rounded(other_gain * rounded(other * scale, dtype).to(tl.float32), dtype).to(tl.float32)
    straight = rounded(own * cosine, dtype).to(tl.float32)
    across = rounded(other * sine, dtype).to(tl.float32)
    return rounded(straight + across, dtype)


@triton.jit
def place_of(slot_mapping, token, num_blocks, kv_block, kv_slot, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr):
    """Where a token's slot begins in the cache, and how many lanes may be written there: 0 if there is no such slot."""
    slot = tl.load(slot_mapping + token).to(tl.int64)
    inside = (slot >= 0) & (slot < num_blocks.to(tl.int64) * BLOCK_SIZE)
    return slot // BLOCK_SIZE * kv_block + slot % BLOCK_SIZE * kv_slot, tl.where(inside, DIM, 0)


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["slot_mapping", "scales"])
def _turn_and_write(
    q, k, v, kv, turned, cos, sin, q_gain, k_gain, slot_mapping, scales, eps, num_blocks, q_token, q_head, k_token,
    k_head, v_token, v_head, kv_block, kv_plane, kv_slot, kv_head, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)[None, :]
    dtype: tl.constexpr = turned.dtype.element_ty
    cosine, sine = load_angles(cos, sin, token, lane, DIM)
    if tl.program_id(1) == 0:
        q_row = tl.arange(0, Q_ROWS)[:, None]
        heads = q + token * q_token + q_row * q_head
        query = load_turned(heads, lane, q_row < Q_HEADS, cosine, sine, q_gain, eps, DIM, dtype)
        target = turned + (token * Q_HEADS + q_row) * DIM + lane
        tl.store(target, query, mask=(q_row < Q_HEADS) & (lane < DIM))
    else:
        _write_turned(
            k + token * k_token, k_head, v + token * v_token, v_head, kv, slot_mapping, scales, token, cosine, sine,
            k_gain, eps, num_blocks, kv_block, kv_plane, kv_slot, kv_head, KV_HEADS, KV_ROWS, DIM, WIDTH, BLOCK_SIZE,
            dtype,
        )  # fmt: skip


@triton.jit
def _write_turned(
    k, k_head, v, v_head, kv, slot_mapping, scales, token, cosine, sine, gain, eps, num_blocks, kv_block, kv_plane,
    kv_slot, kv_head, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The keys of one token, normed and turned, and its values, into its slot."""
    head = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    mask = (head < HEADS) & (lane < DIM)
    key = load_turned(k + head * k_head, lane, head < HEADS, cosine, sine, gain, eps, DIM, dtype)
    value = tl.load(v + head * v_head + lane, mask=mask, other=0.0)
    place, room = place_of(slot_mapping, token, num_blocks, kv_block, kv_slot, BLOCK_SIZE, DIM)
    target = kv + place + head * kv_head + lane
    kv_dtype: tl.constexpr = kv.dtype.element_ty
    tl.store(target, stored(key, scales, 0, kv_dtype), mask=mask & (lane < room))
    tl.store(target + kv_plane, stored(value, scales, 1, kv_dtype), mask=mask & (lane < room))
