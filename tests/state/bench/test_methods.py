"""What is timed is what is said, on a clock that only passes as the work is done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import BenchmarkError, InvalidParameterError
from purestep.state.bench.methods import SAMPLINGS, Method, decode_ms, prefill_tok_s, random_prompts
from tests.state.bench.fakes import SMALL, FakeTime, TimedGenerate

GREEDY, RANDOM = SAMPLINGS["decode"], SAMPLINGS["sampled"]


@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 5))
def test_decode_is_the_time_of_a_step_whatever_prefill_and_warming_up_take(
    prefill: int, step: int, repeats: int
) -> None:
    time = FakeTime()
    generate = TimedGenerate(time, lambda _, num_tokens: prefill + step * num_tokens, warm_up=1e6)
    method = Method(short=32, long=160, repeats=repeats)

    ms = decode_ms(generate, [[1, 2], [3, 4]], GREEDY, method, time.clock())

    assert ms == pytest.approx(step * 1e3)
    assert [num_tokens for _, num_tokens, _ in generate.calls] == [32, 160] * (1 + repeats)
    assert all(prompts == [[1, 2], [3, 4]] for prompts, _, _ in generate.calls)
    assert time.num_waits == 2 * len(generate.calls)


def test_sampling_reaches_the_engine() -> None:
    time = FakeTime()
    generate = TimedGenerate(time, lambda *_: 1.0)

    decode_ms(generate, [[1]], RANDOM, SMALL, time.clock())

    assert [dict(sampling) for *_, sampling in generate.calls] == [
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    ] * 4


@given(st.integers(1, 5))
def test_prefill_is_tokens_per_second_of_prompts_that_nobody_has_seen(repeats: int) -> None:
    time = FakeTime()
    generate = TimedGenerate(time, lambda num_prompt_tokens, _: num_prompt_tokens / 250, warm_up=1e6)
    method = Method(prefill_batch=4, prefill_length=32, repeats=repeats)

    assert prefill_tok_s(generate, 1000, method, time.clock()) == pytest.approx(250)

    assert [num_tokens for _, num_tokens, _ in generate.calls] == [1] * (1 + repeats)
    prompts = [tuple(prompt) for batch, _, _ in generate.calls for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 4 * (1 + repeats)
    assert {len(prompt) for prompt in prompts} == {32}


@pytest.mark.parametrize("measure", ["decode", "prefill"])
def test_a_time_of_less_work_than_was_asked_for_is_refused(measure: str) -> None:
    time = FakeTime()
    generate = TimedGenerate(time, lambda *_: 1.0, missing=1)

    with pytest.raises(BenchmarkError, match="tokens each"):
        if measure == "decode":
            decode_ms(generate, [[1]], GREEDY, SMALL, time.clock())
        else:
            prefill_tok_s(generate, 100, SMALL, time.clock())


@given(st.integers(1, 5), st.integers(2, 20), st.integers(0, 2**32))
def test_prompts_are_those_of_their_seed_within_the_vocabulary(batch: int, length: int, seed: int) -> None:
    prompts = random_prompts(1 << 30, batch, length, seed=seed)

    assert [len(prompt) for prompt in prompts] == [length] * batch
    assert prompts == random_prompts(1 << 30, batch, length, seed=seed)
    assert prompts != random_prompts(1 << 30, batch, length, seed=seed + 1)
    assert {token for prompt in random_prompts(3, batch, length, seed=seed) for token in prompt} <= {0, 1, 2}


def test_the_usual_method_is_the_published_one() -> None:
    assert (Method().context, Method().short, Method().long, Method().repeats) == (1024, 32, 160, 3)
    assert (Method().prefill_batch, Method().prefill_length) == (16, 2048)
    assert Method().mean_context == 1120


@pytest.mark.parametrize(
    "wrong",
    [{"context": 0}, {"repeats": 0}, {"short": 160, "host_steps": 1}, {"host_steps": 200}, {"short": -1}],
)
def test_a_method_that_can_not_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidParameterError):
        Method(**wrong)
