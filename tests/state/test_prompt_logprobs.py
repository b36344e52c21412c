"""The engine tells log-probabilities of prompts: those of one full pass, however the prompt was run."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.kernels.reference import compositions, reference
from purestep.pure.forward import compute_logits
from purestep.pure.initial import initial_state
from purestep.pure.models.initialize import random_params
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import LogprobsTensors
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.step import execute
from purestep.pure.update import update_states
from purestep.state.engine import Engine
from purestep.state.results import Logprob, PromptLogprobs, RequestOutput
from tests.bugs.tiny_engine import CONFIG, GREEDY, MODEL, Tokens, drained
from tests.bugs.tiny_engine import engine as engine_of
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import new_request, scheduled

PARAMS = random_params(CONFIG, seed=1, std=0.25)
VOCAB = MODEL.vocab_size
BLOCKS = tuple(range(1, 13))
SCORED = replace(GREEDY, prompt_logprobs=2)
PROMPT: Tokens = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)


def engine(**changes: Any) -> Engine:
    return engine_of(params=PARAMS, **changes)


@cache
def whole_pass(prompt: Tokens) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] after every token of a prompt that is run at once by the reference kernels."""
    limits = BatchLimits(1, 48, VOCAB, (4,), (13,))
    empty = InputBatch.make_empty(limits)
    batch = update_states(empty, scheduled(new_request("r", prompt, (BLOCKS,)), counts={"r": len(prompt)}))
    state = replace(initial_state(MODEL, limits), inbox=plan_step(batch, empty).inbox.to("cpu"))
    executed = execute(MODEL, PARAMS, state, kernels=reference)
    every = torch.arange(len(prompt))
    return compute_logits(MODEL, PARAMS, executed.hidden_states, every, kernels=reference).log_softmax(-1)


def assert_is_of(found: PromptLogprobs | None, prompt: Tokens, wanted: int) -> None:
    """Per token its own and the likeliest ones, within 1e-5; None for the first."""
    expected, num_likeliest = whole_pass(prompt), VOCAB if wanted == -1 else wanted
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for token, entry, row in zip(prompt[1:], found[1:], expected, strict=False):
        assert entry is not None and next(iter(entry)) == token
        assert len(entry) in {num_likeliest, num_likeliest + 1}
        assert [entry[t].logprob for t in entry] == pytest.approx(row[list(entry)].tolist(), abs=1e-5)
        assert entry[token].rank == int((row >= row[token]).sum())
        likeliest = sorted(entry.values(), key=lambda of: of.rank)[:num_likeliest]
        top = row.topk(num_likeliest).values.tolist()
        assert [of.logprob for of in likeliest] == pytest.approx(top, abs=1e-5)


def results(
    prompts: Sequence[Tokens], params: Sequence[SamplingParams], **changes: Any
) -> list[RequestOutput]:
    with engine(**changes) as own:
        return own.generate(list(prompts), list(params), progress=False)


PROMPTS = st.sampled_from([PROMPT[:n] for n in (1, 2, 4, 5, 8, 12)] + [(9, 9, 9), (*PROMPT[:8], 7, 7, 7)])


@examples(0.25)
@given(
    st.lists(st.tuples(PROMPTS, st.sampled_from([None, 0, 1, 3, -1])), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 5, 64]),
    st.sampled_from([7, 40]),
    st.integers(0, 1),
    st.booleans(),
)
def test_prompts_are_told_of_as_in_one_full_pass(
    asked: list[tuple[Tokens, int | None]], budget: int, num_blocks: int, steps_ahead: int, twice: bool
) -> None:
    """Whole or in chunks, in a cache that throws requests out, behind a prompt that is cached, one step ahead."""
    prompts = [prompt for prompt, _ in asked]
    params = [replace(GREEDY, prompt_logprobs=wanted) for _, wanted in asked]
    with engine(
        max_num_batched_tokens=budget, kv_cache_bytes=num_blocks * 1024, steps_ahead=steps_ahead
    ) as own:
        for _ in range(1 + twice):
            found = own.generate(prompts, params, progress=False)
    plain = results(prompts, [GREEDY] * len(prompts))
    for result, without, (prompt, wanted) in zip(found, plain, asked, strict=True):
        assert result.token_ids == without.token_ids
        if wanted is None:
            assert result.prompt_logprobs is None
        else:
            assert_is_of(result.prompt_logprobs, prompt, wanted)
            assert result.num_cached_tokens == 0


def test_a_prefix_hit_is_not_used_and_tells_no_junk() -> None:
    with engine() as own:
        own.generate(PROMPT, GREEDY, progress=False)
        cached = own.generate(PROMPT, GREEDY, progress=False)[0]
        scored = own.generate(PROMPT, SCORED, progress=False)[0]
    assert (cached.num_cached_tokens, scored.num_cached_tokens) == (len(PROMPT) - 1, 0)
    assert_is_of(scored.prompt_logprobs, PROMPT, 2)


@pytest.mark.parametrize("num_turns", range(1, 7))
def test_a_request_that_is_thrown_out_is_told_of_once_and_wholly(num_turns: int) -> None:
    """In the midst of its prompt, with its last token, while it decodes."""
    with engine(max_num_batched_tokens=4) as own:
        own.add_request("r", PROMPT, SCORED)
        for turn in range(num_turns):
            own.step()
            seen = own._turns.now.book.output(0).prompt_logprobs
            assert (seen is not None) == (turn >= 2)
        own.update_weights(own.params)  # keys and values are void, the tokens stay
        after = drained(own)["r"]
    assert_is_of(after.prompt_logprobs, PROMPT, 2)
    if seen is not None:
        assert after.prompt_logprobs is seen


def test_forks_and_moments_in_the_midst_of_a_prompt() -> None:
    """What was told by then is shared; what comes later is each one's own."""
    for steps_ahead in (0, 1):
        with engine(max_num_batched_tokens=5, steps_ahead=steps_ahead) as own:
            own.add_request("r", PROMPT, SCORED)
            own.step()
            own.step()
            own.fork("r", "twin")
            moment = own.remember()
            for _ in range(2):
                found = drained(own)
                assert found.keys() == {"r", "twin"}
                for result in found.values():
                    assert_is_of(result.prompt_logprobs, PROMPT, 2)
                own.rewind(moment)
            own.abort(["r", "twin"])


def test_several_samples_have_one_prompt() -> None:
    (result,) = results([PROMPT], [replace(SCORED, n=3)], max_num_batched_tokens=7)
    assert len(result.outputs) == 3
    assert_is_of(result.prompt_logprobs, PROMPT, 2)


def test_an_aborted_prompt_is_not_told_of_in_part() -> None:
    with engine(max_num_batched_tokens=4) as own:
        own.add_request("r", PROMPT, SCORED)
        own.step()
        (result,) = own.abort("r")
    assert result.prompt_logprobs is None


def test_captured_executions_score_as_well() -> None:
    """Padded batches, and graphs of pieces or of the half up to logits."""
    (result,) = results([PROMPT], [SCORED], max_num_batched_tokens=5, graph_api=FakeGraphs())
    assert_is_of(result.prompt_logprobs, PROMPT, 2)


def test_logits_of_a_whole_prompt_are_never_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    most, seen = 5, list[int]()
    monkeypatch.setattr(compositions, "MAX_SCORED_ROWS", most)

    def logits(*arguments: Any) -> torch.Tensor:
        made: torch.Tensor = donating.logits(*arguments)
        seen.append(len(made))
        return made

    (result,) = results([PROMPT], [SCORED], kernels=replace(donating, logits=logits))
    assert_is_of(result.prompt_logprobs, PROMPT, 2)
    assert seen[:4] == [1, 5, 5, 1] and set(seen[4:]) == {
        1
    }  # of the step that runs the prompt, its own first


def test_a_row_that_was_not_computed_is_told_as_none() -> None:
    table = LogprobsTensors(
        np.array([[-1, -1], [7, 3], [3, 3]], np.int32),
        np.array([[np.nan, np.nan], [-2.0, -0.5], [-0.25, -0.25]], np.float32),
        np.array([0, 4, 1], np.int32),
    )
    told = PromptLogprobs(table)
    assert told == (None, None, {7: Logprob(-2.0, 4), 3: Logprob(-0.5, 1)}, {3: Logprob(-0.25, 1)})
    assert told == PromptLogprobs(table) != PromptLogprobs(None) == (None,)
    assert (told[-1], told[1:3], repr(told)) == (told[3], (told[1], told[2]), repr(tuple(told)))
    with pytest.raises(IndexError):
        told[4]
