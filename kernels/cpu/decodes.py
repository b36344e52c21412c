"""Which decoding requests attend together, and where in the cache their keys and values lie.

That is the same for all layers of a step, and takes as long to find out as to attend. So it is kept until another step
comes, by the values that it follows from: there is nothing that could go stale.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from purestep.kernels.record import record

SHORT = 512  # keys up to which a request may be computed as if it were longer, without a loss worth a call
GATHERED_BYTES = 8 * 2**20  # of keys and values that decodes gather at once, to read them again while cached
KEPT = 8  # results of a step: one for each KV group and window of a model


@record
class Decodes:
    """Requests of one query each that attend together, and positions that one of them sees or more.

    A position that a request does not see, for it lies past its length or before its window, stands for one that it
    sees: whatever lies in the cache there, NaN included, is never read.
    """

    tokens: Tensor  # int64 [reqs], where their queries are
    heads: Tensor  # int64 [2 * reqs * kv_heads * positions], in a cache of [heads, dim]: keys, then values
    hidden: Tensor | None  # [reqs * kv_heads, 1, positions]: 0, or -inf where it is not seen; None: all 0


def decodes(
    query_start_loc: list[int],
    seq_lens: list[int],
    block_table: Tensor,
    kv: Tensor,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> tuple[Decodes, ...]:
    """The decodes of a step: requests with one query and a length above 0. `hidden` is of dtype."""
    starts, lens = tuple(query_start_loc), tuple(seq_lens)
    _, _, block_size, num_kv_heads, dim = kv.shape
    table = (
        block_table[: len(lens), : -(-max(lens, default=0) // block_size)].to(torch.int32).numpy().tobytes()
    )
    head_bytes = 2 * dim * kv.element_size()
    found, key = of_step(starts, lens), (table, block_size, num_kv_heads, head_bytes, sliding_window, dtype)
    if key not in found:
        if len(found) == KEPT:
            found.clear()
        found[key] = _decodes(starts, lens, *key)
    return found[key]


@lru_cache(maxsize=1)
def of_step(starts: tuple[int, ...], lens: tuple[int, ...]) -> dict[tuple[Any, ...], tuple[Decodes, ...]]:
    """What is kept of the step with these lengths, the last one."""
    return {}


@torch.inference_mode(False)  # what is kept may be of use to who differentiates
def _decodes(
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    table: bytes,
    block_size: int,
    num_kv_heads: int,
    head_bytes: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> tuple[Decodes, ...]:
    rows = [r for r, length in enumerate(lens) if length and starts[r + 1] - starts[r] == 1]
    if not rows:
        return ()
    blocks = torch.frombuffer(bytearray(table), dtype=torch.int32).view(len(lens), -1)
    found = []
    for group in _alike(rows, lens, num_kv_heads * head_bytes):
        ends = torch.tensor([lens[r] for r in group])[:, None]
        end = int(ends.max())
        begins = torch.zeros_like(ends) if sliding_window is None else (ends - sliding_window).clamp(min=0)
        start = int(begins.min())
        position = torch.arange(start, end)
        is_visible = (position >= begins) & (position < ends)
        position = torch.where(is_visible, position, ends - 1)
        block = blocks[group].to(torch.int64).gather(1, position // block_size)
        key = 2 * block_size * block + position % block_size
        token = torch.stack([key, key + block_size])[:, :, None]
        heads = token * num_kv_heads + torch.arange(num_kv_heads)[:, None]
        hidden = None
        if not is_visible.all():
            hidden = torch.where(is_visible, 0.0, float("-inf")).to(dtype)
            hidden = hidden.repeat_interleave(num_kv_heads, 0)[:, None]
        tokens = torch.tensor([starts[r] for r in group])
        found.append(Decodes(tokens=tokens, heads=heads.flatten(), hidden=hidden))
    return tuple(found)


def _alike(rows: list[int], lens: tuple[int, ...], token_bytes: int) -> list[list[int]]:
    """Decodes that attend together: short, or of lengths within a factor of four, and few enough to gather at once.

    Each is computed as if it were as long as the longest of its group.
    """
    by_size: dict[int, list[int]] = {}
    for r in rows:
        size = ((lens[r] - 1) // SHORT).bit_length()
        by_size.setdefault((size + 1) // 2, []).append(r)
    groups = []
    for group in by_size.values():
        longest = max(lens[r] for r in group)
        at_once = max(1, GATHERED_BYTES // (longest * token_bytes))
        groups += [group[i : i + at_once] for i in range(0, len(group), at_once)]
    return groups
