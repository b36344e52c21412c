"""`prepare_inputs` and `build_attention_metadata`: a laid-out step, from the state alone."""

from purestep.kernels.types import Kernels
from purestep.pure.records.inputs import AttentionMetadata, GroupMetadata, StepInputs
from purestep.pure.records.state import StepState


def prepare_inputs(state: StepState, *, kernels: Kernels) -> StepInputs:
    """Lay out a step.

    Every input token is `token_ids[row, position]`; position is the row's computed length plus the token's place in
    the request's part of the batch. The host may not know the token: under asynchronous scheduling it was sampled a
    moment ago. Tokens of padding and of rows that run idle are given slots of block 0, which nothing reads: rows that
    are not active, and those that would go further than their known tokens, their blocks or the layout's bound. So a
    layout may be run again without a plan, and never gives a wrong token.
    A row whose history is longer than what will be computed after the step is discarded: its sample is not kept.
    Where the layout verifies drafts, those of the ledger follow the known tokens. How many there are the device alone
    may know: what a request was given beyond them becomes padding at the end of the batch.

    Source: vllm/v1/worker/gpu_model_runner.py _prepare_inputs.
    """
    layout = state.layout
    if layout.bounds.num_drafts:
        return _with_drafts(state, kernels)
    input_ids, positions, slot_mapping, seq_lens, logits_indices, discard = kernels.lay_out(
        kernels,
        layout.row_of_index,
        layout.query_start_loc,
        state.ledger.table,
        state.token_ids,
        state.block_tables,
        state.room,
        block_sizes=state.block_sizes,
        num_tokens=layout.bounds.num_tokens,
        max_seq_len=layout.bounds.max_seq_len,
    )
    return StepInputs(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start_loc=layout.query_start_loc,
        seq_lens=seq_lens,
        logits_indices=logits_indices,
        discard=discard,
    )


def _with_drafts(state: StepState, kernels: Kernels) -> StepInputs:
    """The same where drafts are verified: 1 + drafts rows of logits a request."""
    layout, drafts = state.layout, state.ledger.drafts
    num_drafts = layout.bounds.num_drafts
    assert drafts is not None and num_drafts <= drafts.shape[1], (
        f"no place in the ledger for {num_drafts} drafts"
    )
    input_ids, positions, slot_mapping, query_start_loc, seq_lens, logits_indices, discard, verified = (
        kernels.lay_out_drafts(
            kernels,
            layout.row_of_index,
            layout.query_start_loc,
            state.ledger.table,
            drafts[:, :num_drafts],
            state.token_ids,
            state.block_tables,
            state.room,
            block_sizes=state.block_sizes,
            num_tokens=layout.bounds.num_tokens,
            max_seq_len=layout.bounds.max_seq_len,
        )
    )
    return StepInputs(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        logits_indices=logits_indices,
        discard=discard,
        drafts=verified,
    )


def build_attention_metadata(state: StepState, inputs: StepInputs, *, kernels: Kernels) -> AttentionMetadata:
    """Lengths, and per KV group the block tables of the batch in order, cut to what the bounds can need.

    Source: vllm/v1/worker/gpu_model_runner.py _build_attention_metadata.
    """
    bounds, rows = state.layout.bounds, state.layout.row_of_index
    groups = []
    for group, (table, size) in enumerate(zip(state.block_tables, state.block_sizes, strict=True)):
        num_blocks = min(-(-bounds.max_seq_len // size), table.shape[1])
        (own,) = kernels.take_rows((table[:, :num_blocks],), rows)
        groups.append(GroupMetadata(own, inputs.slot_mapping[group]))
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        groups=tuple(groups),
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        kv_scales=state.kv_scales,
    )
