"""What a request asks of the sampler. Names, defaults and limits are vLLM's, with these differences:

- A temperature of less than 0.01 is not raised to 0.01; below 1e-5 it means greedy, as upstream.
- Randomness has two names: `seed`, and `stream`, which tells apart requests that share a seed.
- `bad_words_token_ids` are token ids already, and `logprobs_mode` is a request's own.
- Greedy requests may ask for several samples; they are equal.
- `logits_processors` are functions with a request's own parameters, not classes that an engine was made with.
- `structured_outputs` has one of four forms: a JSON schema, a regular expression, a choice, a grammar in EBNF.
- `kept_mass` is ours.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import attrs
import numpy as np

from purestep.kernels.record import record, replace
from purestep.pure.errors import InvalidParameterError, short
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.structured_outputs import (
    StructuredOutputsParams,
    as_structured_outputs,
    validate_structured_outputs,
)

MAX_BIAS = 100.0
MOST_SAMPLES = 16384  # of a prompt, as upstream has it
FLAGS = ("ignore_eos", "kept_mass", "detokenize", "skip_special_tokens")
WHOLE = ("n", "top_k", "seed", "stream", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
GREEDY_BELOW = 1e-5

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode)


def _token_ids(name: str) -> Callable[[Iterable[int] | None], tuple[int, ...]]:
    def convert(value: Iterable[int] | None) -> tuple[int, ...]:
        try:
            return () if value is None else tuple(operator.index(token) for token in value)
        except TypeError:
            raise InvalidParameterError(
                f"{name} must be token ids (whole numbers), got {short(value)}"
            ) from None

    return convert


def _token_ids_or_none(name: str) -> Callable[[Iterable[int] | None], tuple[int, ...] | None]:
    convert = _token_ids(name)
    return lambda value: None if value is None else convert(value)


def _words(name: str) -> Callable[[Iterable[Iterable[int]] | None], tuple[tuple[int, ...], ...]]:
    convert = _token_ids(name)

    def convert_all(value: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...]:
        try:
            return () if value is None else tuple(map(convert, value))
        except TypeError:
            raise InvalidParameterError(f"{name} must be lists of token ids, got {short(value)}") from None

    return convert_all


def _processors(value: Iterable[LogitsProcessor] | None) -> tuple[LogitsProcessor, ...]:
    if isinstance(value, LogitsProcessor):
        return (value,)
    if not (value is None or isinstance(value, Iterable)):
        raise InvalidParameterError(
            f"logits_processors must be a list of LogitsProcessor, got {short(value)}"
        )
    return tuple(value or ())


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise InvalidParameterError(f"stop must be a string or a list of strings, got {short(value)}")
    return (value,) if isinstance(value, str) else tuple(value)


def _bias(value: Mapping[int, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:
        pairs = dict(value).items() if isinstance(value, Mapping) else value
        return tuple((operator.index(token), _clamped(float(bias))) for token, bias in pairs)
    except (TypeError, ValueError):
        raise InvalidParameterError(f"logit_bias must map token ids to numbers, got {short(value)}") from None


def _clamped(bias: float) -> float:
    """Within +-MAX_BIAS; infinities and NaN stay, for `validate` to refuse."""
    return max(-MAX_BIAS, min(MAX_BIAS, bias)) if abs(bias) < float("inf") else bias


@record(static=True)
class SamplingParams:
    """How one request is sampled. Lists may come in any form, kept are tuples; `validate` judges the values.

    Raises: InvalidParameterError for token ids that are no whole numbers and biases that are no numbers.
    Source: vllm/sampling_params.py.
    """

    n: int = 1  # samples of the prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: the engine's
    stream: int | None = None  # None: place of the prompt in its call times n, plus place of the sample
    max_tokens: int | None = 16  # None: up to the model's limit
    min_tokens: int = 0  # until then neither stop ids nor the model's end-of-sequence ids are produced
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_token_ids("stop_token_ids"))
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # how many of the likeliest tokens beside the sampled one; -1: all
    prompt_logprobs: int | None = None  # likewise, for each token of the prompt
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logprob_token_ids: tuple[int, ...] | None = attrs.field(  # ids to be told of at every sampled position
        default=None, converter=_token_ids_or_none("logprob_token_ids")
    )
    kept_mass: bool = (
        False  # tell what top-k, top-p and min-p kept of the distribution of every sampled token
    )
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_bias)  # clamped to +-100
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=_token_ids_or_none("allowed_token_ids")
    )
    bad_words_token_ids: tuple[tuple[int, ...], ...] = attrs.field(
        default=(), converter=_words("bad_words_token_ids")
    )
    logits_processors: tuple[LogitsProcessor, ...] = attrs.field(default=(), converter=_processors)
    structured_outputs: StructuredOutputsParams | None = attrs.field(  # a mapping of its fields will do
        default=None, converter=as_structured_outputs
    )
    detokenize: bool = True
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn."""
        return not self.greedy


def normalize(params: SamplingParams) -> SamplingParams:
    """Equal behaviour in one form: a greedy request has temperature 0 and no cuts, top_k "off" is 0."""
    params = _plain(params)
    if params.greedy:
        return replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    return params if params.top_k >= 0 else replace(params, top_k=0)


def _plain(params: SamplingParams) -> SamplingParams:
    """Python's own numbers in the place of numpy's and torch's, which overflow and compare in their own ways."""
    changes = {}
    for kind, names, made in ((int, WHOLE, operator.index), (float, REAL, float), (bool, FLAGS, bool)):
        for name in names:
            value = getattr(params, name)
            if value is not None and type(value) is not kind:
                changes[name] = made(value)
    return replace(params, **changes) if changes else params


def validate(
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    *,
    eos_token_ids: tuple[int, ...] = (),
    req_id: str | None = None,
) -> None:
    """Refuse parameters outside their domain, for a model with so many token ids and so long a context.

    With the model's end-of-sequence ids, which min_tokens forbids too, parameters that leave no token at all are
    refused as well. A `req_id` is named in what is raised.

    Raises: InvalidParameterError naming the parameter, its value and what is allowed.
    """
    try:
        if not isinstance(params, SamplingParams):
            raise _refusal("sampling_params", params, "SamplingParams")
        _validate_numbers(params)
        _validate_counts(params, vocab_size, max_model_len)
        _validate_ids(params, vocab_size)
        _validate_choice(params, vocab_size, eos_token_ids)
        if params.logprobs_mode not in LOGPROBS_MODES:
            raise _refusal("logprobs_mode", params.logprobs_mode, f"one of {', '.join(LOGPROBS_MODES)}")
        for processor in params.logits_processors:
            if not (isinstance(processor, LogitsProcessor) and callable(processor.apply)):
                raise _refusal("logits_processors", processor, "LogitsProcessor records of a function")
        if not all(isinstance(text, str) and text for text in params.stop):
            raise _refusal("stop", params.stop, "strings that are not empty")
        if params.structured_outputs is not None:
            validate_structured_outputs(params.structured_outputs)
    except InvalidParameterError as error:
        if req_id is None:
            raise
        raise InvalidParameterError(f"request {short(req_id)}: {error}") from None


def _refusal(name: str, value: object, allowed: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} must be {allowed}, got {short(value)}")


def _validate_numbers(params: SamplingParams) -> None:
    domains: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("temperature", lambda x: 0 <= x <= 1e30, "in [0, 1e30] (0: greedy)"),
        ("top_p", lambda x: 0 < x <= 1, "in (0, 1] (1: off)"),
        ("min_p", lambda x: 0 <= x <= 1, "in [0, 1] (0: off)"),
        ("presence_penalty", lambda x: -2 <= x <= 2, "in [-2, 2] (0: off)"),
        ("frequency_penalty", lambda x: -2 <= x <= 2, "in [-2, 2] (0: off)"),
        ("repetition_penalty", lambda x: 1e-6 <= x <= 1e6, "in [1e-6, 1e6] (1: off)"),
    )
    for name, is_valid, allowed in domains:
        value = getattr(params, name)
        if not (_is_number(value) and is_valid(value)):
            raise _refusal(name, value, allowed)
    for token, bias in params.logit_bias:
        if not abs(bias) <= MAX_BIAS:
            raise _refusal(f"logit_bias of token {token}", bias, "a finite number")


def _is_number(value: Any) -> bool:
    if isinstance(value, float | int):
        return True
    return hasattr(value, "__float__") and not getattr(
        value, "ndim", 0
    )  # an array is many, or one in disguise


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # as the owners of such types have it
        return False
    return True


def _validate_counts(params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    none_or = "None or "
    domains = (
        ("n", 1, MOST_SAMPLES, ""),
        ("top_k", -1, 2**31 - 1, ""),
        ("seed", -(2**63), 2**63 - 1, none_or),
        ("stream", -(2**63), 2**63 - 1, none_or),
        ("max_tokens", 1, None, none_or),
        ("min_tokens", 0, max_model_len, ""),
        ("logprobs", -1, vocab_size, none_or),
        ("prompt_logprobs", -1, vocab_size, none_or),
    )
    for name, low, high, optional in domains:
        value = getattr(params, name)
        if optional and value is None:
            continue
        if not (_is_integer(value) and low <= value and (high is None or value <= high)):
            interval = f"whole number >= {low}" + ("" if high is None else f" and <= {high}")
            raise _refusal(name, value, f"{optional}a {interval}")
    for name in FLAGS:
        if not isinstance(value := getattr(params, name), bool | np.bool_):
            raise _refusal(name, value, "True or False")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refusal("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")


def _validate_ids(params: SamplingParams, vocab_size: int) -> None:
    allowed = params.allowed_token_ids
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(token for token, _ in params.logit_bias),
        "allowed_token_ids": allowed or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_token_ids": tuple(token for word in params.bad_words_token_ids for token in word),
    }
    for name, ids in named.items():
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise _refusal(f"every id in {name}", outside[0], f"in [0, {vocab_size}), the vocabulary")
    if () in params.bad_words_token_ids:
        raise _refusal("bad_words_token_ids", params.bad_words_token_ids, "words of one id at least")
    if params.logprob_token_ids == ():
        raise _refusal("logprob_token_ids", (), "None (none) or one id at least")
    if allowed == ():
        raise _refusal("allowed_token_ids", allowed, "None (all) or one id at least")


def _validate_choice(params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Some token must be left to choose."""
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens > 0:
        banned.update(params.stop_token_ids, (token for token in eos_token_ids if 0 <= token < vocab_size))
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size if allowed is None else banned.issuperset(allowed):
        forbidding = "more than what bad words forbid and, until min_tokens, stop ids and the model's end"
        raise _refusal("allowed_token_ids", allowed, forbidding)
