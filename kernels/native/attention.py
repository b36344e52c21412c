"""Paged attention of a layer: heads are turned and written in one pass, requests with one query attend in another."""

import ctypes
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from purestep.kernels.cpu import attention as torch_attention
from purestep.kernels.native.dense import is_float
from purestep.kernels.record import record
from purestep.kernels.types import Kernels

PANEL = 32  # floats that are multiplied at once: heads are multiples of it
KEPT = 8  # steps whose rows are remembered, for the next layers


class _Turning(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("tokens", "heads", "kv_heads", "dim", "blocks", "block_size")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "out", "table")),
        *(
            (name, ctypes.c_long)
            for name in ("heads", "kv_heads", "dim", "blocks", "block_size", "table_width")
        ),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


@record
class Rows:
    """Which requests of a step attend how."""

    decodes: Tensor  # int64 [n], those with one query
    tokens: Tensor  # int64 [n], where their queries are
    longest: int  # the largest of their lengths
    prompts: tuple[tuple[int, int, int, int], ...]  # of the others: request, first token, tokens, length
    is_whole: bool  # whether every token is of one of them


def attend_qkv(
    library: ctypes.CDLL,
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
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: Tensor | None = None,
    settled: bool = False,
    **bounds: Any,
) -> tuple[Tensor, Tensor]:
    """As the reference's. Soft caps, caches of eight bits and heads that are no multiple of 32 are torch's.

    Raises:
        IndexError: lengths or starts that are none, or a slot or a block that is not in the cache; nothing was written
            unless it is a block.
    """
    batch = (query_start_loc, seq_lens, block_table, slot_mapping)
    has_window = sliding_window is None or sliding_window > 0
    is_ours = soft_cap is None and kv_scales is None and has_window and _fits(qkv, kv, q_gain, k_gain)
    if not (is_ours and is_float(qkv, kv, cos, sin, q_gain, k_gain)):
        form: dict[str, Any] = {
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "kv_scales": kv_scales,
        }
        heads: dict[str, Any] = {"cos": cos, "sin": sin, "q_gain": q_gain, "k_gain": k_gain, "eps": eps}
        return torch_attention.attend_qkv(kernels, qkv, kv, *batch, scale=scale, **form, **heads, **bounds)
    rows = rows_of(tuple(query_start_loc.tolist()), tuple(seq_lens.tolist()), qkv.shape[0])
    q = _turned(library, qkv, kv, slot_mapping, cos, sin, q_gain, k_gain, eps)
    out = torch.empty_like(q) if rows.is_whole else torch.zeros_like(q)
    _attend(library, q, out, kv, seq_lens, block_table, rows, scale, sliding_window)
    return out, kv


@lru_cache(maxsize=KEPT)
@torch.inference_mode(False)  # what is kept may be of use to who differentiates
def rows_of(starts: tuple[int, ...], lens: tuple[int, ...], num_tokens: int) -> Rows:
    """The rows of a step, by its query_start_loc and seq_lens."""
    queries = [end - start for start, end in pairwise(starts)]
    is_right = len(queries) == len(lens) and starts[0] >= 0 and starts[-1] <= num_tokens
    if not is_right or not all(
        n >= 0 <= length and (not length or n <= length) for n, length in zip(queries, lens, strict=True)
    ):
        raise IndexError(f"query_start_loc {starts} and seq_lens {lens} for {num_tokens} tokens")
    decodes = [r for r, length in enumerate(lens) if length and queries[r] == 1]
    prompts = [
        (r, starts[r], queries[r], length) for r, length in enumerate(lens) if length and queries[r] > 1
    ]
    return Rows(
        decodes=torch.tensor(decodes, dtype=torch.int64),
        tokens=torch.tensor([starts[r] for r in decodes], dtype=torch.int64),
        longest=max((lens[r] for r in decodes), default=0),
        prompts=tuple(prompts),
        is_whole=len(decodes) + sum(n for _, _, n, _ in prompts) == num_tokens,
    )


def _fits(qkv: Tensor, kv: Tensor, *gains: Tensor | None) -> bool:
    """Whether heads and blocks are of the shapes that the C code takes for granted."""
    _, planes, _, num_kv_heads, dim = kv.shape
    num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    return (
        planes == 2
        and dim % PANEL == 0
        and qkv.shape[1] % dim == 0
        and num_heads > 0
        and num_heads % num_kv_heads == 0
        and all(gain is None or gain.shape == (dim,) for gain in gains)
    )


def _turned(
    library: ctypes.CDLL,
    qkv: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
) -> Tensor:
    """Queries, turned; keys and values are in the cache then."""
    num_blocks, _, block_size, num_kv_heads, dim = kv.shape
    num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    q = qkv.new_empty(len(qkv), num_heads, dim)
    sizes = (len(qkv), num_heads, num_kv_heads, dim, num_blocks, block_size)
    angles = (len(qkv), dim // 2)
    if cos.shape != angles or sin.shape != angles or slot_mapping.shape != angles[:1]:
        raise IndexError(
            f"{tuple(cos.shape)} angles and {tuple(slot_mapping.shape)} slots for {len(qkv)} tokens"
        )
    slots = slot_mapping.to(torch.int64).contiguous()
    is_done = library.turn_and_write(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        None if q_gain is None else q_gain.data_ptr(),
        None if k_gain is None else k_gain.data_ptr(),
        slots.data_ptr(),
        q.data_ptr(),
        kv.data_ptr(),
        ctypes.byref(_Turning(*sizes, eps, torch.get_num_threads())),
    )
    if not is_done:
        raise IndexError(f"slot_mapping: {slots.tolist()} for {num_blocks} blocks of {block_size} slots")
    return q


def _attend(
    library: ctypes.CDLL,
    q: Tensor,
    out: Tensor,
    kv: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    rows: Rows,
    scale: float,
    sliding_window: int | None,
) -> None:
    """Write to out [tokens, heads, dim] what the queries of every request see."""
    num_blocks, _, block_size, num_kv_heads, dim = kv.shape
    table, lens = (x.to(torch.int32).contiguous() for x in (block_table, seq_lens))
    if len(table) < len(lens):
        raise IndexError(f"a block table of {len(table)} rows for {len(lens)} requests")
    addresses = (q.data_ptr(), kv.data_ptr(), out.data_ptr(), table.data_ptr())
    sizes = (q.shape[1], num_kv_heads, dim, num_blocks, block_size, table.shape[1])
    form = ctypes.byref(_Attention(*addresses, *sizes, sliding_window or 0, scale, torch.get_num_threads()))
    results = [library.attend_prompt(form, *prompt) for prompt in rows.prompts]
    if num_decodes := len(rows.decodes):
        which = (lens.data_ptr(), rows.decodes.data_ptr(), rows.tokens.data_ptr())
        results.append(library.attend_one_each(form, *which, num_decodes, rows.longest))
    if 0 in results:
        raise IndexError(
            f"block_table {tuple(table.shape)}: too few blocks, or one that is not of {num_blocks}"
        )
    if -1 in results:
        raise MemoryError("no memory for the scores of attention")
