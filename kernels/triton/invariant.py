"""Attention of the batch-invariant set: one tile for every batch, heads turned by one kernel."""

from typing import Any

import torch
from torch import Tensor

from purestep.kernels.reference import compositions
from purestep.kernels.triton.mixed import mixed
from purestep.kernels.triton.rotation import Rotation, check_rotation, turn_and_write
from purestep.kernels.triton.shared import check_cache, check_floats, check_rows
from purestep.kernels.triton.softmax import Tile, is_wide, score_form
from purestep.kernels.triton.writes import write_kv
from purestep.kernels.types import Kernels


def tile_for(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """The one tile of a head size, for decoding and for prefill."""
    if is_wide(dtype):
        return Tile(max(16, group), 16, num_warps=4, num_stages=2)
    return Tile(max(64, group), 64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write this step's keys and values into `kv`, then attend; arguments as in `Attend`."""
    check_rows("attend", q=q, k=k, v=v, kv=kv)
    check_cache("attend", kv, kv_scales)
    write_kv(kv, k, v, slot_mapping, kv_scales)
    return _attend(q, kv, query_start_loc, seq_lens, block_table, scale, sliding_window, soft_cap, kv_scales)


def attend_qkv(
    kernels: Kernels,
    qkv: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 0.0,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Tensor | None = None,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attend` with the heads of qkv, normed and turned on their way into the cache."""
    q, k, v = compositions.heads_of(qkv, kv)
    rotation = Rotation(cos.contiguous(), sin.contiguous(), q_gain, k_gain, eps)
    check_rotation("attend_qkv", q, rotation)
    check_cache("attend_qkv", kv, kv_scales)
    q = turn_and_write(q, k, v, kv, slot_mapping, rotation, kv_scales)
    return _attend(q, kv, query_start_loc, seq_lens, block_table, scale, sliding_window, soft_cap, kv_scales)


def _attend(
    q: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_floats("attend", q)
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros(q.shape), kv
    tile = tile_for(q.dtype, q.shape[2], q.shape[1] // kv.shape[3])
    form = score_form(scale, soft_cap, sliding_window)
    how: Any = {"form": form, "tile": tile, "kv_scales": kv_scales, "fuses": False}
    return mixed(q, kv, query_start_loc, seq_lens, block_table, **how), kv
