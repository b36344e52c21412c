"""Paged attention on the CPU: keys and values are written in place, then requests attend.

Lengths are read on the host, where they cost nothing: no key past the longest request is touched, requests of one
length need no mask, and prompts attend one by one, each to its own keys.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from purestep.kernels.cpu.writes import write_kv
from purestep.kernels.record import record
from purestep.kernels.reference.scales import check_scales

SHORT = 512  # keys up to which a request may be computed as if it were longer, without a loss worth a call
GATHERED_BYTES = 8 * 2**20  # of keys and values that decodes gather at once, to read them again while cached
QUERY_TILE = 256  # queries that see the same keys: what some of them must not see is computed all the same
KEYS_THEN_VALUES = torch.tensor([[0], [1]], dtype=torch.int32)  # the two planes of a block


@record(static=True)
class ScoreForm:
    """scale * q.k, or soft_cap * tanh(scale * q.k / soft_cap), for the last sliding_window positions or all."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


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
    decodes = [r for r, length in enumerate(lens) if length and starts[r + 1] - starts[r] == 1]
    for group in _alike(decodes, lens, kv):
        if len(group) == len(q) == len(lens):  # the steady state: one token of every request, all alike
            return _decode(q, kv, block_table, seq_lens, lens, form)
        rows = torch.tensor(group)
        tokens = query_start_loc[rows].to(torch.int64)
        own = [lens[r] for r in group]
        outputs.append((tokens, _decode(q[tokens], kv, block_table[rows], seq_lens[rows], own, form)))
    for r, length in enumerate(lens):
        if length and starts[r + 1] - starts[r] > 1:
            span = slice(starts[r], starts[r + 1])
            out = _prompt(q[span], k[span], v[span], kv, block_table[r], length, form)
            if len(out) == len(q):
                return out
            outputs.append((torch.arange(span.start, span.stop), out))
    whole = torch.zeros_like(q)
    for tokens, out in outputs:
        whole.index_copy_(0, tokens, out)
    return whole


def _alike(rows: list[int], lens: list[int], kv: Tensor) -> list[list[int]]:
    """Decodes that attend together: short, or of lengths within a factor of four, and few enough to gather at once.

    Each is computed as if it were as long as the longest of its group.
    """
    if len(rows) < 2:
        return [rows] if rows else []
    by_size: dict[int, list[int]] = {}
    for r in rows:
        size = ((lens[r] - 1) // SHORT).bit_length()
        by_size.setdefault((size + 1) // 2, []).append(r)
    token_bytes = 2 * kv.shape[3] * kv.shape[4] * kv.element_size()
    groups = []
    for group in by_size.values():
        longest = max(lens[r] for r in group)
        at_once = max(1, GATHERED_BYTES // (longest * token_bytes))
        groups += [group[i : i + at_once] for i in range(0, len(group), at_once)]
    return groups


def _decode(
    q: Tensor, kv: Tensor, table: Tensor, seq_lens: Tensor, lens: list[int], form: ScoreForm
) -> Tensor:
    """One query a request, q [reqs, heads, dim]; lens is seq_lens, all above 0. Returns [reqs, heads, dim]."""
    window = form.sliding_window or max(lens)
    start, end = max(0, min(lens) - window), max(lens)
    if min(lens) == end:
        keys, values = _gather(kv, table, start, end)
        visible = None
    else:
        block_start = torch.arange(0, end, kv.shape[2])  # entries past a length may be stale
        table = torch.where(block_start < seq_lens[:, None], table[:, : len(block_start)], 0)
        keys, values = _gather(kv, table, start, end)
        for r, length in enumerate(lens):  # what is not visible may be anything, NaN included
            for x in (keys[r], values[r]):
                x[:, length - start :].zero_()
                x[:, : max(0, length - window - start)].zero_()
        position, own_end = torch.arange(start, end), seq_lens[:, None]
        visible = ((position < own_end) & (position >= own_end - window))[:, None, None]
    grouped = torch.unflatten(q, 1, (kv.shape[3], -1))  # the heads that share keys stand as queries of one
    return _weigh(grouped, keys, values, visible, form).reshape(q.shape)


def _gather(kv: Tensor, table: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values at positions start to end, each [reqs, kv_heads, end - start, dim]."""
    num_blocks, _, block_size, num_kv_heads, dim = kv.shape
    first, last = start // block_size, -(-end // block_size)
    planes = torch.add(KEYS_THEN_VALUES, table[:, None, first:last], alpha=2)
    pages = kv.view(2 * num_blocks, -1).index_select(0, planes.view(-1))
    token = num_kv_heads * dim
    request = 2 * (last - first) * block_size * token  # all keys, then all values
    shape = (len(table), num_kv_heads, end - start, dim)
    strides = (request, dim, token, 1)
    skipped = (start - first * block_size) * token
    # Slicing and transposing step by step would take longer than copying does.
    return pages.as_strided(shape, strides, skipped), pages.as_strided(shape, strides, skipped + request // 2)


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
            keys, values = (x[0] for x in _gather(kv, table[None], start, end))
        visible = None
        if first or form.soft_cap is not None or (window is not None and window < end):
            query, position = torch.arange(first, end)[:, None], torch.arange(start, end)
            visible = position <= query
            if window is not None:
                visible &= position > query - window
        out[begin : begin + QUERY_TILE] = _one_request(tile, keys, values, visible, form)
    return out


def _one_request(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, form: ScoreForm) -> Tensor:
    """q [tokens, heads, dim] to keys [kv_heads, keys, dim]; visible bool [tokens, keys], None for plain causal."""
    grouped = torch.unflatten(q, 1, (len(keys), -1)).permute(1, 2, 0, 3)
    k, v = (x[:, None].expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
    out = _weigh(grouped, k, v, visible, form, is_causal=visible is None)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _weigh(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, form: ScoreForm, *, is_causal: bool = False
) -> Tensor:
    """Softmax of scores times values, over [batch, heads, tokens, dim]."""
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if form.soft_cap is None:
        return scaled_dot_product_attention(q, k, v, visible, is_causal=is_causal, scale=form.scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.transpose(-1, -2).to(wide)) * form.scale
    scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    if visible is not None:
        scores = scores.masked_fill_(~visible, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v.to(wide)).to(q.dtype)
