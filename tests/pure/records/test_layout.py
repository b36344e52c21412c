"""Bounds of layouts, and what a batch's parameters ask of sampling."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.records.layout import (
    Layout,
    LayoutBounds,
    SamplerShape,
    bucket,
    sampler_features,
    sampler_shape,
)
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams

lengths = st.integers(1, 2_000_000)


@given(lengths)
def test_a_bucket_holds_its_length_and_little_more(length: int) -> None:
    """At least 64, at most an eighth too large, and a bucket of its own."""
    size = bucket(length)
    assert max(length, 64) <= size
    assert size <= max(64, length * 9 // 8)
    assert bucket(size) == size


@given(lengths, lengths)
def test_buckets_are_monotone(a: int, b: int) -> None:
    """A longer sequence has no smaller bound."""
    assert bucket(min(a, b)) <= bucket(max(a, b))


def test_buckets_are_few() -> None:
    """Sixteen a doubling at most: bounds are part of a graph's key."""
    assert len({bucket(length) for length in range(1, 131_073)}) <= 100
    assert [bucket(length) for length in (1, 64, 65, 128, 129, 131_072)] == [64, 64, 72, 128, 144, 131_072]


def test_an_empty_layout_runs_nothing() -> None:
    """No rows, no tokens, default bounds."""
    layout = Layout.make_empty()
    assert layout.row_of_index.tolist() == []
    assert layout.query_start_loc.tolist() == [0]
    assert layout.bounds == LayoutBounds()
    assert not layout.row_of_index.flags.writeable and not layout.query_start_loc.flags.writeable


def shape_of(*requests: SamplingParams) -> SamplerShape:
    """The shape of a batch of these requests; vocabulary 100, end of sequence 9."""
    features = [sampler_features(params, 100, (9,)) for params in requests]
    wanted = [-1 if params.logprobs is None else params.logprobs for params in requests]
    return sampler_shape(int(np.bitwise_or.reduce(features)), max(wanted))


def test_a_neutral_request_asks_for_nothing() -> None:
    """Greedy, or drawn from the whole distribution."""
    assert shape_of(SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.2)) == SamplerShape()
    assert shape_of(SamplingParams()) == SamplerShape(random=True)
    assert shape_of(SamplingParams(top_k=100)) == SamplerShape(random=True)


def test_every_parameter_asks_for_its_part() -> None:
    """And for no other."""
    greedy = {"temperature": 0}
    for params in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert shape_of(SamplingParams(**params)) == SamplerShape(random=True, truncated=True)
    for params in ({"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}):
        assert shape_of(SamplingParams(**greedy, **params)) == SamplerShape(penalties=True)
    for params in ({"logit_bias": {1: 1.0}}, {"allowed_token_ids": (1,)}, {"bad_words_token_ids": ((1,),)}):
        assert shape_of(SamplingParams(**greedy, **params)) == SamplerShape(constraints=True)
    assert shape_of(SamplingParams(**greedy, kept_mass=True)) == SamplerShape(kept_mass=True)
    assert shape_of(SamplingParams(**greedy, prompt_logprobs=0)) == SamplerShape(prompt_logprobs=True)
    processor = LogitsProcessor(lambda logits, history, params: logits)
    assert shape_of(SamplingParams(**greedy, logits_processors=processor)) == SamplerShape(extras=True)
    told = SamplerShape(extras=True, logprobs_modes=("raw_logits",))
    assert shape_of(SamplingParams(**greedy, logprob_token_ids=(1,), logprobs_mode="raw_logits")) == told
    assert shape_of(SamplingParams(**greedy, min_tokens=2)) == SamplerShape(min_tokens=True)
    many = SamplingParams(**greedy, min_tokens=2, stop_token_ids=range(10, 20))
    assert shape_of(many) == SamplerShape(min_tokens=True, constraints=True)
    assert shape_of(SamplingParams(**greedy, stop_token_ids=range(10, 20))) == SamplerShape()


def test_a_batch_asks_for_what_any_of_its_requests_asks_for() -> None:
    """Features are joined; the widest report of log-probabilities counts."""
    requests = (
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(logprobs=4, logprobs_mode="processed_logits", top_k=2),
        SamplingParams(temperature=0),
    )
    modes = ("raw_logprobs", "processed_logits")
    expected = SamplerShape(random=True, truncated=True, num_logprobs=4, logprobs_modes=modes)
    assert shape_of(*requests) == shape_of(*reversed(requests)) == expected
    assert shape_of(requests[0]).num_logprobs == 0
    assert shape_of(requests[2]).num_logprobs is None
