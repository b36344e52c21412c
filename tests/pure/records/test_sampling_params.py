"""Sampling parameters: what is taken, what is refused, and by what name."""

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import InvalidParameterError, InvalidRequestError
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import FLAGS, MOST_SAMPLES, SamplingParams, normalize, validate
from tests import checks

VOCAB, MAX_LEN = 100, 64
INF, NAN = math.inf, math.nan
ID = st.integers(0, VOCAB - 1)

VALID = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 8),
        "temperature": st.floats(0, 1e6),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2 * VOCAB),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "stream": st.none() | st.integers(-(2**63), 2**63 - 1),
        "max_tokens": st.none() | st.integers(MAX_LEN, 1000),
        "min_tokens": st.integers(0, 16),
        "stop": st.lists(st.text(min_size=1)),
        "stop_token_ids": st.lists(ID),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 10),
        "logprobs": st.none() | st.integers(-1, VOCAB),
        "prompt_logprobs": st.none() | st.integers(-1, VOCAB),
        "logprob_token_ids": st.none() | st.lists(ID, min_size=1),
        "kept_mass": st.booleans(),
        "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logits"]),
        "logit_bias": st.dictionaries(ID, st.floats(-1e9, 1e9)),
        "bad_words_token_ids": st.lists(st.lists(ID, min_size=1, max_size=3)),
    },
)


@given(VALID)
def test_valid_parameters_pass(fields: dict[str, Any]) -> None:
    """What lies inside the domains is accepted, is a value (hash, equality); normalising keeps it valid."""
    params = SamplingParams(**fields)
    validate(params, VOCAB, MAX_LEN)
    assert params == SamplingParams(**fields)
    assert hash(params) == hash(SamplingParams(**fields))
    normal = normalize(params)
    validate(normal, VOCAB, MAX_LEN)
    assert normalize(normal) == normal
    assert normal.greedy == params.greedy == (not params.is_random)


REFUSED: list[tuple[str, Any]] = [
    *[(name, value) for name in ("temperature", "top_p", "min_p") for value in (NAN, INF, -INF, -0.1, None)],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (NAN, INF, 2.1, -2.1)],
    *[("repetition_penalty", value) for value in (NAN, INF, 0.0, -1.0)],
    *[("temperature", "0.7"), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.1)],
    *[
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", None),
        ("n", MOST_SAMPLES + 1),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
    ],
    *[("min_tokens", -1), ("min_tokens", 17), ("min_tokens", None), ("seed", 2**63), ("seed", 0.5)],
    *[("stream", -(2**63) - 1), ("logprobs", -2), ("logprobs", VOCAB + 1), ("prompt_logprobs", -2)],
    *[("stop", ("",)), ("stop", (3,)), ("stop", 3), ("logprobs_mode", "all")],
    *[("stop_token_ids", (VOCAB,)), ("stop_token_ids", (-1,)), ("stop_token_ids", (1.5,))],
    *[("logit_bias", {VOCAB: 1.0}), ("logit_bias", {3: NAN}), ("logit_bias", {3: INF}), ("logit_bias", 7)],
    *[("logit_bias", {3: "much"}), ("logit_bias", {"3": 1.0})],
    *[("allowed_token_ids", ()), ("allowed_token_ids", (5, VOCAB)), ("allowed_token_ids", "abc")],
    *[("logprob_token_ids", ()), ("logprob_token_ids", (5, VOCAB)), ("logprob_token_ids", (0.5,))],
    *[("logits_processors", 3), ("logits_processors", (len,))],
    *[("seed", torch.tensor(0.5)), ("n", torch.tensor([1, 2])), ("top_k", np.array([1, 2]))],
    *[("top_p", np.array([1.0])), ("temperature", torch.tensor([0.5, 0.7])), ("min_p", np.array([[0.1]]))],
    *[(flag, value) for flag in FLAGS for value in (None, 1, "no", np.array([True, False]))],
    *[("bad_words_token_ids", ((),)), ("bad_words_token_ids", ((3, -1),)), ("bad_words_token_ids", (3,))],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_bad_parameter_is_refused_by_name(name: str, value: Any) -> None:
    """A named error of the request, whose message holds the parameter's name."""
    with checks.unchecked(), pytest.raises(InvalidParameterError, match=name) as caught:
        validate(SamplingParams(**{name: value}), VOCAB, MAX_LEN)
    assert isinstance(caught.value, InvalidRequestError)


def test_minimum_must_fit() -> None:
    """min_tokens may not exceed max_tokens, nor the context where there is no maximum."""
    with pytest.raises(
        InvalidParameterError, match="min_tokens must be at most max_tokens, which is 4, got 5"
    ):
        validate(SamplingParams(min_tokens=5, max_tokens=4), VOCAB, MAX_LEN)
    with pytest.raises(InvalidParameterError, match="min_tokens"):
        validate(SamplingParams(min_tokens=MAX_LEN + 1, max_tokens=None), VOCAB, MAX_LEN)
    validate(SamplingParams(min_tokens=4, max_tokens=4), VOCAB, MAX_LEN)


def test_something_must_stay_allowed() -> None:
    """Allowed ids of which bad words and min_tokens leave none can not be sampled from."""
    params = SamplingParams(allowed_token_ids=(1, 2), bad_words_token_ids=((1,), (2, 3)), stop_token_ids=(2,))
    validate(params, VOCAB, MAX_LEN)
    with pytest.raises(InvalidParameterError, match="allowed_token_ids"):
        validate(replace(params, min_tokens=1), VOCAB, MAX_LEN)


FEW = st.lists(st.integers(0, 2), max_size=3, unique=True)


@given(
    allowed=st.none() | FEW.filter(bool),
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=3),
    stops=FEW,
    ends=st.lists(st.sampled_from([0, 1, 2, -1, 3, 7]), max_size=3),
    min_tokens=st.integers(0, 1),
    ignore_eos=st.booleans(),
)
def test_a_choice_is_left_or_the_request_is_refused(
    allowed: list[int] | None,
    words: list[list[int]],
    stops: list[int],
    ends: list[int],
    min_tokens: int,
    ignore_eos: bool,
) -> None:
    """Of three tokens: what is allowed, without one-token bad words and, until min_tokens, whatever ends a request."""
    params = SamplingParams(
        allowed_token_ids=allowed,
        bad_words_token_ids=words,
        stop_token_ids=stops,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
    )
    left = {0, 1, 2} if allowed is None else set(allowed)
    left -= {word[0] for word in words if len(word) == 1}
    left -= {*stops, *ends} if min_tokens else set()
    if left:
        validate(params, 3, MAX_LEN, eos_token_ids=tuple(ends))
    else:
        with pytest.raises(InvalidParameterError, match=r"^request 'r': allowed_token_ids must be more than"):
            validate(params, 3, MAX_LEN, eos_token_ids=tuple(ends), req_id="r")


def test_parameters_of_another_kind_are_refused(unchecked_records: None) -> None:
    """None, or another library's parameters."""
    for params in (None, {"temperature": 0.5}):
        with pytest.raises(InvalidParameterError, match="sampling_params must be SamplingParams"):
            validate(params, VOCAB, MAX_LEN)  # type: ignore[arg-type]


def test_lists_are_kept_as_tuples() -> None:
    """Any form of list, a mapping of biases and a single stop string are taken; the record stays hashable."""
    params = SamplingParams(
        stop="end",
        stop_token_ids=[1, 2],
        logit_bias={3: 1, 4: -1e9},
        allowed_token_ids=range(3),
        bad_words_token_ids=[[1], [2, 3]],
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == ((3, 1.0), (4, -100.0))
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.bad_words_token_ids == ((1,), (2, 3))
    assert params == SamplingParams(**attrs.asdict(params, recurse=False))


def test_none_is_an_empty_list() -> None:
    """As upstream has it, except that no allowed ids at all is an error and None allows all."""
    lists = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_token_ids")
    assert SamplingParams(**dict.fromkeys(lists)) == SamplingParams()


def test_low_temperature_is_kept() -> None:
    """No band is lifted to another temperature; greedy begins below 1e-5 and then nothing is cut."""
    low = SamplingParams(temperature=2e-5, top_k=-1)
    assert normalize(low) == replace(low, top_k=0)
    assert not low.greedy
    greedy = SamplingParams(temperature=9e-6, top_k=5, top_p=0.5, min_p=0.5, seed=3)
    assert normalize(greedy) == SamplingParams(temperature=0.0, seed=3)


def test_defaults_are_upstreams() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert (params.logprobs, params.seed, params.allowed_token_ids) == (None, None, None)


def test_values_can_not_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
