"""`sample_tokens`: from logits to one token a request, and its log-probabilities."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from purestep.kernels.record import record
from purestep.kernels.types import Kernels
from purestep.pure.errors import ExtrasError
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.logits_processor import History
from purestep.pure.records.outputs import KeptMass, LogprobsTensors, SampledTokens
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.sampling_params import GREEDY_BELOW, LOGPROBS_MODES
from purestep.pure.records.sampling_rows import FLOATS, INTS, TokenConstraints
from purestep.pure.records.state import ExecuteModelState, StepState

NOTHING = SamplingExtras()
DRAW = 0  # the purpose of the noise that picks a token; drafts and their acceptance have others


@record
class BatchParams:
    """Sampling parameters and lengths of the batch's rows, in the order of the batch."""

    floats: Float[Tensor, "reqs floats"]  # FLOATS
    ints: Int[Tensor, "reqs ints"]  # INTS
    banned_ids: Int[Tensor, "reqs ids"]  # until min_tokens; the first num_stop_ids of them stop the row
    num_known_tokens: Int[Tensor, " reqs"]
    num_output_tokens: Int[Tensor, " reqs"]

    def __getitem__(self, name: str) -> Tensor:
        """One parameter of all requests."""
        return self.floats[:, FLOATS.index(name)] if name in FLOATS else self.ints[:, INTS.index(name)]


def batch_params(state: StepState) -> BatchParams:
    """What sampling needs to know of each request of the batch."""
    rows = state.layout.row_of_index
    words = state.sampling.table.index_select(0, rows)
    return BatchParams(
        floats=state.sampling.floats.index_select(0, rows),
        ints=words[:, : len(INTS)],
        banned_ids=words[:, len(INTS) :],
        num_known_tokens=state.ledger.num_known_tokens.index_select(0, rows),
        num_output_tokens=state.ledger.num_output_tokens.index_select(0, rows),
    )


def sample_tokens(
    executed: ExecuteModelState,
    *,
    kernels: Kernels,
    exponential: Float[Tensor, "reqs vocab"] | None = None,
    extras: SamplingExtras | None = None,
) -> SampledTokens:
    """One token for every request of the batch, kept or not.

    The order is upstream's: raw log-probabilities; allowed ids, bad words, min_tokens, bias, logits processors,
    penalties; temperature, argmax-invariant processors, min-p, top-k, top-p; the draw. Greedy rows take the largest
    logit of what stands before temperature. A row's noise is a function of its seed, stream and output index alone;
    `exponential` puts given Exp(1) draws in its place. Rows whose logits hold NaN or +inf have no distribution and are
    flagged, as are those whose rules leave no token; -inf is how a model forbids one.

    Raises:
        ExtrasError: a batch with logits processors or chosen ids, and no `extras`.
    Source: vllm/v1/sample/sampler.py.
    """
    assert executed.logits is not None
    state, logits = executed.state, executed.logits
    shape, params = state.layout.bounds.sampler, batch_params(state)
    extras = _checked(shape, extras)
    processed = _constrained(state, params, logits, extras, kernels)
    best = kernels.greedy(logits)
    peak = logits.gather(-1, best[:, None])[:, 0]  # NaN if any logit is, else +inf if any is
    tokens = best if processed is logits else kernels.greedy(processed)
    left = processed.gather(-1, tokens[:, None])[:, 0]  # -inf if nothing is allowed any more
    final = whole = processed
    if shape.random:
        whole = kernels.scale_by_temperature(processed, params["temperature"])
        final = whole = _process(state, params, whole, extras, argmax_invariant=True)
        if shape.truncated:
            final = kernels.truncate(final, params["top_k"], params["top_p"], params["min_p"])
        noise = _exponential(params, logits.shape[-1], kernels) if exponential is None else exponential
        drawn = kernels.draw(final, noise.to(final.dtype))
        is_greedy = params["temperature"] < GREEDY_BELOW
        if extras.processors:  # those behind temperature may leave a row no token either
            left = torch.where(is_greedy, left, final.gather(-1, drawn[:, None])[:, 0].to(left.dtype))
        tokens = torch.where(is_greedy, tokens, drawn)
    place = torch.arange(params.banned_ids.shape[1], device=tokens.device)
    is_stop = (params.banned_ids == tokens[:, None]) & (place < params["num_stop_ids"][:, None])
    logprobs, id_logprobs = _logprobs(shape, params, (logits, processed, final), tokens, extras, kernels)
    return SampledTokens(
        token_ids=tokens.to(torch.int32),
        stops=is_stop.any(-1) & (params.num_output_tokens + 1 >= params["min_tokens"]),
        has_nan=~((peak < float("inf")) & (left > float("-inf"))),
        logprobs_tensors=logprobs,
        id_logprobs=id_logprobs,
        kept_mass=_kept_mass(whole, final, tokens) if shape.kept_mass else None,
    )


def _checked(shape: SamplerShape, extras: SamplingExtras | None) -> SamplingExtras:
    if shape.extras and extras is None:
        raise ExtrasError(
            "the batch has requests with logits_processors or logprob_token_ids, and sampling was not given them: run "
            "execute, then sample(executed, kernels=kernels, extras=sampling_extras(batch).to(device))"
        )
    return NOTHING if extras is None else extras


def _constrained(
    state: StepState, params: BatchParams, logits: Tensor, extras: SamplingExtras, kernels: Kernels
) -> Tensor:
    """Logits after everything that comes before temperature."""
    shape, rows = state.layout.bounds.sampler, state.layout.row_of_index
    lengths = params.num_known_tokens
    prompt_lengths = lengths - params.num_output_tokens
    if shape.penalties or shape.constraints:
        history = state.token_ids[rows, : _width(state)]
    if shape.constraints and state.sampling.constraints is not None:
        rules = state.sampling.constraints
        index_of_row = _index_of_row(rows, state.sampling.table.shape[0])
        allowed_index = index_of_row[rules.allowed_row]
        restricted = _named(allowed_index, len(rows))
        logits = kernels.allow_only(logits, restricted, allowed_index, rules.allowed_ids)
        words_index = index_of_row[rules.words_row]
        logits = kernels.ban_bad_words(logits, history, prompt_lengths, lengths, words_index, rules.words)
        logits = _ban_until_min_tokens(params, rules, index_of_row, logits, kernels)
        logits = kernels.add_bias(logits, index_of_row[rules.bias_row], rules.bias_ids, rules.bias_values)
    elif shape.min_tokens:
        logits = _ban_until_min_tokens(params, None, None, logits, kernels)
    logits = _process(state, params, logits, extras, argmax_invariant=False)
    if shape.penalties:
        weights = (params["repetition_penalty"], params["frequency_penalty"], params["presence_penalty"])
        logits = kernels.penalize(logits, history, prompt_lengths, lengths, *weights)
    return logits


def _process(
    state: StepState, params: BatchParams, logits: Tensor, extras: SamplingExtras, *, argmax_invariant: bool
) -> Tensor:
    """Logits as the processors of one of the two places leave them: each sees the rows of those who chose it."""
    for processor in extras.processors:
        if processor.argmax_invariant is argmax_invariant:
            index = processor.index
            lengths = params.num_known_tokens[index]
            tokens = state.token_ids[state.layout.row_of_index[index], : _width(state)]
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


def _width(state: StepState) -> int:
    """Entries of the tapes that may be known tokens."""
    return min(state.layout.bounds.max_seq_len, state.token_ids.shape[1])


def _ban_until_min_tokens(
    params: BatchParams,
    rules: TokenConstraints | None,
    index_of_row: Tensor | None,
    logits: Tensor,
    kernels: Kernels,
) -> Tensor:
    short = params.num_output_tokens < params["min_tokens"]
    logits = kernels.ban_tokens(logits, params.banned_ids, short)
    if rules is None or index_of_row is None:
        return logits
    index = index_of_row[rules.stop_row]
    values = torch.where(short[index], float("-inf"), -0.0)
    return kernels.add_bias(logits, index, rules.stop_ids, values)  # type: ignore[no-any-return]


def _index_of_row(rows: Tensor, num_rows: int) -> Tensor:
    """The place in the batch of every row, -1 for those that do not run."""
    index = torch.arange(len(rows), device=rows.device)
    return torch.full((num_rows,), -1, device=rows.device).scatter(0, rows.to(torch.int64), index)


def _named(index: Tensor, num_reqs: int) -> Tensor:
    """Bool [reqs]: which requests occur in `index`; negative entries name nobody."""
    place = torch.where(index < 0, num_reqs, index)
    return torch.zeros(num_reqs + 1, dtype=torch.bool, device=index.device).scatter(0, place, True)[:num_reqs]


def _exponential(params: BatchParams, vocab: int, kernels: Kernels) -> Tensor:
    """Exp(1) noise of the batch's draws: float32 [reqs, vocab]."""
    seed = params["seed_low"].to(torch.int64) & 0xFFFFFFFF | params["seed_high"].to(torch.int64) << 32
    stream = params["stream_low"].to(torch.int64) & 0xFFFFFFFF | params["stream_high"].to(torch.int64) << 32
    uniform = kernels.uniforms(seed, stream, params.num_output_tokens, purpose=DRAW, width=vocab)
    return -uniform.log()  # type: ignore[no-any-return]


def _kept_mass(whole: Tensor, final: Tensor, tokens: Tensor) -> KeptMass:
    """Of logits before and after the cuts, [reqs, vocab]."""
    dtype = torch.promote_types(final.dtype, torch.float32)
    is_cut = (final == float("-inf")) & (whole > float("-inf"))
    kept = torch.where(is_cut, float("-inf"), whole.log_softmax(-1, dtype=dtype)).logsumexp(-1)
    drawn = final.log_softmax(-1, dtype=dtype).gather(-1, tokens[:, None].to(torch.int64))[:, 0]
    return KeptMass(drawn_logprobs=drawn, log_mass=torch.where(is_cut.any(-1), kept, 0.0))


def _logprobs(
    shape: SamplerShape,
    params: BatchParams,
    logits_on_the_way: tuple[Tensor, Tensor, Tensor],
    tokens: Tensor,
    extras: SamplingExtras,
    kernels: Kernels,
) -> tuple[LogprobsTensors | None, Tensor | None]:
    """Values of the sampled and the likeliest tokens, and of chosen ids, each row by its own mode.

    `logits_on_the_way` are those of the model, those that temperature was applied to, and those drawn from.
    """
    if shape.num_logprobs is None and extras.token_ids is None:
        return None, None
    logits, processed, final = logits_on_the_way
    values = None
    for mode in shape.logprobs_modes:
        own = logits if mode.startswith("raw") else final
        if mode.endswith("logprobs"):
            own = own.log_softmax(-1)
        elif mode == "processed_logits" and shape.random:
            own = own + kernels.temperature_offset(processed, params["temperature"])
        wanted = params["logprobs_mode"] == LOGPROBS_MODES.index(mode)
        values = own if values is None else torch.where(wanted[:, None], own, values)
    of_ids = None if extras.token_ids is None else kernels.gather_ids(values, extras.token_ids)
    if shape.num_logprobs is None:
        return None, of_ids
    return LogprobsTensors(*kernels.gather_logprobs(values, tokens, shape.num_logprobs)), of_ids
