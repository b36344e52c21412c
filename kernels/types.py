"""`Kernels`: the functions of tensors that a step is made of, as one frozen value.

`reference` is the definition: plain torch, out of place, differentiable, vmappable, any device. The donating sets, one
for the CPU and one for CUDA, mean the same up to rounding; where "donates" is said below they write their argument's
storage. A stage never asks which it was given.
"""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from purestep.kernels.record import record


@runtime_checkable
class Attend(Protocol):
    """Write this step's keys and values, then attend over each request's blocks. Donates `kv`.

    q [tokens, heads, dim]; k, v [tokens, kv_heads, dim]; kv [blocks, 2, block_size, kv_heads, dim]; query_start_loc
    int32 [reqs+1]; seq_lens int32 [reqs], after this step's tokens, 0 for a row that attends to nothing (its output
    is 0, never NaN); block_table int32 [reqs, blocks of a request]; slot_mapping int64 [tokens] (padding points into
    block 0, which nothing reads). max_query_len and max_seq_len bound shapes and never change results. A query
    attends causally to the last `sliding_window` positions, itself included; scores are soft_cap * tanh(s / soft_cap)
    where a soft cap is given. kv_scales float32 [2] are those of keys and values in a cache of float8_e4m3fn, which
    has some where no other has any: x is stored as x / scale, cut off at 448, and read as stored * scale. Returns out
    [tokens, heads, dim] and kv. Query tokens past query_start_loc[-1] are padding: their output is 0.
    """

    def __call__(
        self,
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
    ) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class Function(Protocol):
    """Any other kernel: tensors in, tensors out; the reference's docstring is its specification."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@record(static=True)
class Kernels:
    """One set of kernels. Every function is defined, with shapes, by its namesake in `kernels/reference`."""

    # the ends of a step; each is given the set itself first, and is defined by the set's other functions
    lay_out: Function  # (kernels, row_of_index, query_start_loc, ledger, token_ids, ...) -> inputs
    advance: Function  # (kernels, ledger, token_ids, ...) -> ledger, token_ids, ...; donates both
    lay_out_drafts: (
        Function  # (kernels, row_of_index, query_start_loc, ledger, drafts, token_ids, ...) -> inputs
    )
    advance_drafts: Function  # as advance, of drafts too and several tokens a request; donates all three
    put_drafts: (
        Function  # (kernels, ledger, drafts, row_of_index, seq_lens, sampled, proposed, ...); donates drafts
    )
    ragged_index: Function  # (query_start_loc, num_tokens) -> index, offset
    take_rows: Function  # (tables, rows) -> of each table the rows
    # state leaves
    write: Function  # (table, indices, values) -> table; donates table
    copy_blocks: Function  # (kv, source, target) -> kv; donates kv
    zero_blocks: Function  # (kv, blocks) -> kv; donates kv
    scales_of: Function  # (k, v, exists) -> scales of a cache of eight bits, float32 [2]
    # model
    prepare: Function  # (weight) -> what linear and embed of the same set take in its place
    embed: Function  # (weight, ids) -> hidden
    linear: Function  # (x, weight, bias) -> y
    rms_norm: Function  # (x, weight, eps) -> y
    add_rms_norm: Function  # (x, residual, weight, eps) -> y, x + residual
    angles: Function  # (positions, head_dim, theta, scaling, dtype) -> cos, sin
    rotate: Function  # (q, k, cos, sin) -> q, k
    silu_and_mul: Function  # (gate_up) -> silu(gate) * up
    attend: Attend
    # parts of a layer in one pass; each is given the set itself first, and is defined by the set's other functions;
    # the norm is that of x + residual
    norm_linear: Function  # (kernels, x, residual, gain, eps, weight, bias) -> linear of it, x + residual
    norm_gate_up: Function  # (kernels, x, residual, gain, eps, weight) -> silu(gate) * up of it, x + residual
    logits: Function  # (kernels, x, weight) -> linear in float32 or wider
    attend_qkv: Function  # (kernels, qkv, kv, ...) -> out, kv: normed and turned heads attend; donates kv
    # sampling
    uniforms: Function  # (seed, stream, output_index, purpose, width) -> float32 [reqs, width] in (0, 1)
    apply_grammar_bitmask: Function  # (logits, bitmask, mask_of_row) -> logits; donates logits
    allow_only: Function  # (logits, row_mask, index, ids) -> logits
    ban_bad_words: Function  # (logits, history, prompt_lengths, lengths, index, words) -> logits
    ban_tokens: Function  # (logits, ids, active) -> logits
    add_bias: Function  # (logits, index, ids, values) -> logits
    penalize: (
        Function  # (logits, history, prompt_lengths, lengths, repetition, frequency, presence) -> logits
    )
    scale_by_temperature: Function  # (logits, temperature) -> logits, relative to each row's largest
    temperature_offset: Function  # (logits, temperature) -> what the line above took away
    truncate: Function  # (logits, top_k, top_p, min_p) -> logits with -inf where cut
    greedy: Function  # (logits) -> ids
    draw: Function  # (logits, exponential) -> ids
    # given the set itself first, and defined by its other functions
    exponentials: (
        Function  # (kernels, seed, stream, output_index, purpose, width) -> Exp(1) noise [reqs, width]
    )
    choose: Function  # (kernels, logits, temperature, top_k, ...) -> ids, ids of the largest: greedy or drawn
    judge: Function  # (kernels, logits, best, processed, ids, ...) -> ids, stops, has_nan
    gather_logprobs: Function  # (logprobs, ids, num_logprobs) -> ids, logprobs, ranks
    score: Function  # (logits, ids, num_logprobs) -> ids, logprobs, ranks, what logits were lowered by
    score_hidden: Function  # (kernels, x, weight, ids, num_logprobs) -> the first three, of logits of x
    gather_ids: Function  # (logprobs, ids) -> logprobs
    # speculation
    verify_greedy: Function  # (best, drafts, is_unsound) -> tokens [reqs, k + 1], -1 behind the last; has_nan
    count_accepted: Function  # (logits, drafts, num_drafts, draft_probs, uniform) -> accepted
    draw_last: Function  # (logits, drafts, num_drafts, accepted, draft_probs, exponential) -> ids
    propose_ngram: Function  # (token_ids, rows, lengths, room, ...) -> drafts
