"""The bare step does the engine's work, one step for one token, and leaves no trace: every step counts as a second."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from purestep.pure.errors import BenchmarkError
from purestep.pure.models.initialize import random_params
from purestep.pure.models.llama import llama
from purestep.pure.record import replace
from purestep.state.bench import steady
from purestep.state.bench.engines import decode_engine, generator_of, prefill_engine, steps_at_once
from purestep.state.bench.methods import SAMPLINGS, decode_ms, prefill_tok_s, random_prompts
from purestep.state.bench.shapes import SHAPES
from purestep.state.bench.steady import decoding, plans_ahead, run_us, step_ms, turn_us
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from tests.state.bench.fakes import SMALL, TINY, steps_of
from tests.state.fake_graphs import FakeGraphs

CONFIG = SHAPES["tiny"]
LOADED = LoadedModel("tiny", llama(CONFIG), random_params(CONFIG, seed=1, std=0.3))  # tokens vary
PROMPTS = random_prompts(512, 3, SMALL.context, seed=0)


@pytest.fixture(params=["eager", "captured, one ahead"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    sizes: dict[str, Any] = {} if request.param == "eager" else {"graph_api": FakeGraphs(), "steps_ahead": 1}
    with decode_engine(LOADED, TINY, SMALL, (1, 3), **sizes) as made:
        yield made


@pytest.mark.parametrize("what", ["decode", "sampled"])
def test_decode_takes_a_step_for_each_token(engine: Engine, what: str) -> None:
    ms = decode_ms(generator_of(engine), PROMPTS, SAMPLINGS[what], SMALL, steps_of(engine))

    assert ms == 1000


def test_prompts_that_are_decoded_again_are_in_the_cache(engine: Engine) -> None:
    cached = []
    generate = generator_of(engine)

    def watched(*arguments: Any) -> Any:
        before = engine._turns.bound.buffers.generation
        tokens = generate(*arguments)
        cached.append(engine._turns.bound.buffers.generation - before)
        return tokens

    decode_ms(watched, PROMPTS, SAMPLINGS["decode"], SMALL, steps_of(engine))

    # as many steps as tokens: a cached prompt gives its first token in the first step (one more may be begun ahead)
    assert set(cached[2:]) <= {SMALL.short, SMALL.short + 1, SMALL.long, SMALL.long + 1}


@pytest.mark.parametrize("what", ["decode", "sampled"])
def test_several_steps_may_be_one_launch(what: str) -> None:
    with decode_engine(LOADED, TINY, SMALL, (1, 3), graph_api=FakeGraphs(), unroll=2) as engine:
        assert steps_at_once(engine, 3, SAMPLINGS[what]) == 2
        assert steps_at_once(engine, 3, {"temperature": 0.0, "presence_penalty": 1.0}) == 1
        with decoding(engine, PROMPTS, SMALL) as turns:
            before = turns.now.batch.columns.num_computed_tokens_bound.max()
            assert turn_us(turns, SMALL, steps_of(engine)) == 1e6 / 2
            after = turns.now.batch.columns.num_computed_tokens_bound.max()
    assert after == before + -(-SMALL.host_steps // 2) * 2


def test_prefill_computes_every_prompt_token_and_nothing_else() -> None:
    with prefill_engine(LOADED, TINY, SMALL) as engine:
        rate = prefill_tok_s(generator_of(engine), 512, SMALL, steps_of(engine))

    assert rate == SMALL.prefill_batch * SMALL.prefill_length  # all of them in one step


def test_the_bare_step_is_one_step_for_each_token_and_uploads_nothing(engine: Engine) -> None:
    with decoding(engine, PROMPTS, SMALL) as turns:
        step = step_ms(turns, SMALL, steps_of(engine))

    assert (step.ms, step.num_uploads) == (1000, 0)


def test_the_host_is_timed_over_single_steps(engine: Engine) -> None:
    with decoding(engine, PROMPTS, SMALL) as turns:
        before = turns.now.batch.clock.num_begun

        assert run_us(turns, SMALL, steps_of(engine)) == 1e6
        assert turns.now.batch.clock.num_begun == before
        assert turn_us(turns, SMALL, steps_of(engine)) == 1e6
        assert turns.now.batch.clock.num_begun == before + SMALL.host_steps


def test_plans_ahead_are_those_of_the_engine_and_run_its_graphs(engine: Engine) -> None:
    with decoding(engine, PROMPTS, SMALL) as turns:
        plans = plans_ahead(turns, 4)

    captured = turns.bound.captured is not None
    assert all((key is not None) is captured for _, key in plans)
    assert all(len(plan.batch.row_of) == 3 and not plan.inbox.brings_data for plan, _ in plans)
    assert all(after.base is before.batch for (before, _), (after, _) in pairwise(plans))


def test_what_was_measured_leaves_no_trace(engine: Engine) -> None:
    """The requests go on to the tokens that they have alone."""
    expected = generator_of(engine)(PROMPTS, SMALL.long, SAMPLINGS["decode"])
    found: dict[str, tuple[int, ...]] = {}
    with decoding(engine, PROMPTS, SMALL) as turns:
        step_ms(turns, SMALL, steps_of(engine))
        run_us(turns, SMALL, steps_of(engine))
        while len(found.get("bench-0", ())) < SMALL.long:
            found |= {result.req_id: result.outputs[0].token_ids for result in engine.step()}

    assert [found[f"bench-{i}"][: SMALL.long] for i in range(3)] == expected
    assert not engine.has_unfinished()
    assert generator_of(engine)(PROMPTS, SMALL.long, SAMPLINGS["decode"]) == expected


def test_the_bare_steps_sample_the_tokens_of_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generator_of(engine)(PROMPTS, SMALL.long + 2, SAMPLINGS["decode"])
    run, pending = steady.run, []

    def kept(*arguments: Any, **settings: Any) -> Any:
        leased, output = run(*arguments, **settings)
        pending.append(output)
        return leased, output

    monkeypatch.setattr(steady, "run", kept)
    with decoding(engine, PROMPTS, SMALL) as turns:
        begun = SMALL.short + len(turns.now.in_flight)
        step_ms(turns, SMALL, steps_of(engine))
    steps = [output.result().sampled_token_ids[:3, 0].tolist() for output in pending]
    num_steps = SMALL.long - SMALL.short

    assert len({token for own in expected for token in own}) > 5
    assert len(steps) == (1 + SMALL.repeats) * num_steps
    for repeat in range(1 + SMALL.repeats):
        tokens = zip(*steps[repeat * num_steps : (repeat + 1) * num_steps], strict=True)
        assert list(tokens) == [own[begun : begun + num_steps] for own in expected]


def test_rows_that_stop_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        def result(self) -> Any:
            return replace(self.real.result(), sampled_token_ids=torch.full((3, 1), -1).numpy())

        def __init__(self, real: Any) -> None:
            self.real = real

    run = steady.run

    def stopped(*arguments: Any, **settings: Any) -> Any:
        leased, pending = run(*arguments, **settings)
        return leased, Stopped(pending)

    monkeypatch.setattr(steady, "run", stopped)
    with pytest.raises(BenchmarkError, match="stopped"), decoding(engine, PROMPTS, SMALL) as turns:
        step_ms(turns, SMALL, steps_of(engine))


def test_requests_that_end_too_early_are_refused() -> None:
    longest = SMALL.context + SMALL.long - 2
    with (
        decode_engine(LOADED, TINY, SMALL, (3,), max_model_len=longest) as engine,
        decoding(engine, PROMPTS, SMALL) as turns,
        pytest.raises(BenchmarkError, match="go on at step"),
    ):
        step_ms(turns, SMALL, steps_of(engine))


def test_prompts_that_do_not_run_together_are_refused() -> None:
    with (
        decode_engine(LOADED, TINY, SMALL, (1,)) as engine,
        pytest.raises(BenchmarkError, match="do not decode together"),
        decoding(engine, PROMPTS, SMALL),
    ):
        raise AssertionError("they decode together in one row")
