"""Logits as a batch's rules and processors leave them, before anything is drawn.

Where drafts are verified a request has several rows of logits. Each is constrained as a request with that history
would be: known tokens, and the drafts before.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.records.logits_processor import History
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.sampling_rows import BatchParams, TokenConstraints
from purestep.pure.records.state import StepState


def constrain(
    state: StepState, params: BatchParams, logits: Tensor, extras: SamplingExtras, kernels: Kernels
) -> Tensor:
    """Logits after everything that comes before temperature."""
    shape, lengths = state.layout.bounds.sampler, params.num_known_tokens
    if shape.penalties or shape.constraints:
        prompt_lengths = lengths - params.num_output_tokens
        history = _history(state, params)
    if shape.constraints and state.sampling.constraints is not None:
        rules = _by_logits(state, params.num_places, state.sampling.constraints)
        restricted = _named(rules.allowed_row, len(logits))
        logits = kernels.allow_only(logits, restricted, rules.allowed_row, rules.allowed_ids)
        logits = kernels.ban_bad_words(logits, history, prompt_lengths, lengths, rules.words_row, rules.words)
        logits = _ban_until_min_tokens(params, rules, logits, kernels)
        logits = kernels.add_bias(logits, rules.bias_row, rules.bias_ids, rules.bias_values)
    elif shape.min_tokens:
        logits = _ban_until_min_tokens(params, None, logits, kernels)
    logits = process(state, params, logits, extras, argmax_invariant=False)
    if shape.penalties:
        weights = (params["repetition_penalty"], params["frequency_penalty"], params["presence_penalty"])
        logits = kernels.penalize(logits, history, prompt_lengths, lengths, *weights)
    return logits


def process(
    state: StepState, params: BatchParams, logits: Tensor, extras: SamplingExtras, *, argmax_invariant: bool
) -> Tensor:
    """Logits as the processors of one of the two places leave them: each sees the rows of those who chose it."""
    for processor in extras.processors:
        if processor.argmax_invariant is argmax_invariant:
            index = processor.index
            lengths = params.num_known_tokens[index]
            tokens = _history(state, params)[index]
            place = torch.arange(tokens.shape[1], device=tokens.device)
            history = History(
                token_ids=torch.where(place < lengths[:, None], tokens, 0),
                prompt_lengths=lengths - params.num_output_tokens[index],
                lengths=lengths,
            )
            own = logits[index].to(torch.promote_types(logits.dtype, torch.float32))
            changed = processor.apply(own, history, processor.params)
            logits = logits.index_copy(0, index, changed.to(logits.dtype))
    return logits


def _history(state: StepState, params: BatchParams) -> Int[Tensor, "logits width"]:
    """Known tokens and the drafts behind them, as far as any entry of the tapes may be one of these."""
    width = min(state.layout.bounds.max_seq_len, state.token_ids.shape[1])
    tokens = state.token_ids[state.layout.row_of_index, :width]
    if params.drafts is None:
        return tokens
    place = torch.arange(width, device=tokens.device) - params.num_known_tokens[:: params.num_places, None]
    num_drafts = params.drafts.shape[1]
    drafts = params.drafts.gather(1, place.clamp(0, num_drafts - 1).to(torch.int64))
    is_draft = (place >= 0) & (place < num_drafts) & (drafts >= 0)
    return torch.where(is_draft, drafts, tokens).repeat_interleave(params.num_places, 0)


def _by_logits(state: StepState, num_places: int, rules: TokenConstraints) -> TokenConstraints:
    """The rules with places among the batch's rows of logits where they name rows: -1 for those that do not run."""
    index_of_row = _index_of_row(state.layout.row_of_index, state.sampling.table.shape[0])
    place = torch.arange(num_places, device=index_of_row.device, dtype=torch.int32)

    def index(rows: Tensor) -> Tensor:
        own = index_of_row[rows][:, None]
        return torch.where(own < 0, -1, own * num_places + place).flatten()

    def values(entries: Tensor) -> Tensor:
        return entries if num_places == 1 else entries.repeat_interleave(num_places, 0)

    return TokenConstraints(
        bias_row=index(rules.bias_row),
        bias_ids=values(rules.bias_ids),
        bias_values=values(rules.bias_values),
        allowed_row=index(rules.allowed_row),
        allowed_ids=values(rules.allowed_ids),
        words_row=index(rules.words_row),
        words=values(rules.words),
        stop_row=index(rules.stop_row),
        stop_ids=values(rules.stop_ids),
    )


def _ban_until_min_tokens(
    params: BatchParams, rules: TokenConstraints | None, logits: Tensor, kernels: Kernels
) -> Tensor:
    short = params.num_output_tokens < params["min_tokens"]
    logits = kernels.ban_tokens(logits, params.banned_ids, short)
    if rules is None:
        return logits
    values = torch.where(short[rules.stop_row], float("-inf"), -0.0)
    return kernels.add_bias(logits, rules.stop_row, rules.stop_ids, values)  # type: ignore[no-any-return]


def _index_of_row(rows: Tensor, num_rows: int) -> Tensor:
    """The place in the batch of every row, -1 for those that do not run."""
    index = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    return rows.new_full((num_rows,), -1).scatter(0, rows.to(torch.int64), index)


def _named(index: Tensor, num_rows: int) -> Tensor:
    """Bool [rows]: which rows of logits occur in `index`; negative entries name none."""
    place = torch.where(index < 0, num_rows, index).to(torch.int64)
    return torch.zeros(num_rows + 1, dtype=torch.bool, device=index.device).scatter(0, place, True)[:num_rows]
