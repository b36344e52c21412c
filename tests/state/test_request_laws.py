"""Laws of requests: going on, sampling n times, coming again, and that nothing depends on when a step is known."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.pure.models.initialize import random_params
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import History, LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.results import RequestOutput
from tests.bugs.tiny_engine import CONFIG, MODEL, Tokens, drained
from tests.grammars import EOS, needs_xgrammar, small_tokenizer
from tests.profiles import examples
from tests.state import test_runner as runners
from tests.state.fake_graphs import capture_samplers, unrolled
from tests.state.upstream import serve

VOCAB, LONGEST = MODEL.vocab_size, 48
TOKENIZER = small_tokenizer()
SHARP, EVEN = (
    LoadedModel(
        "tiny", MODEL, random_params(CONFIG, seed=1, std=std), tokenizer=TOKENIZER, eos_token_ids=(EOS,)
    )
    for std in (0.5, 0.02)
)


def favours_its_length(logits: Tensor, history: History, params: Mapping[str, Tensor]) -> Tensor:
    """One token more than another, by how much has been said: a processor with state, as a fold."""
    token = (history.is_output * history.token_ids).sum(1, keepdim=True) % logits.shape[1]
    return logits.scatter_add(1, token, torch.full_like(token, 3, dtype=logits.dtype))


PROMPT = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=10).map(tuple)
DRAWN = SamplingParams(seed=3, temperature=1.3, max_tokens=9)
KINDS: dict[str, SamplingParams] = {
    "plain": SamplingParams(temperature=0.0, max_tokens=8),
    "penalties": replace(DRAWN, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=-0.3),
    "grammar": replace(DRAWN, structured_outputs={"regex": "(ab|cab|[0-9])+;?"}, max_tokens=11),
    "logprobs": replace(DRAWN, top_k=9, logprobs=3, logprob_token_ids=[4, 5], kept_mass=True, prompt_logprobs=1),
    "stop strings": replace(DRAWN, stop=("a", "1", "é", "no"), min_tokens=2, max_tokens=20),
    "bad words": replace(DRAWN, bad_words_token_ids=[[5, 9], [7]], logit_bias={9: 2.0}, min_tokens=4),
    "processor": replace(DRAWN, logits_processors=[LogitsProcessor(favours_its_length)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def xgrammar() -> None:
    needs_xgrammar()


def engine(loaded: LoadedModel = SHARP, **changes: Any) -> Engine:
    sizes = {"kv_cache_bytes": 40 * 1024, "block_size": 4, "max_model_len": LONGEST, "max_num_reqs": 8}
    return Engine(loaded, **(sizes | changes))


@cache
def alone(prompt: Tokens, kind: str) -> RequestOutput:
    with engine() as own:
        own.add_request("r", prompt, KINDS[kind], stream=0)
        return drained(own)["r"]


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    """Tokens, text and reasons exactly; numbers to the rounding of batches of other shapes."""
    ours, theirs = found.outputs[0], expected.outputs[0]
    for name in ("token_ids", "text", "finish_reason", "stop_reason", "error"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (found.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for name in ("logprobs", "id_logprobs", "kept_mass"):
        for mine, other in zip(columns(getattr(ours, name)), columns(getattr(theirs, name)), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-4)


def columns(told: Any) -> list[np.ndarray]:
    """The arrays of numbers that are told of a sample."""
    if told is None or isinstance(told, np.ndarray):
        return [] if told is None else [told]
    return [getattr(told, field.name) for field in attrs.fields(type(told))]


@examples(0.2)
@given(
    st.lists(st.tuples(PROMPT, st.sampled_from(list(KINDS)), st.integers(0, 6)), min_size=1, max_size=5),
    st.dictionaries(st.integers(0, 4), st.integers(1, 12), max_size=2),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([11, 40]),
    st.integers(0, 2),
    st.sampled_from([1, 2, 5]),
)
def test_asynchronous_is_synchronous(
    xgrammar: None,
    unchecked_records: None,
    asked: list[tuple[Tokens, str, int]],
    aborted: Mapping[int, int],
    budget: int,
    num_blocks: int,
    steps_ahead: int,
    unroll: int,
) -> None:
    """Penalties, grammars, log-probabilities, stop strings, processors: begun at some turn, thrown out of a small
    cache, some aborted at another turn, any number of steps ahead, several in one replay. Who is not aborted gets what
    it gets alone; who is has the beginning of that."""
    sizes = {"max_num_batched_tokens": budget, "kv_cache_bytes": num_blocks * 1024}
    results = dict[str, RequestOutput]()
    with engine(**sizes, steps_ahead=steps_ahead, **unrolled(unroll)) as own:
        if unroll > 1:
            capture_samplers(own, unroll)
        for turn in range(200):
            for i, (prompt, kind, begins) in enumerate(asked):
                if begins == turn:
                    own.add_request(str(i), prompt, KINDS[kind], stream=0)
            told = own.abort([str(i) for i, when in aborted.items() if when == turn])
            results |= {result.req_id: result for result in [*told, *own.step()]}
            if turn > 12 and not own.has_unfinished():
                break
        assert own.num_free_blocks == own.limits.num_blocks[0] - 1
    for i, (prompt, kind, _) in enumerate(asked):
        expected, found = alone(prompt, kind), results.get(str(i))
        if found is None or found.finish_reason == "abort":
            assert i in aborted
            tokens = () if found is None else found.token_ids
            assert expected.token_ids[: len(tokens)] == tokens
        else:
            assert_same(found, expected)


@examples(0.15)
@given(PROMPT, PROMPT, st.sampled_from(["plain", "penalties", "grammar", "stop strings"]), st.integers(0, 8),
       st.integers(0, 2), st.booleans())  # fmt: skip
def test_a_request_that_comes_again_is_a_fresh_one(
    xgrammar: None,
    unchecked_records: None,
    first: Tokens,
    second: Tokens,
    kind: str,
    num_turns: int,
    steps_ahead: int,
    beside: bool,
) -> None:
    """Aborted or ended after any number of turns, steps of its own on their way, and submitted under the same id."""
    with engine(steps_ahead=steps_ahead) as own:
        own.add_request("r", first, KINDS["penalties"], stream=0)
        if beside:
            own.add_request("s", first, KINDS["grammar"], stream=0)
        results = dict[str, RequestOutput]()
        for _ in range(num_turns):
            results |= {result.req_id: result for result in own.step()}
        own.abort("r")
        own.add_request("r", second, KINDS[kind], stream=0)
        results |= drained(own)
    assert_same(results["r"], alone(second, kind))
    if beside:
        assert_same(results["s"], alone(first, "grammar"))


@examples(0.15)
@given(
    PROMPT,
    st.integers(2, 4),
    st.integers(-(2**40), 2**40),
    st.sampled_from([5, 64]),
    st.integers(0, 1),
    st.none() | st.integers(0, 2),
)
def test_samples_of_one_prompt_with_one_seed_differ_and_come_again(
    unchecked_records: None,
    prompt: Tokens,
    n: int,
    seed: int,
    budget: int,
    steps_ahead: int,
    scored: int | None,
) -> None:
    """Whatever the schedule: sample i is what stream i gives alone; with log-probabilities of the prompt they share."""
    params = SamplingParams(n=n, seed=seed, max_tokens=10, ignore_eos=True, prompt_logprobs=scored)
    with engine(EVEN, max_num_batched_tokens=budget, steps_ahead=steps_ahead) as own:
        (found,) = own.generate([prompt], params, progress=False)
    with engine(EVEN) as own:
        for i in range(n):
            own.add_request(str(i), prompt, replace(params, n=1, prompt_logprobs=None), stream=i)
        single = drained(own)
        (again,) = own.generate([prompt], replace(params, prompt_logprobs=-1), progress=False)
    samples = [output.token_ids for output in found.outputs]
    assert samples == [single[str(i)].token_ids for i in range(n)]
    assert samples == [output.token_ids for output in again.outputs]
    assert len(set(samples)) == n
    if scored is not None:
        assert found.prompt_logprobs is not None and again.prompt_logprobs is not None
        for token, ours, theirs in zip(
            prompt[1:], found.prompt_logprobs[1:], again.prompt_logprobs[1:], strict=True
        ):
            assert ours is not None and theirs is not None
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)


@examples(0.15)
@given(
    st.lists(st.integers(0, runners.VOCAB - 1), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, runners.VOCAB - 1), max_size=3), min_size=1, max_size=2),
    st.sampled_from([replace(own, max_tokens=3) for own in (runners.GREEDY, *runners.KINDS[2:4])]),
    st.integers(2, 40),
    st.sampled_from([None, 0, 1]),
)
def test_a_streaming_update_is_a_longer_prompt(
    unchecked_records: None,
    prompt: list[int],
    more: list[list[int]],
    params: SamplingParams,
    budget: int,
    steps_ahead: int | None,
) -> None:
    """Once and twice, beside another request, in chunks: as a request whose prompt is all that was said by then."""
    own = runners.runner(async_scheduling=steps_ahead is not None)
    scheduler = runners.upstream(budget=budget)
    scheduler.add("a", prompt, params)
    scheduler.add("b", (4, 4), runners.GREEDY)
    client, said = scheduler.clients["a"], tuple(prompt)
    for further in [None, *more]:
        name = "a" if params.seed is None else ""
        if further is not None:
            said = (*said, *client.outputs, *further)
            scheduler.go_on("a", further)
            name = f"{name} after {len(said)} tokens"
        while client.status != "finished":
            output = scheduler.schedule()
            assert own.execute_model(output) is None
            answer: Any = own.sample_tokens()
            scheduler.update(output, answer if steps_ahead is None else answer.get_output())
        assert tuple(client.outputs) == runners.alone(said, params, name)
        assert client.prompt == list(said)
    serve(own, scheduler)
    assert tuple(scheduler.clients["b"].outputs) == runners.alone((4, 4), runners.GREEDY, "b")


@examples(0.15)
@given(
    st.lists(st.integers(0, runners.VOCAB - 1), min_size=1, max_size=9),
    st.lists(st.integers(0, runners.VOCAB - 1), min_size=1, max_size=9),
    st.sampled_from(runners.KINDS),
    st.sampled_from(runners.KINDS),
    st.integers(1, 6),
    st.integers(3, 40),
)
def test_finished_and_submitted_anew_in_one_step_is_fresh(
    unchecked_records: None,
    first: list[int],
    second: list[int],
    params: SamplingParams,
    then: SamplingParams,
    num_steps: int,
    budget: int,
) -> None:
    """The scheduler names the id among the finished and among the new: the old one leaves first, and wholly."""
    own, scheduler = runners.runner(), runners.upstream(budget=budget)
    scheduler.add("a", first, params)
    old = scheduler.clients["a"]
    for _ in range(num_steps):
        if old.status == "finished":
            break
        output = scheduler.schedule()
        assert own.execute_model(output) is None
        scheduler.update(output, own.sample_tokens())  # type: ignore[arg-type]
    scheduler._free(old)
    scheduler.finished.add("a")
    scheduler.add("a", second, then)
    results = serve(own, scheduler)
    assert tuple(scheduler.clients["a"].outputs) == runners.alone(tuple(second), then, "a")
    told = [result.prompt_logprobs_dict["a"] for result in results if "a" in result.prompt_logprobs_dict]
    assert len(told) == (then.prompt_logprobs is not None)
    assert all(len(table.selected_token_ranks) == len(second) - 1 for table in told if table is not None)
