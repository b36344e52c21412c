"""Laying out batches of whole, chunked and packed sequences over blocks in any order, for tests of models."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.forward import compute_logits, model_forward
from purestep.pure.models.model import Model
from purestep.pure.records.inputs import AttentionMetadata, GroupMetadata, ModelInputs
from purestep.pure.records.params import Params

Chunk = tuple[int, int, int]  # sequence, first token, past the last token


@attrs.frozen
class Paging:
    """Where each sequence's blocks lie: block_table [sequences, blocks] over num_blocks blocks."""

    block_size: int
    block_table: Tensor
    num_blocks: int


def paging(lengths: Sequence[int], *, block_size: int = 4, seed: int = 0, spare: int = 1) -> Paging:
    """Blocks for sequences of these lengths, in random order, some never used, with stale table entries."""
    width = max(-(-length // block_size) for length in lengths) + spare
    num_blocks = 1 + width * len(lengths) + 2
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    table = order[: width * len(lengths)].view(len(lengths), width).to(torch.int32)
    return Paging(block_size=block_size, block_table=table, num_blocks=num_blocks)


def empty_cache(model: Model, where: Paging, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A KV cache full of NaN: whoever reads what was not written will be seen."""
    return tuple(
        torch.full(
            (where.num_blocks, 2, where.block_size, layer.num_kv_heads, layer.head_dim),
            torch.nan,
            dtype=dtype,
        )
        for layer in model.kv_layers
    )


def lay_out(
    ids: Sequence[Tensor],
    chunks: Sequence[Chunk],
    where: Paging,
    *,
    num_padding: int = 0,
    num_groups: int = 1,
) -> tuple[ModelInputs, AttentionMetadata]:
    """One step that runs the given chunks, and some padding tokens that point into the null block."""
    positions = torch.cat([torch.arange(a, b) for _, a, b in chunks])
    rows = torch.cat([torch.full((b - a,), sequence) for sequence, a, b in chunks])
    block = where.block_table[rows, positions // where.block_size].to(torch.int64)
    slots = block * where.block_size + positions % where.block_size
    padding = torch.zeros(num_padding, dtype=torch.int64)
    lengths = torch.tensor([0, *(b - a for _, a, b in chunks)])
    group = GroupMetadata(
        block_table=where.block_table[[sequence for sequence, _, _ in chunks]],
        slot_mapping=torch.cat((slots, padding)),
    )
    metadata = AttentionMetadata(
        query_start_loc=lengths.cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([b for _, _, b in chunks], dtype=torch.int32),
        groups=(group,) * num_groups,
        max_query_len=int(lengths.max()),
        max_seq_len=max(b for _, _, b in chunks),
    )
    inputs = ModelInputs(
        input_ids=torch.cat([*(ids[sequence][a:b] for sequence, a, b in chunks), padding]),
        positions=torch.cat((positions, padding)),
    )
    return inputs, metadata


def logits_of(
    model: Model,
    params: Params,
    ids: Sequence[Tensor],
    steps: Sequence[Sequence[Chunk]],
    where: Paging,
    dtype: torch.dtype,
    *,
    num_padding: int = 0,
    call: Callable[..., Any] | None = None,
) -> list[Tensor]:
    """Logits of every token of every sequence, [length, vocab] each, after running the steps one after another."""
    kv = empty_cache(model, where, dtype)
    how = {} if call is None else {"call": call}
    found: list[list[Tensor]] = [[] for _ in ids]
    for chunks in steps:
        inputs, metadata = lay_out(ids, chunks, where, num_padding=num_padding)
        hidden, kv = model_forward(model, params, inputs, kv, metadata, kernels=reference, **how)
        wanted = torch.arange(int(metadata.query_start_loc[-1]))
        logits = compute_logits(model, params, hidden, wanted, kernels=reference)
        for (sequence, _, _), part in zip(chunks, logits.split([b - a for _, a, b in chunks]), strict=True):
            found[sequence].append(part)
    return [torch.cat(parts) for parts in found]


def whole(lengths: Sequence[int]) -> list[list[Chunk]]:
    """All sequences in one step."""
    return [[(i, 0, length) for i, length in enumerate(lengths)]]


@st.composite
def chunkings(draw: st.DrawFn, lengths: Sequence[int]) -> list[list[Chunk]]:
    """Steps that run all sequences to their ends, by chunks of any size, any of them together, in any order."""
    done, steps = [0] * len(lengths), []
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        open_ones = [i for i, length in enumerate(lengths) if done[i] < length]
        chosen = draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        sizes = [draw(st.sampled_from([1, 1, 2, 5, 30])) for _ in chosen]
        ends = [min(done[i] + size, lengths[i]) for i, size in zip(chosen, sizes, strict=True)]
        steps.append([(i, done[i], end) for i, end in zip(chosen, ends, strict=True)])
        for i, end in zip(chosen, ends, strict=True):
            done[i] = end
    return steps
