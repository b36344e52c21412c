"""Paged attention on the CPU: keys and values are written in place, then requests attend.

Lengths are read on the host, where they cost nothing: no key past the longest request is touched, requests of one
length need no mask, and prompts attend one by one, each to its own keys. A decode step of a small model takes as long
to call its operations as to run them: where one call can do the work of two, it does.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from purestep.kernels.cpu.decodes import Decodes, decodes
from purestep.kernels.cpu.dense import turned
from purestep.kernels.cpu.writes import write_kv
from purestep.kernels.record import record
from purestep.kernels.reference import compositions
from purestep.kernels.reference.scales import check_scales
from purestep.kernels.types import Kernels

KEPT_MASKS = 4  # of tiles of prompts, for the next layers
KEPT_KEYS = 1024  # in those: longer prompts need more masks than that, and larger ones
QUERY_TILE = 256  # queries that see the same keys: what some of them must not see is computed all the same
KEYS_THEN_VALUES = torch.tensor([[0], [1]], dtype=torch.int32)  # the two planes of a block


@record(static=True)
class ScoreForm:
    """scale * q.k, or soft_cap * tanh(scale * q.k / soft_cap), for the last sliding_window positions or all."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def attend_qkv(
    kernels: Kernels,
    qkv: Tensor,
    kv: Tensor,
    *batch: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 0.0,
    settled: bool = False,
    **bounds: Any,
) -> tuple[Tensor, Tensor]:
    """As the reference's; queries and keys that have no norms are turned as the heads of one tensor."""
    if q_gain is not None or k_gain is not None:
        q, k, v = compositions.turned_heads(
            kernels, qkv, kv, cos=cos, sin=sin, q_gain=q_gain, k_gain=k_gain, eps=eps
        )
    else:
        num_kv_heads, dim = kv.shape[3:]
        heads = qkv.view(qkv.shape[0], qkv.shape[1] // dim, dim)
        num_turned = heads.shape[1] - num_kv_heads
        qk = turned(heads.narrow(1, 0, num_turned), cos[:, None, None], sin[:, None])
        q, k = qk.split_with_sizes([num_turned - num_kv_heads, num_kv_heads], 1)
        v = heads.narrow(1, num_turned, num_kv_heads)
    out, kv = kernels.attend(q, k, v, kv, *batch, **bounds)
    return out, kv


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

    What lies in slots past a request's length, or before the window of all its queries, is never multiplied.
    Source: https://arxiv.org/abs/2309.06180 (paged attention).
    """
    check_scales(kv, kv_scales)
    write_kv(kv, k, v, slot_mapping, kv_scales)
    batch = (query_start_loc, seq_lens, block_table)
    if kv_scales is None:
        return _attended(q, k, v, kv, *batch, ScoreForm(scale, sliding_window, soft_cap)), kv
    # Scores and outputs are multiplied by the scales, instead of keys and values.
    k_scale, v_scale = kv_scales.tolist()
    out = _attended(q, k, v, kv, *batch, ScoreForm(scale * k_scale, sliding_window, soft_cap))
    return out.mul_(v_scale), kv


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    form: ScoreForm,
) -> Tensor:
    """The attention of `attend`, once this step's keys and values are in the cache: [tokens, heads, dim]."""
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    outputs = []  # of one request or more each, and the tokens that they belong to
    for group in decodes(starts, lens, block_table, kv, form.sliding_window, q.dtype):
        if group.tokens.shape[0] == q.shape[0]:  # the steady state: one token of every request, all alike
            return _decode(q, kv, group, form)
        outputs.append((group.tokens, _decode(q[group.tokens], kv, group, form)))
    for r, length in enumerate(lens):
        if length and starts[r + 1] - starts[r] > 1:
            span = slice(starts[r], starts[r + 1])
            out = _prompt(q[span], k[span], v[span], kv, block_table[r], length, form)
            if out.shape == q.shape:
                return out
            outputs.append((torch.arange(span.start, span.stop), out))
    whole = torch.zeros_like(q)
    for tokens, out in outputs:
        whole.index_copy_(0, tokens, out)
    return whole


def _decode(q: Tensor, kv: Tensor, group: Decodes, form: ScoreForm) -> Tensor:
    """One query a request, q [reqs, heads, dim]. Returns [reqs, heads, dim]."""
    num_kv_heads, dim = kv.shape[3:]
    num_rows = q.shape[0] * num_kv_heads  # the heads that share keys stand as queries of one
    gathered = kv.view(-1, dim).index_select(0, group.heads)
    keys, values = gathered.view(2, num_rows, -1, dim).unbind()
    grouped = q.reshape(num_rows, -1, dim)
    if form.soft_cap is not None or q.dtype.itemsize < 4 or kv.dtype != q.dtype:
        hidden = None if group.hidden is None else group.hidden[None]  # of three dimensions it would be slow
        return _weigh(grouped[None], keys[None], values[None], hidden, form).reshape(q.shape)
    # Flash attention has nothing to save with so few queries.
    if group.hidden is None:
        scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(form.scale)
    else:
        scores = torch.baddbmm(group.hidden, grouped, keys.transpose(1, 2), alpha=form.scale)
    return torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)


def _gather(kv: Tensor, table: Tensor, start: int, end: int) -> Tensor:
    """A copy of the keys and values at positions start to end: [reqs, 2, kv_heads, end - start, dim]."""
    num_blocks, _, block_size, num_kv_heads, dim = kv.shape
    first, last = start // block_size, -(-end // block_size)
    planes = torch.add(KEYS_THEN_VALUES, table[:, None, first:last], alpha=2)
    pages = kv.view(2 * num_blocks, -1).index_select(0, planes.view(-1))
    token = num_kv_heads * dim
    plane = (last - first) * block_size * token  # all keys of a request; then come all values
    # Slicing and transposing step by step would take longer than copying does.
    return pages.as_strided(
        (table.shape[0], 2, num_kv_heads, end - start, dim),
        (2 * plane, plane, dim, token, 1),
        (start - first * block_size) * token,
    )


def _prompt(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, table: Tensor, length: int, form: ScoreForm
) -> Tensor:
    """All queries of one request, q [tokens, heads, dim], the last of them at position length - 1."""
    window, num_queries = form.sliding_window, len(q)
    is_whole = length == num_queries and k.dtype == kv.dtype  # every key is at hand
    out = torch.empty_like(q)
    for begin in range(0, num_queries, QUERY_TILE):
        tile = q[begin : begin + QUERY_TILE]
        first = length - num_queries + begin
        end = first + len(tile)
        start = 0 if window is None else max(0, first - window + 1)
        if is_whole:
            keys, values = k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
        else:
            keys, values = _gather(kv, table[None], start, end)[0]
        hidden = None
        if first or form.soft_cap is not None or (window is not None and window < end):
            mask = _hidden if end - start <= KEPT_KEYS else _hidden.__wrapped__
            hidden = mask(first, start, end, window, q.dtype)
        out[begin : begin + QUERY_TILE] = _one_request(tile, keys, values, hidden, form)
    return out


@lru_cache(maxsize=KEPT_MASKS)
@torch.inference_mode(False)  # what is kept may be of use to who differentiates
def _hidden(first: int, start: int, end: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[queries, keys]: what a query at position first to end does not see of keys at start to end is -inf, else 0."""
    query, position = torch.arange(first, end)[:, None], torch.arange(start, end)
    is_visible = position <= query
    if window is not None:
        is_visible &= position > query - window
    return torch.where(is_visible, 0.0, float("-inf")).to(dtype)


def _one_request(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, form: ScoreForm) -> Tensor:
    """q [tokens, heads, dim] to keys [kv_heads, keys, dim]; hidden as of `_hidden`, None for plain causal."""
    grouped = torch.unflatten(q, 1, (len(keys), -1)).permute(1, 2, 0, 3)
    k, v = (x[:, None].expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
    out = _weigh(grouped, k, v, hidden, form, is_causal=hidden is None)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _weigh(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, form: ScoreForm, *, is_causal: bool = False
) -> Tensor:
    """Softmax of scores and `hidden` (0 or -inf) times values, over [batch, heads, tokens, dim]."""
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if form.soft_cap is None:
        return scaled_dot_product_attention(q, k, v, hidden, is_causal=is_causal, scale=form.scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.transpose(-1, -2).to(wide)) * form.scale
    scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    if hidden is not None:
        scores += hidden
    return torch.matmul(torch.softmax(scores, dim=-1), v.to(wide)).to(q.dtype)
