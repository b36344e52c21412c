"""Writing into device state, in place: scattered entries, whole blocks, this step's keys and values.

Offsets into tables are 64 bits wide. A place outside the table is not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.kernels.triton.shared import (
    cdiv,
    check_rows,
    early_launch,
    in_bytes,
    next_power_of_2,
    stored,
    take_turn,
)

ENTRIES = 256  # of a scatter, per program


def write(table: Tensor, indices: tuple[Tensor, ...], values: Tensor) -> Tensor:
    """`table`, in which `table[indices] = values` was written. One to three indices.

    Raises:
        ValueError: the dimensions that are not indexed do not lie together in the table.
    """
    shape = torch.broadcast_shapes(*(index.shape for index in indices))  # type: ignore[no-untyped-call]
    inner = table.shape[len(indices) :]
    if not table[(0,) * len(indices)].is_contiguous():
        raise ValueError(
            f"write: entries of shape {tuple(inner)} of a table {tuple(table.shape)} with strides {table.stride()} "
            "do not lie together: call contiguous() first"
        )
    count = shape.numel() * inner.numel()
    if count == 0:
        return table
    leading = (1,) * (2 - len(shape)) + tuple(shape) if len(shape) < 2 else (shape[0], shape[1:].numel())
    values = values.expand(*shape, *inner).reshape(*leading, inner.numel())
    places = [index.expand(shape).reshape(leading) for index in indices]
    missing = 3 - len(places)
    places += places[:1] * missing
    sizes = (*table.shape[: len(indices)], *(1,) * missing)
    steps = (*table.stride()[: len(indices)], *(0,) * missing)
    strides = [stride for place in places for stride in place.stride()]
    _scatter[(cdiv(count, ENTRIES),)](
        table, values, *places, count, leading[1], inner.numel(), *sizes, *steps, *strides, *values.stride(),
        NUM_INDICES=len(indices), ENTRIES=ENTRIES,
    )  # fmt: skip
    return table


@triton.jit(
    do_not_specialize=[
        *("count", "columns", "inner", "size_0", "size_1", "size_2", "step_0", "step_1", "step_2"),
        *("row_0", "column_0", "row_1", "column_1", "row_2", "column_2", "row_v", "column_v", "inner_v"),
    ],
    do_not_specialize_on_alignment=["table", "values", "index_0", "index_1", "index_2"],
)
def _scatter(
    table, values, index_0, index_1, index_2, count, columns, inner, size_0, size_1, size_2, step_0, step_1, step_2,
    row_0, column_0, row_1, column_1, row_2, column_2, row_v, column_v, inner_v,
    NUM_INDICES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    exists = entry < count
    within = entry % inner
    column = entry // inner % columns
    row = entry // inner // columns
    value = tl.load(values + row * row_v + column * column_v + within * inner_v, mask=exists, other=0)
    place = tl.load(index_0 + row * row_0 + column * column_0, mask=exists, other=0).to(tl.int64)
    exists = exists & (place >= 0) & (place < size_0)
    offset = place * step_0 + within
    if NUM_INDICES > 1:
        place = tl.load(index_1 + row * row_1 + column * column_1, mask=exists, other=0).to(tl.int64)
        exists = exists & (place >= 0) & (place < size_1)
        offset += place * step_1
    if NUM_INDICES > 2:
        place = tl.load(index_2 + row * row_2 + column * column_2, mask=exists, other=0).to(tl.int64)
        exists = exists & (place >= 0) & (place < size_2)
        offset += place * step_2
    tl.store(table + offset, value.to(table.dtype.element_ty), mask=exists)


def embed(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of `weight` [vocab, hidden] by `ids` [n]: [n, hidden]; unspecified for an id outside the vocabulary."""
    out = weight.new_empty(*ids.shape, weight.shape[1])
    _move(weight, out, ids.reshape(-1), None)
    return out


def copy_blocks(kv: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """`kv`, in which `kv[target] = kv[source]` was written; all sources are read before."""
    blocks = _in_memory_order(in_bytes(kv))
    held = blocks.new_empty(source.shape[0], *blocks.shape[1:])
    _move(blocks, held, source, None)
    _move(held, blocks, None, target)
    return kv


def zero_blocks(kv: Tensor, blocks: Tensor) -> Tensor:
    """`kv`, in which `kv[blocks] = 0` was written."""
    target = _in_memory_order(in_bytes(kv))
    zeros = target.new_zeros(1, *target.shape[1:])
    _move(zeros.expand(blocks.shape[0], *target.shape[1:]), target, None, blocks)
    return kv


def _in_memory_order(kv: Tensor) -> Tensor:
    """The same entries, each with its dimensions as they follow each other in memory."""
    return kv.permute(0, *sorted(range(1, kv.dim()), key=kv.stride, reverse=True))


def _move(source: Tensor, target: Tensor, source_index: Tensor | None, target_index: Tensor | None) -> None:
    """target[target_index] = source[source_index]; without an index, entries in order."""
    for side in (source, target):
        if side.numel() and not side[0].is_contiguous():
            raise ValueError(
                f"entries of a tensor {tuple(side.shape)} with strides {side.stride()} do not lie together: "
                "call contiguous() first"
            )
    given = source_index if source_index is not None else target_index
    assert given is not None
    count, width = given.shape[0], target[0].numel() if len(target) else 0
    if count == 0 or width == 0:
        return
    block = min(next_power_of_2(width), 2048)
    _move_entries[(count, cdiv(width, block))](
        source, target, source_index, target_index, given.stride(0), source.shape[0], target.shape[0], width,
        source.stride(0), target.stride(0), BLOCK=block, **early_launch(),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["index_step", "num_sources", "num_targets"],
    do_not_specialize_on_alignment=["source_index", "target_index"],
)
def _move_entries(
    source, target, source_index, target_index, index_step, num_sources, num_targets, width, source_step,
    target_step, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    origin = entry
    if source_index is not None:
        origin = tl.load(source_index + entry * index_step).to(tl.int64)
    place = entry
    if target_index is not None:
        place = tl.load(target_index + entry * index_step).to(tl.int64)
    inside = (origin >= 0) & (origin < num_sources) & (place >= 0) & (place < num_targets)
    mask = column < tl.where(inside, width, 0)
    value = tl.load(source + origin * source_step + column, mask=mask, other=0)
    tl.store(target + place * target_step + column, value, mask=mask)


def write_kv(
    kv: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> Tensor:
    """`kv`, in which k and v [tokens, kv_heads, dim] were written at their slots, slot_mapping [tokens]."""
    num_tokens, num_heads, dim = k.shape
    if num_tokens == 0:
        return kv
    check_rows("write_kv", kv=kv, k=k, v=v)
    width = next_power_of_2(num_heads * dim)
    tokens = max(1, 2048 // width)
    _write_kv[(cdiv(num_tokens, tokens),)](
        kv, k, v, slot_mapping, kv_scales, num_tokens, kv.shape[0], *kv.stride()[:4], *k.stride()[:2], *v.stride()[:2],
        BLOCK_SIZE=kv.shape[2], HEADS=num_heads, DIM=dim, WIDTH=width, TOKENS=tokens,
    )  # fmt: skip
    return kv


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks"],
    do_not_specialize_on_alignment=["slot_mapping", "scales"],
)
def _write_kv(
    kv, k, v, slot_mapping, scales, num_tokens, num_blocks, kv_block, kv_plane, kv_slot, kv_head, k_token, k_head,
    v_token, v_head, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    exists = (slot >= 0) & (slot < num_blocks.to(tl.int64) * BLOCK_SIZE)
    element = tl.arange(0, WIDTH)
    head = (element // DIM)[None, :]
    within = (element % DIM)[None, :]
    mask = exists[:, None] & (element < HEADS * DIM)[None, :]
    token = token.to(tl.int64)[:, None]
    key = tl.load(k + token * k_token + head * k_head + within, mask=mask, other=0)
    value = tl.load(v + token * v_token + head * v_head + within, mask=mask, other=0)
    place = (slot // BLOCK_SIZE)[:, None] * kv_block + (slot % BLOCK_SIZE)[:, None] * kv_slot
    place = place + head * kv_head + within
    kv_dtype: tl.constexpr = kv.dtype.element_ty
    if scales is None:
        key, value = key.to(kv_dtype), value.to(kv_dtype)
    else:
        key, value = stored(key, scales, 0, kv_dtype), stored(value, scales, 1, kv_dtype)
    tl.store(kv + place, key, mask=mask)
    tl.store(kv + place + kv_plane, value, mask=mask)
