"""Paged attention: this step's keys and values are written first, then every query attends."""

from torch import Tensor

from purestep.kernels.triton.decode import decode, decode_tile
from purestep.kernels.triton.mixed import mixed, mixed_tile
from purestep.kernels.triton.shared import check_floats, check_rows
from purestep.kernels.triton.softmax import score_form
from purestep.kernels.triton.writes import write_kv


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
) -> tuple[Tensor, Tensor]:
    """Write this step's keys and values into `kv`, then attend; arguments as in `Attend`.

    Where no request has more than one query, keys are split among programs; else queries are tiled. What lies in
    slots past a request's length, or before its window, is not read.
    """
    check_floats("attend", q, k, v, kv)
    check_rows("attend", q=q)
    write_kv(kv, k, v, slot_mapping)
    form = score_form(scale, soft_cap, sliding_window)
    dim, group = q.shape[2], q.shape[1] // kv.shape[3]
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros(q.shape), kv
    batch = (q, kv, query_start_loc, seq_lens, block_table)
    if max_query_len <= 1:
        tile = decode_tile(q.dtype, dim, group)
        return decode(*batch, max_seq_len=max_seq_len, form=form, tile=tile), kv
    return mixed(*batch, form=form, tile=mixed_tile(q.dtype, dim, group)), kv
