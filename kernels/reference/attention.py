"""Attention over a paged KV cache, written as padded dense attention."""

import torch
from torch import Tensor

from purestep.kernels.reference.layout import ragged_index
from purestep.kernels.reference.scales import check_scales, stored
from purestep.kernels.reference.writes import write


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
    """Write this step's keys and values, then attend over each request's blocks; arguments as in `Attend`.

    Queries are padded to [reqs, max_query_len] and keys to [reqs, max_seq_len rounded up to blocks]. Unused
    slots are replaced by 0 before anything is multiplied by them, so whatever they hold, NaN included,
    changes neither results nor gradients. Types narrower than float32 are computed in float32.
    Source: https://arxiv.org/abs/2309.06180 (paged attention).
    """
    check_scales(kv, kv_scales)
    kv = write_kv(kv, k, v, slot_mapping, kv_scales)
    out = attend_written(
        q,
        kv,
        query_start_loc,
        seq_lens,
        block_table,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
    )
    return out, kv


def attend_written(
    q: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """The attention of `attend`, once this step's keys and values are in the cache: [tokens, heads, dim]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = _gather(kv, block_table, seq_lens, max_seq_len)
    if kv_scales is not None:
        keys, values = keys.to(wide) * kv_scales[0], values.to(wide) * kv_scales[1]
    padded = _pad_queries(q, query_start_loc, max_query_len)

    num_reqs, query_len, num_heads, dim = padded.shape
    num_kv_heads = keys.shape[2]
    grouped = torch.unflatten(padded, 2, (num_kv_heads, num_heads // num_kv_heads)).permute(
        0, 2, 3, 1, 4
    )  # r h g l d
    scores = torch.matmul(grouped.flatten(2, 3).to(wide), keys.permute(0, 2, 3, 1).to(wide)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    visible = _visible(query_start_loc, seq_lens, query_len, keys.shape[1], sliding_window)[:, None, None]
    scores = torch.unflatten(scores, 2, (-1, query_len))
    # A finite floor: a row that sees nothing must not become 0/0, and is zeroed below.
    scores = torch.where(visible, scores, torch.finfo(wide).min)
    weights = torch.softmax(scores, dim=-1).flatten(2, 3)
    out = torch.unflatten(torch.matmul(weights, values.permute(0, 2, 1, 3).to(wide)), 2, (-1, query_len))
    out = torch.where(visible.any(-1, keepdim=True), out, 0.0)
    out = out.permute(0, 3, 1, 2, 4).reshape(num_reqs, query_len, num_heads, dim)
    return _unpad(out, query_start_loc, q.shape[0]).to(q.dtype)


def write_kv(
    kv: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> Tensor:
    """`kv` with k and v [tokens, kv_heads, dim] at their slots, slot_mapping [tokens] >= 0."""
    block_size = kv.shape[2]
    block = (slot_mapping // block_size)[:, None]
    offset = (slot_mapping % block_size)[:, None]
    plane = torch.arange(2, device=kv.device)  # keys, values
    scales = None if kv_scales is None else kv_scales[:, None, None]
    return write(kv, (block, plane, offset), stored(torch.stack((k, v), dim=1), scales, kv.dtype))


def _gather(kv: Tensor, block_table: Tensor, seq_lens: Tensor, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of each request, [reqs, keys, kv_heads, dim] each, 0 past its length."""
    block_size = kv.shape[2]
    table = block_table[:, : -(-max_seq_len // block_size)]
    start = torch.arange(table.shape[1], device=kv.device) * block_size
    table = torch.where(start < seq_lens[:, None], table, 0)  # entries past the length may be stale
    pages = kv[table]  # [reqs, blocks, 2, block_size, kv_heads, dim]
    position = torch.arange(table.shape[1] * block_size, device=kv.device)
    used = (position < seq_lens[:, None])[:, :, None, None]
    keys = torch.where(used, pages[:, :, 0].flatten(1, 2), 0.0)
    values = torch.where(used, pages[:, :, 1].flatten(1, 2), 0.0)
    return keys, values


def _visible(
    query_start_loc: Tensor, seq_lens: Tensor, query_len: int, num_keys: int, sliding_window: int | None
) -> Tensor:
    """Which keys each padded query attends to: bool [reqs, query_len, keys]."""
    num_queries = query_start_loc[1:] - query_start_loc[:-1]
    offset = torch.arange(query_len, device=seq_lens.device)
    query = (seq_lens - num_queries)[:, None] + offset  # the query's position in its request
    key = torch.arange(num_keys, device=seq_lens.device)
    visible = (
        (key <= query[:, :, None])
        & (key < seq_lens[:, None, None])
        & (offset < num_queries[:, None])[:, :, None]
    )
    if sliding_window is not None:
        visible = visible & (key > query[:, :, None] - sliding_window)
    return visible


def _pad_queries(q: Tensor, query_start_loc: Tensor, max_query_len: int) -> Tensor:
    """Each request's queries, [reqs, max_query_len, heads, dim], 0 past its end."""
    token = query_start_loc[:-1, None] + torch.arange(max_query_len, device=q.device)
    own = token < query_start_loc[1:, None]
    return torch.where(own[:, :, None, None], q[token.clamp(max=q.shape[0] - 1)], 0.0)


def _unpad(out: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Back to tokens laid end to end; padding tokens get 0."""
    index, offset = ragged_index(query_start_loc, num_tokens)
    real = torch.arange(num_tokens, device=out.device) < query_start_loc[-1]
    tokens = out[index, offset.clamp(max=out.shape[1] - 1)]
    return torch.where(real[:, None, None], tokens, 0.0)
