"""Which rows run, and where their tokens lie."""

import numpy as np
from jaxtyping import Int32

from purestep.kernels.record import record, static
from purestep.pure.arrays import Array, empty_column
from purestep.pure.records.sampling_params import LOGPROBS_MODES, SamplingParams
from purestep.pure.records.sampling_rows import MAX_STOP_IDS, stop_ids_of


@record(static=True)
class SamplerShape:
    """What sampling has to compute for a batch; the part of a graph's key that the sampling parameters decide.

    A neutral parameter is an exact identity, so a shape that says more than a row needs changes nothing for it.
    """

    random: bool = False  # any row draws
    truncated: bool = False  # any row has top-k, top-p or min-p
    penalties: bool = False
    min_tokens: bool = False
    constraints: bool = False  # allowed ids, bad words, bias, many stop ids
    num_logprobs: int | None = None  # the largest asked for
    logprobs_modes: tuple[str, ...] = ()  # those asked for, in the order of LOGPROBS_MODES
    kept_mass: bool = False
    extras: bool = False  # logits processors or chosen ids: sampling takes them beside the state
    prompt_logprobs: bool = (
        False  # nothing for the sampler: whoever runs the step computes them between its halves
    )
    grammar: bool = False  # likewise: whoever runs the step masks its logits between its halves


@record(static=True)
class LayoutBounds:
    """Static facts of a layout: sizes, and bounds that kernels may use for shapes but never for results."""

    num_reqs: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0  # rounded up to a bucket
    sampler: SamplerShape = SamplerShape()
    num_drafts: int = 0  # the most that a request of the batch may have verified
    num_steps: int = 1  # how often it is run, one after another, and nothing absorbed in between


@record
class Layout:
    """The rows of a batch in order, and the tokens that each of them runs. On the host numpy, on the device tensors."""

    row_of_index: Int32[Array, " reqs"]
    query_start_loc: Int32[Array, " reqs+1"]
    bounds: LayoutBounds = static()

    @staticmethod
    def make_empty() -> "Layout":
        """Nothing runs."""
        return Layout(empty_column(0, np.int32), empty_column(1, np.int32), LayoutBounds())


def bucket(length: int) -> int:
    """`length` rounded up to 8..16 times a power of two, at least 64: few distinct bounds, at most 12.5 % too large."""
    if length <= 64:
        return 64
    step = 1 << max((length - 1).bit_length() - 4, 3)
    return -(-length // step) * step


RANDOM, TRUNCATED, PENALTIES, MIN_TOKENS, CONSTRAINTS, FIRST_MODE = 1, 2, 4, 8, 16, 32
KEPT_MASS, EXTRAS, PROMPT_LOGPROBS, GRAMMAR = (FIRST_MODE << len(LOGPROBS_MODES) + i for i in range(4))


def sampler_features(params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> int:
    """What a request's parameters ask of sampling, as bits to be joined over a batch."""
    bits = 0
    if not params.greedy:
        bits |= RANDOM
        if 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0:
            bits |= TRUNCATED
    if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
        bits |= PENALTIES
    if params.logit_bias or params.allowed_token_ids is not None or params.bad_words_token_ids:
        bits |= CONSTRAINTS
    if params.min_tokens:
        bits |= MIN_TOKENS
    if params.min_tokens and len(stop_ids_of(params, eos_token_ids)[0]) > MAX_STOP_IDS:
        bits |= CONSTRAINTS
    if params.kept_mass:
        bits |= KEPT_MASS
    if params.logits_processors or params.logprob_token_ids:
        bits |= EXTRAS
    if params.prompt_logprobs is not None:
        bits |= PROMPT_LOGPROBS
    if params.structured_outputs is not None:
        bits |= GRAMMAR
    if params.logprobs is not None or params.logprob_token_ids:
        bits |= FIRST_MODE << LOGPROBS_MODES.index(params.logprobs_mode)
    return bits


def sampler_shape(features: int, num_logprobs: int) -> SamplerShape:
    """The shape for a batch with these joined features; num_logprobs -1 when nobody wants any."""
    return SamplerShape(
        random=bool(features & RANDOM),
        truncated=bool(features & TRUNCATED),
        penalties=bool(features & PENALTIES),
        min_tokens=bool(features & MIN_TOKENS),
        constraints=bool(features & CONSTRAINTS),
        num_logprobs=None if num_logprobs < 0 else num_logprobs,
        logprobs_modes=tuple(m for i, m in enumerate(LOGPROBS_MODES) if features & FIRST_MODE << i),
        kept_mass=bool(features & KEPT_MASS),
        extras=bool(features & EXTRAS),
        prompt_logprobs=bool(features & PROMPT_LOGPROBS),
        grammar=bool(features & GRAMMAR),
    )
