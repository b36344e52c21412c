"""Random arguments for kernels, and what they must give in float64, worked out without any kernel of ours."""

import math
from typing import Any

import attrs
import torch
from torch import Tensor

PADDING = 3  # tokens behind the last request


@attrs.frozen
class AttentionCase:
    """Arguments of `attend`. Slots that no request uses hold NaN; the table's spare entries are block 1."""

    tensors: dict[str, Tensor]
    static: dict[str, Any]

    def run(self, attend: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        return attend(**(self.tensors | {"kv": self.tensors["kv"].clone()} | self.static | changes))

    def expected(self) -> Tensor:
        """The output in float64, request by request."""
        t, s = (
            {name: x.double() if x.is_floating_point() else x.long() for name, x in self.tensors.items()},
            self.static,
        )
        block_size, (num_tokens, num_heads, dim) = t["kv"].shape[2], t["q"].shape
        kv = t["kv"].transpose(1, 2).flatten(0, 1).clone()  # [slots, 2, heads, dim]
        kv[t["slot_mapping"]] = torch.stack((t["k"], t["v"]), 1)
        out = torch.zeros(num_tokens, num_heads, dim, dtype=torch.float64, device=kv.device)
        starts = t["query_start_loc"].tolist()
        for r, length in enumerate(t["seq_lens"].tolist()):
            start, num_queries = starts[r], starts[r + 1] - starts[r]
            if num_queries == 0 or length == 0:
                continue
            first = max(0, length - num_queries - (s["sliding_window"] or length) + 1)
            position = torch.arange(first, length, device=kv.device)
            slots = t["block_table"][r, position // block_size] * block_size + position % block_size
            keys, values = kv[slots].repeat_interleave(num_heads // kv.shape[2], dim=2).permute(1, 2, 0, 3)
            query = t["q"][start : start + num_queries].transpose(0, 1)
            score = query @ keys.transpose(1, 2) * s["scale"]
            if s["soft_cap"] is not None:
                score = s["soft_cap"] * torch.tanh(score / s["soft_cap"])
            own = length - num_queries + torch.arange(num_queries, device=kv.device)[:, None]
            seen = position <= own
            if s["sliding_window"] is not None:
                seen &= position > own - s["sliding_window"]
            weight = score.masked_fill(~seen, -math.inf).softmax(-1)
            out[start : start + num_queries] = (weight @ values).transpose(0, 1)
        return out


def far_apart(kv: Tensor) -> Tensor:
    """The same cache, whose blocks lie so far apart that from the fifth on they begin beyond 2**31 elements."""
    step = 2**29
    room = torch.empty((len(kv) - 1) * step + kv[0].numel(), dtype=kv.dtype, device=kv.device)
    return room.as_strided(kv.shape, (step, *kv.stride()[1:])).copy_(kv)


def attention_case(
    requests: list[tuple[int, int]],  # (length after the step, queries)
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionCase:
    """Requests over blocks in random order; a request of length 0 runs idle, its tokens write to the null block."""
    assert all(queries <= length or length == 0 for length, queries in requests), "more queries than tokens"
    generator = torch.Generator(device).manual_seed(seed)
    num_blocks = [-(-length // block_size) for length, _ in requests]
    width, total = max(1, *num_blocks) + 1, sum(num_blocks)
    order = torch.randperm(total, generator=generator, device=device) + 1
    num_tokens = sum(queries for _, queries in requests) + PADDING
    kv = torch.full((total + 2, 2, block_size, kv_heads, dim), math.nan, dtype=dtype, device=device)
    table = torch.ones(len(requests), width, dtype=torch.int32, device=device)
    slots = torch.arange(num_tokens, device=device) % block_size
    token, first = 0, 0
    for r, (length, queries) in enumerate(requests):
        blocks = order[first : first + num_blocks[r]]
        first += num_blocks[r]
        table[r, : num_blocks[r]] = blocks
        position = torch.arange(length, device=device)
        own = blocks[position // block_size] * block_size + position % block_size
        past = own[: length - queries] if length else own
        if sliding_window is not None:
            past = past[max(0, length - queries - sliding_window + 1) :]
        values = torch.randn(len(past), 2, kv_heads, dim, generator=generator, device=device)
        kv[past // block_size, :, past % block_size] = values.to(dtype)
        if length:
            slots[token : token + queries] = own[length - queries :]
        token += queries
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, generator=generator, device=device).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    starts = torch.tensor([0, *(queries for _, queries in requests)], device=device).cumsum(0)
    lengths = torch.tensor([length for length, _ in requests], device=device)
    tensors = dict(q=q, k=k, v=v, kv=kv, query_start_loc=starts.int(), seq_lens=lengths.int(), block_table=table,
                   slot_mapping=slots)  # fmt: skip
    static = dict(
        max_query_len=max(1, *(queries for _, queries in requests)), max_seq_len=max(1, int(lengths.max())),
        scale=dim**-0.5, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip
    return AttentionCase(tensors, static)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """|result - expected| / |expected| as vectors; NaN and infinities make it NaN."""
    expected = expected.double()
    return float((result.double() - expected).norm() / expected.norm())


def cut_in_float64(row: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, float]:
    """Which ids of one finite row stay, by the rule; and how close it came to another answer (a share of the mass)."""
    row = row.double()
    ratio = (row - row.max()).exp()
    kept = ratio >= min_p
    margin = _distance(ratio, min_p) if 0 < min_p < 1 else math.inf
    values, ids = row.masked_fill(~kept, -math.inf).sort(descending=True, stable=True)
    if top_k == 1:
        kept = torch.zeros_like(kept).scatter(0, ids[:1], True)
    elif 1 < top_k < len(row):
        kept &= row >= values[top_k - 1]
    if top_p < 1:
        values, ids = row.masked_fill(~kept, -math.inf).sort(descending=True, stable=True)
        mass = values.flip(0).softmax(0).cumsum(0).flip(0)
        within = ~(mass <= 1 - top_p)
        within[0] = True
        kept &= torch.zeros_like(kept).scatter(0, ids, within)
        margin = min(margin, _distance(mass[values > -math.inf], 1 - top_p))
    return kept, margin


def wrong_side(truncated: Tensor, row: Tensor, cut: tuple[int, float, float]) -> tuple[int, float]:
    """How many ids float64 would have put on the other side of the cut, and what they weigh.

    Sums in float32 are good to about 1e-7: one id too many or too few, or ids that together weigh less than 1e-6,
    are within rounding.
    """
    kept, _ = cut_in_float64(row, *cut)
    wrong = truncated.isfinite() != kept
    return int(wrong.sum()), float(row.double().softmax(0)[wrong].sum())


def _distance(values: Tensor, bound: float) -> float:
    return float((values - bound).abs().min())


def same(a: Any, b: Any) -> bool:
    """To the bit, NaN included."""
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
