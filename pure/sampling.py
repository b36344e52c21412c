"""`sample_tokens`: from logits to one token a request, and its log-probabilities."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from purestep.kernels.record import record, replace
from purestep.kernels.types import Kernels
from purestep.pure.constrain import constrain, process
from purestep.pure.errors import ExtrasError
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.noise import DRAW
from purestep.pure.records.outputs import KeptMass, LogprobsTensors, SampledTokens
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.sampling_params import GREEDY_BELOW, LOGPROBS_MODES
from purestep.pure.records.sampling_rows import INTS, BatchParams
from purestep.pure.records.state import ExecuteModelState, StepState
from purestep.pure.verify import verified_by_chance, verified_greedily

NOTHING = SamplingExtras()


def batch_params(state: StepState, *, kernels: Kernels, num_places: int = 1) -> BatchParams:
    """What sampling needs to know of each request of the batch, once for each of its `num_places` rows of logits."""
    rows = state.layout.row_of_index
    if num_places > 1:
        rows = rows.repeat_interleave(num_places)
    sampling, ledger = state.sampling, state.ledger
    words, floats, num_known_tokens, num_output_tokens = kernels.take_rows(
        (sampling.table, sampling.floats, ledger.num_known_tokens, ledger.num_output_tokens), rows
    )
    return BatchParams(
        floats=floats,
        ints=words[:, : len(INTS)],
        banned_ids=words[:, len(INTS) :],
        num_known_tokens=num_known_tokens,
        num_output_tokens=num_output_tokens,
    )


def _params_at_places(params: BatchParams, drafts: Int[Tensor, "reqs drafts"]) -> BatchParams:
    """The same of 1 + drafts rows of logits each, counting the drafts before; behind the last nothing changes."""
    place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    ahead = torch.minimum(place, (drafts >= 0).sum(-1, keepdim=True)).flatten().to(torch.int32)
    return replace(
        params,
        num_known_tokens=params.num_known_tokens + ahead,
        num_output_tokens=params.num_output_tokens + ahead,
        drafts=drafts,
    )


def sample_tokens(
    executed: ExecuteModelState,
    *,
    kernels: Kernels,
    exponential: Float[Tensor, "reqs vocab"] | None = None,
    extras: SamplingExtras | None = None,
) -> SampledTokens:
    """One token for every request of the batch, kept or not; where drafts are verified, those that stand before it.

    The order is upstream's: raw log-probabilities; allowed ids, bad words, min_tokens, bias, logits processors,
    penalties; temperature, argmax-invariant processors, min-p, top-k, top-p; the draw. Greedy rows take the largest
    logit of what stands before temperature. A row's noise is a function of its seed, stream and output index alone;
    `exponential` puts given Exp(1) draws in its place where no drafts are verified. Rows whose logits hold NaN or +inf
    have no distribution and are flagged, as are those whose rules leave no token; -inf is how a model forbids one.

    Raises:
        ExtrasError: a batch with logits processors or chosen ids, and no `extras`.
    Source: vllm/v1/sample/sampler.py.
    """
    assert executed.logits is not None
    state, logits, extras = executed.state, executed.logits, _checked(executed.state, extras)
    drafts, shape = executed.inputs.drafts, state.layout.bounds.sampler
    params = batch_params(state, kernels=kernels, num_places=1 if drafts is None else 1 + drafts.shape[1])
    if drafts is not None:
        return _verified(executed, _params_at_places(params, drafts), extras, kernels)
    processed = constrain(state, params, logits, extras, kernels)
    picked = _pick(state, params, processed, extras, exponential, kernels)
    token_ids, stops, has_nan = _judge(params, logits, processed, picked, kernels)
    on_the_way = (logits, processed, picked.final)
    logprobs, id_logprobs = _logprobs(shape, params, on_the_way, picked.tokens, extras, kernels)
    return SampledTokens(
        token_ids=token_ids,
        stops=stops,
        has_nan=has_nan,
        logprobs_tensors=logprobs,
        id_logprobs=id_logprobs,
        kept_mass=_kept_mass(picked.whole, picked.final, picked.tokens) if shape.kept_mass else None,
    )


@record
class Picked:
    """The tokens of a batch's rows of logits, and what they were picked from."""

    tokens: Int[Tensor, " logits"]
    best: Int[Tensor, " logits"] | None  # ids of the largest processed logits, where they were looked for
    chosen_from: Float[Tensor, "logits vocab"]  # -inf where the rules forbid a token
    whole: Float[Tensor, "logits vocab"]  # at temperature, before the cuts
    final: Float[Tensor, "logits vocab"]  # after them


def _pick(
    state: StepState,
    params: BatchParams,
    processed: Tensor,
    extras: SamplingExtras,
    exponential: Tensor | None,
    kernels: Kernels,
) -> Picked:
    """The token of every row of logits: the largest, or drawn with the noise of its output index."""
    shape = state.layout.bounds.sampler
    if not shape.random:
        tokens = kernels.greedy(processed)
        return Picked(tokens, tokens, processed, processed, processed)
    if exponential is None and _needs_no_distribution(shape, extras):
        return Picked(*_choose(shape, params, processed, kernels), processed, processed, processed)
    whole, final = _drawn_from(state, params, processed, extras, kernels)
    noise = _exponential(params, processed.shape[-1], kernels) if exponential is None else exponential
    is_greedy = params["temperature"] < GREEDY_BELOW
    tokens = torch.where(is_greedy, kernels.greedy(processed), kernels.draw(final, noise.to(final.dtype)))
    chosen_from = processed
    if extras.processors:  # those behind temperature may leave a row no token either
        chosen_from = torch.where(is_greedy[:, None], processed, final.to(processed.dtype))
    return Picked(tokens, None, chosen_from, whole, final)


def _judge(
    params: BatchParams, logits: Tensor, processed: Tensor, picked: Picked, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens as int32, whether they stop their rows, and whether the rows of logits had no distribution."""
    is_best = picked.best is not None and processed is logits
    return kernels.judge(  # type: ignore[no-any-return]
        kernels,
        logits,
        picked.best if is_best else kernels.greedy(logits),
        picked.chosen_from,
        picked.tokens,
        params.banned_ids,
        params["num_stop_ids"],
        params["min_tokens"],
        params.num_output_tokens,
    )


def _verified(
    executed: ExecuteModelState, params: BatchParams, extras: SamplingExtras, kernels: Kernels
) -> SampledTokens:
    """The drafts that stand and the token behind them, of every request.

    Each is judged by the row of logits before it, made for sampling as if the drafts before were no guesses. A draft
    without stated probabilities stands if it is the token that a plain step would pick at its place: so drafts change
    how many tokens a step keeps, and nothing else. With probabilities, random requests keep their distribution.
    """
    state, logits, drafts = executed.state, executed.logits, params.drafts
    assert logits is not None and drafts is not None
    shape, num_places = state.layout.bounds.sampler, params.num_places
    extras = _at_every_place(extras, num_places)

    def by_request(values: Tensor) -> Tensor:
        return values.view(-1, num_places, *values.shape[1:])

    processed = constrain(state, params, logits, extras, kernels)
    rates, uniforms = state.acceptance_rates, partial(_uniforms, params, kernels)
    by_chance = shape.random and (state.draft_probs is not None or bool(rates))
    if by_chance:
        whole, final = _drawn_from(state, params, processed, extras, kernels)
        is_greedy = params["temperature"] < GREEDY_BELOW
        left = torch.where(is_greedy, processed.amax(-1), final.amax(-1).to(processed.dtype))
        picked, stops = kernels.greedy(processed), None
        is_unsound = ~((logits.amax(-1) < float("inf")) & (left > float("-inf")))
    else:
        found = _pick(state, params, processed, extras, None, kernels)
        picked, whole, final = found.tokens, found.whole, found.final
        _, stops, is_unsound = _judge(params, logits, processed, found, kernels)
    judged = by_request(is_unsound), drafts
    tokens, has_nan = verified_greedily(by_request(picked), *judged, uniforms, rates=rates, kernels=kernels)
    if by_chance:
        probs = state.draft_probs
        if probs is not None:
            probs = probs.index_select(0, state.layout.row_of_index)[:, : num_places - 1]
        drawn, drawn_nan = verified_by_chance(
            by_request(final), *judged, probs, uniforms, rates=rates, kernels=kernels
        )
        tokens = torch.where(by_request(is_greedy), tokens, drawn)
        has_nan = torch.where(by_request(is_greedy)[:, 0], has_nan, drawn_nan)
    told = tokens.flatten().clamp(min=0)
    logprobs, id_logprobs = _logprobs(shape, params, (logits, processed, final), told, extras, kernels)
    if stops is None or rates:  # what was kept is not what was picked
        stops = _stops(params, told)
    return SampledTokens(
        token_ids=tokens,
        stops=by_request(stops),
        has_nan=has_nan,
        logprobs_tensors=logprobs,
        id_logprobs=id_logprobs,
        kept_mass=_kept_mass(whole, final, told) if shape.kept_mass else None,
    )


def _at_every_place(extras: SamplingExtras, num_places: int) -> SamplingExtras:
    """Extras for the rows of logits of a batch whose requests have several each."""
    processors = [
        replace(
            own,
            index=(
                own.index[:, None] * num_places + torch.arange(num_places, device=own.index.device)
            ).flatten(),
            params={name: values.repeat_interleave(num_places, 0) for name, values in own.params.items()},
        )
        for own in extras.processors
    ]
    ids = extras.token_ids
    return SamplingExtras(tuple(processors), None if ids is None else ids.repeat_interleave(num_places, 0))


def _stops(params: BatchParams, tokens: Int[Tensor, " logits"]) -> Bool[Tensor, " logits"]:
    place = torch.arange(params.banned_ids.shape[1], device=tokens.device)
    is_stop = (params.banned_ids == tokens[:, None]) & (place < params["num_stop_ids"][:, None])
    return is_stop.any(-1) & (params.num_output_tokens + 1 >= params["min_tokens"])


def _uniforms(
    params: BatchParams, kernels: Kernels, places: Int[Tensor, "reqs n"], purpose: int, width: int
) -> Float[Tensor, "reqs n width"]:
    """Noise for tokens at these places behind each request's outputs."""
    every = params.num_places
    index = params.num_output_tokens[::every, None] + places
    seed, stream = (
        (
            words[::every, 0].to(torch.int64) & 0xFFFFFFFF | words[::every, 1].to(torch.int64) << 32
        ).repeat_interleave(places.shape[1])
        for words in params.words
    )
    noise: Tensor = kernels.uniforms(seed, stream, index.flatten(), purpose=purpose, width=width)
    return noise.view(*index.shape, width)


def _drawn_from(
    state: StepState, params: BatchParams, processed: Tensor, extras: SamplingExtras, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Logits at temperature, before the cuts and after them."""
    whole = kernels.scale_by_temperature(processed, params["temperature"])
    whole = process(state, params, whole, extras, argmax_invariant=True)
    if not state.layout.bounds.sampler.truncated:
        return whole, whole
    return whole, kernels.truncate(whole, params["top_k"], params["top_p"], params["min_p"])


def _needs_no_distribution(shape: SamplerShape, extras: SamplingExtras) -> bool:
    """Whether nothing but the draw asks what the distribution is that tokens are drawn from."""
    is_reported = shape.kept_mass or any(mode.startswith("processed") for mode in shape.logprobs_modes)
    return not (is_reported or extras.processors)


def _choose(
    shape: SamplerShape, params: BatchParams, processed: Tensor, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Tokens, greedy or drawn, and the ids of the largest logits."""
    parameters = [params[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    return kernels.choose(  # type: ignore[no-any-return]
        kernels,
        processed,
        *parameters,
        *params.words,
        params.num_output_tokens,
        purpose=DRAW,
        truncated=shape.truncated,
    )


def _checked(state: StepState, extras: SamplingExtras | None) -> SamplingExtras:
    if state.layout.bounds.sampler.extras and extras is None:
        raise ExtrasError(
            "the batch has requests with logits_processors or logprob_token_ids, and sampling was not given them: run "
            "execute, then sample(executed, kernels=kernels, extras=sampling_extras(batch).to(device))"
        )
    return NOTHING if extras is None else extras


def _exponential(params: BatchParams, vocab: int, kernels: Kernels) -> Tensor:
    """Exp(1) noise of the batch's draws: float32 [reqs, vocab]."""
    return kernels.exponentials(kernels, *params.words, params.num_output_tokens, purpose=DRAW, width=vocab)  # type: ignore[no-any-return]


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
    found: tuple[Tensor, ...] = ()
    for mode in shape.logprobs_modes:
        own = logits if mode.startswith("raw") else final
        if mode == "processed_logits" and shape.random:
            own = own + kernels.temperature_offset(processed, params["temperature"])
        table = _table(own, tokens, shape.num_logprobs or 0, extras.token_ids, mode, kernels)
        found = _chosen(params, mode, table, found) if found else table
    whole = None if shape.num_logprobs is None else LogprobsTensors(*found[:3])
    return whole, None if extras.token_ids is None else found[3]


def _table(
    logits: Tensor, tokens: Tensor, num_logprobs: int, token_ids: Tensor | None, mode: str, kernels: Kernels
) -> tuple[Tensor, ...]:
    """Ids, values and ranks; behind them the values of chosen ids, if any. All are logits, or log-probabilities."""
    of_ids = () if token_ids is None else (kernels.gather_ids(logits, token_ids),)
    if mode.endswith("logits"):
        return *kernels.gather_logprobs(logits, tokens, num_logprobs), *of_ids
    *table, by = kernels.score(logits, tokens, num_logprobs)
    return *table, *[(values - by[:, :1]) - by[:, 1:] for values in of_ids]  # as `score` lowers its own


def _chosen(
    params: BatchParams, mode: str, own: Sequence[Tensor], others: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The rows that want this mode from its own tables, the rest from the others."""
    wanted = params["logprobs_mode"] == LOGPROBS_MODES.index(mode)
    pairs = zip(own, others, strict=True)
    return tuple([torch.where(wanted if a.ndim == 1 else wanted[:, None], a, b) for a, b in pairs])
