"""Paged attention: this step's keys and values are written first, then every query attends."""

from typing import Any

from torch import Tensor

from purestep.kernels.reference import compositions
from purestep.kernels.triton.decode import decode, decode_tile
from purestep.kernels.triton.dense import rms_norm, rotate
from purestep.kernels.triton.mixed import mixed, mixed_tile
from purestep.kernels.triton.rope import angles
from purestep.kernels.triton.rotation import Rotation, check_rotation, turn_and_write
from purestep.kernels.triton.shared import check_cache, check_floats, check_rows
from purestep.kernels.triton.short import few_queries, is_short, short, short_tile
from purestep.kernels.triton.softmax import score_form
from purestep.kernels.triton.writes import write_kv
from purestep.kernels.types import Kernels


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
    """Write this step's keys and values into `kv`, then attend; arguments as in `Attend`.

    Where no request has more than one query, keys are split among programs, and in small batches also where a request
    has few; else queries are tiled. What lies in slots past a request's length, or before its window, is not read.
    """
    return _attend(
        q, k, v, kv, query_start_loc, seq_lens, block_table, slot_mapping, None, max_query_len, max_seq_len, scale,
        sliding_window, soft_cap, kv_scales,
    )  # fmt: skip


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
    """`attend` with the heads of qkv, normed and turned on the way: by the kernel itself if all requests decode, else
    by one that also writes the keys and values."""
    if (kernels.attend, kernels.rotate, kernels.rms_norm) != (attend, rotate, rms_norm):
        return compositions.attend_qkv(
            kernels, qkv, kv, query_start_loc, seq_lens, block_table, slot_mapping, cos=cos, sin=sin, q_gain=q_gain,
            k_gain=k_gain, eps=eps, max_query_len=max_query_len, max_seq_len=max_seq_len, scale=scale,
            sliding_window=sliding_window, soft_cap=soft_cap, kv_scales=kv_scales, settled=settled,
        )  # fmt: skip
    q, k, v = compositions.heads_of(qkv, kv)
    rotation = Rotation(cos.contiguous(), sin.contiguous(), q_gain, k_gain, eps)
    check_rotation("attend_qkv", q, rotation)
    return _attend(
        q, k, v, kv, query_start_loc, seq_lens, block_table, slot_mapping, rotation, max_query_len, max_seq_len,
        scale, sliding_window, soft_cap, kv_scales,
        settled=settled and kernels.angles == angles,  # which begins when all before it has ended; another may not
    )  # fmt: skip


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    rotation: Rotation | None,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: Tensor | None,
    *,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    check_floats("attend", q, k, v)
    check_cache("attend", kv, kv_scales)
    check_rows("attend", q=q, k=k, v=v, kv=kv)
    form = score_form(scale, soft_cap, sliding_window)
    dim, group = q.shape[2], q.shape[1] // kv.shape[3]
    batch, eight_bits = (query_start_loc, seq_lens, block_table), kv.itemsize == 1
    if max_query_len <= 1 and q.shape[0] and seq_lens.shape[0]:
        num_pairs = seq_lens.shape[0] * kv.shape[3]
        tile = decode_tile(q.dtype, dim, group, num_pairs, eight_bits=eight_bits)
        out = decode(
            q,
            k,
            v,
            kv,
            *batch,
            slot_mapping,
            max_seq_len=max_seq_len,
            form=form,
            tile=tile,
            rotation=rotation,
            kv_scales=kv_scales,
            settled=settled,
        )
        return out, kv
    if rotation is None:
        write_kv(kv, k, v, slot_mapping, kv_scales)
    else:
        q = turn_and_write(q, k, v, kv, slot_mapping, rotation, kv_scales)
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros(q.shape), kv
    are_few, others = is_short(q.shape[0], seq_lens.shape[0], kv.shape[3], group), None
    if not are_few or max_query_len > few_queries(group):
        tile = mixed_tile(q.dtype, dim, group, q.shape[0] // seq_lens.shape[0], eight_bits=eight_bits)
        others = mixed(q, kv, *batch, form=form, tile=tile, kv_scales=kv_scales)
        if not are_few:
            return others, kv
    tile = short_tile(q.dtype, dim, group, eight_bits=eight_bits)
    how: Any = {"max_seq_len": max_seq_len, "form": form, "tile": tile, "kv_scales": kv_scales}
    return short(q, kv, *batch, **how, out=others), kv
