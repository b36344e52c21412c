"""`prepare_inputs` and `build_attention_metadata`: a laid-out step, from the state alone."""

import torch

from purestep.kernels.types import Kernels
from purestep.pure.records.inputs import AttentionMetadata, GroupMetadata, StepInputs
from purestep.pure.records.state import StepState


def prepare_inputs(state: StepState, *, kernels: Kernels) -> StepInputs:
    """Lay out a step.

    Every input token is `token_ids[row, position]`; position is the row's computed length plus the token's place in
    the request's part of the batch. The host may not know the token: under asynchronous scheduling it was sampled a
    moment ago. Tokens of padding and of rows that are not active are given slots of block 0, which nothing reads.
    A row whose history is longer than what will be computed after the step is discarded: its sample is not kept.

    Source: vllm/v1/worker/gpu_model_runner.py _prepare_inputs.
    """
    layout, ledger = state.layout, state.ledger
    start_loc, num_tokens = layout.query_start_loc, layout.bounds.num_tokens
    index, offset = kernels.ragged_index(start_loc, num_tokens)
    row = layout.row_of_index[index]
    position = ledger.num_computed_tokens[row] + offset
    position = position.clamp(max=state.token_ids.shape[1] - 1)
    token = torch.arange(num_tokens, device=start_loc.device)
    writes = ledger.active[row] & (token < start_loc[-1])
    slots = []
    for table, size in zip(state.block_tables, state.block_sizes, strict=True):
        place = torch.clamp(position // size, max=table.shape[1] - 1)
        block = torch.where(writes, table[row, place], 0)
        slots.append(block.to(torch.int64) * size + position % size)
    rows = layout.row_of_index
    active, computed = ledger.active[rows], ledger.num_computed_tokens[rows]
    end = computed + start_loc.diff()
    return StepInputs(
        input_ids=state.token_ids[row, position],
        positions=position,
        slot_mapping=torch.stack(slots),
        query_start_loc=start_loc,
        seq_lens=torch.where(active, end, 0).to(torch.int32),
        logits_indices=(start_loc[1:] - 1).clamp(min=0),
        discard=~active | (end < ledger.num_known_tokens[rows]),
    )


def build_attention_metadata(state: StepState, inputs: StepInputs) -> AttentionMetadata:
    """Lengths, and per KV group the block tables of the batch in order, cut to what the bounds can need.

    Source: vllm/v1/worker/gpu_model_runner.py _build_attention_metadata.
    """
    bounds, rows = state.layout.bounds, state.layout.row_of_index
    groups = []
    for group, (table, size) in enumerate(zip(state.block_tables, state.block_sizes, strict=True)):
        num_blocks = min(-(-bounds.max_seq_len // size), table.shape[1])
        groups.append(GroupMetadata(table[rows, :num_blocks], inputs.slot_mapping[group]))
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        groups=tuple(groups),
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
    )
