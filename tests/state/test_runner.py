"""The object with vLLM's two calls: driven by a scheduler as upstream's, with upstream's kind of objects."""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.reference.logprobs import lowered
from purestep.pure.dispatch import dispatch_keys
from purestep.pure.errors import (
    InvalidParameterError,
    ProcessorError,
    SchedulerOutputError,
    StaleStateError,
)
from purestep.pure.interop import stream_of
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.logits_processor import LogitsProcessor
from purestep.pure.records.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import GrammarOutput
from purestep.state.buffers import PersistentBuffers
from purestep.state.captures import graph_keys
from purestep.state.run import BoundStep
from purestep.state.runner import GPUModelRunner
from purestep.state.seams import KVConnector, RoutedExperts
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs
from tests.state.upstream import Upstream, serve
from tests.tiny import Loop, new_request, scheduled, tiny_llama

VOCAB, LONGEST, BLOCK_SIZE = 16, 32, 4
MODEL, PARAMS = tiny_llama(vocab_size=VOCAB)
LIMITS = BatchLimits(4, LONGEST, VOCAB, (BLOCK_SIZE,), (64,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
KINDS = (
    GREEDY,
    SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(3, 5), logprobs=2),
    SamplingParams(seed=5, temperature=0.8, top_k=6, max_tokens=7),
    SamplingParams(temperature=1.2, max_tokens=8, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(
        temperature=0.0, max_tokens=None, min_tokens=2, stop_token_ids=(1, 2, 4), prompt_logprobs=1
    ),
)
PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)
REQUESTS = st.lists(st.tuples(PROMPT, st.sampled_from(KINDS)), min_size=1, max_size=4)


def runner(*, kernels: Any = donating, graph_api: Any = None, **changes: Any) -> GPUModelRunner:
    buffers = PersistentBuffers(MODEL, LIMITS, dtype=PARAMS.tree["norm"].dtype)
    return GPUModelRunner(BoundStep(buffers, MODEL, PARAMS, kernels, graph_api), **changes)


def upstream(*, budget: int = 64, seed: int | None = None) -> Upstream:
    rng = None if seed is None else Random(seed)
    return Upstream(num_blocks=64, block_size=BLOCK_SIZE, budget=budget, max_model_len=LONGEST, rng=rng)


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams, name: str) -> tuple[int, ...]:
    """The outputs of a request that has a device for itself, by the stages and the kernels that define them.

    `name` is that of its random stream; with a seed it is in stream 0, unless the name says that it goes on.
    """
    loop = Loop(MODEL, PARAMS, LIMITS)
    stream = stream_of(name) if name and (params.seed is None or " " in name) else 0
    blocks = (tuple(range(1, 1 + LONGEST // BLOCK_SIZE)),)
    new = new_request("r", prompt, blocks, params, stream=stream)
    output = loop.step(scheduled(new, counts={"r": len(prompt)}))
    outputs = loop.tokens("r")[len(prompt) :]
    while output.active[0] and outputs[-1] not in params.stop_token_ids:
        output = loop.decode("r")
        outputs = loop.tokens("r")[len(prompt) :]
    return tuple(outputs)


def served(
    own: GPUModelRunner,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    steps_ahead: int,
    **how: Any,
) -> tuple[list[tuple[int, ...]], list[ModelRunnerOutput]]:
    """What each request got, and all that was said on the way."""
    scheduler = upstream(**how)
    for i, (prompt, params) in enumerate(requests):
        scheduler.add(f"r{i}", prompt, params)
    results = serve(own, scheduler, steps_ahead=steps_ahead)
    return [tuple(client.outputs) for client in scheduler.clients.values()], results


@examples(0.15)
@given(REQUESTS, st.integers(4, 40), st.none() | st.integers(0, 9), st.sampled_from([None, 0, 1]))
def test_every_request_gets_what_it_gets_alone(
    unchecked_records: None,
    requests: list[tuple[list[int], SamplingParams]],
    budget: int,
    seed: int | None,
    steps_ahead: int | None,
) -> None:
    """In chunks, with preemptions; synchronously (None), and with the next step begun before one is known or after."""
    own = runner(async_scheduling=steps_ahead is not None)
    tokens, _ = served(own, requests, steps_ahead or 0, budget=budget, seed=seed)

    assert tokens == [alone(tuple(p), params, f"r{i}") for i, (p, params) in enumerate(requests)]


@examples(0.06)
@given(REQUESTS, st.integers(4, 40))
def test_what_is_waited_for_says_what_is_said_at_once(
    unchecked_records: None, requests: list[tuple[list[int], SamplingParams]], budget: int
) -> None:
    """The same objects of a step, log-probabilities of samples and prompts included, and any number of times."""
    results = [
        served(runner(async_scheduling=is_async), requests, 0, budget=budget)[1] for is_async in (False, True)
    ]
    for ours, theirs in zip(*results, strict=True):
        assert ours.req_ids == theirs.req_ids
        assert ours.sampled_token_ids == theirs.sampled_token_ids
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
                assert np.array_equal(getattr(ours.logprobs, name), getattr(theirs.logprobs, name))
        assert ours.prompt_logprobs_dict.keys() == theirs.prompt_logprobs_dict.keys()
        for req_id, table in ours.prompt_logprobs_dict.items():
            other = theirs.prompt_logprobs_dict[req_id]
            assert table is not None and other is not None
            assert np.array_equal(table.logprob_token_ids, other.logprob_token_ids)
            assert np.array_equal(table.logprobs, other.logprobs)
    told = sum(len(result.prompt_logprobs_dict) for result in results[0])
    assert told == sum(params.prompt_logprobs is not None for _, params in requests)


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE]
)
def test_captured_pieces_and_halves_give_the_same_tokens(mode: CUDAGraphMode) -> None:
    keys = dispatch_keys(DispatchConfig((2, 4, 8), 4), mode)
    api = FakeGraphs()
    own = runner(graph_api=api, dispatch_keys=keys, async_scheduling=True)
    assert own._bound.captured is not None
    own._bound.captured.capture(graph_keys(keys, two_phase=True))
    requests = [([5, 9, 2], GREEDY), ([1, 1, 3, 8], KINDS[2])]

    assert served(own, requests, 1)[0] == served(runner(), requests, 0)[0]
    assert api.num_replays > 0


def begun(own: GPUModelRunner, **params: Any) -> Upstream:
    """A step that was executed and not sampled."""
    scheduler = upstream()
    scheduler.add("a", (5, 9, 2), replace(GREEDY, **params))
    assert own.execute_model(scheduler.schedule()) is None
    return scheduler


def test_a_step_must_be_sampled_before_the_next_one_is_executed() -> None:
    """The error has upstream's words, comes before anything is touched, and the step can still be sampled."""
    own = runner()
    scheduler = begun(own)
    batch = own.input_batch
    with pytest.raises(
        StaleStateError,
        match=r"sample_tokens\(\) must be called after execute_model\(\) returns None\. The step of 1 requests",
    ):
        own.execute_model(scheduler.schedule())
    assert own.input_batch is batch
    result = own.sample_tokens()
    assert isinstance(result, ModelRunnerOutput)
    assert result.sampled_token_ids == [[alone((5, 9, 2), GREEDY, "a")[0]]]
    assert own.execute_model_state is None


def test_a_step_must_be_executed_before_it_is_sampled() -> None:
    """Nothing was executed; it was sampled already; there was nothing to sample."""
    own = runner()
    with pytest.raises(StaleStateError, match=r"execute_model\(\) must return None before sample_tokens"):
        own.sample_tokens()
    begun(own)
    own.sample_tokens()
    with pytest.raises(StaleStateError, match=r"execute_model\(\) must return None before"):
        own.sample_tokens()


def test_a_contradiction_is_refused_and_the_right_step_runs() -> None:
    own, scheduler = runner(), upstream()
    scheduler.add("a", (5, 9, 2), GREEDY)
    right = scheduler.schedule()
    wrong = SimpleNamespace(**vars(right) | {"num_scheduled_tokens": {"b": 3}})
    odd = SimpleNamespace(**vars(right) | {"total_num_scheduled_tokens": 4})

    for output in (wrong, odd):
        with pytest.raises(SchedulerOutputError):
            own.execute_model(output)
    with pytest.raises(SchedulerOutputError, match="intermediate_tensors"):
        own.execute_model(right, IntermediateTensors({}))
    assert own.execute_model(right) is None
    assert isinstance(own.sample_tokens(), ModelRunnerOutput)


def test_masks_that_do_not_fit_are_refused_and_the_step_can_be_sampled_with_right_ones() -> None:
    own = runner()
    begun(own)
    for shape in ((2, 1), (1, 2)):
        with pytest.raises(SchedulerOutputError, match=r"take \(1, 1\): send 1 \+ drafts masks"):
            own.sample_tokens(GrammarOutput(("a",), np.zeros(shape, np.int32)))
    result = own.sample_tokens(GrammarOutput(("a",), np.array([[1 << 7]], np.int32)))
    assert isinstance(result, ModelRunnerOutput)
    assert result.sampled_token_ids == [[7]]


def test_a_processor_that_fails_is_named_and_the_step_runs_without_its_request() -> None:
    def fails(logits: Any, history: Any, params: Any) -> Any:
        raise ArithmeticError("out of luck")

    own, odd = runner(), replace(GREEDY, logits_processors=[LogitsProcessor(fails)])
    a, b = new_request("a", (5, 9, 2), ((1,),)), new_request("b", (4, 4), ((2,),), odd)
    assert own.execute_model(scheduled(a, b, counts={"a": 3, "b": 2})) is None
    with pytest.raises(ProcessorError, match="request 'b' can not go on after 0 outputs"):
        own.sample_tokens()
    assert own.execute_model(scheduled(a, counts={"a": 3})) is None
    result: Any = own.sample_tokens()
    assert result.sampled_token_ids == [[alone((5, 9, 2), GREEDY, "a")[0]]]


@pytest.mark.parametrize("is_async", [False, True])
def test_chosen_ids_and_kept_mass_are_told_of_the_steps_own_logits(is_async: bool) -> None:
    own = runner(async_scheduling=is_async)
    a = new_request("a", (5, 9, 2), ((1,),), replace(GREEDY, logprob_token_ids=(3, 7)))
    b = new_request("b", (4, 4), ((2,),), replace(KINDS[2], kept_mass=True))
    assert own.execute_model(scheduled(a, b, counts={"a": 3, "b": 2})) is None
    state = own.execute_model_state
    assert state is not None and state.logits is not None
    logits = state.logits.clone()
    answer: Any = own.sample_tokens()
    result = answer.get_output() if is_async else answer
    by = reference.score(logits, logits.argmax(-1), 0)[3]
    assert result.id_logprobs[0].tolist() == lowered(logits, by)[0, [3, 7]].tolist()
    whole = (logits[1] / 0.8).log_softmax(-1)
    kept = whole[whole >= whole.topk(6).values[-1]].logsumexp(-1)
    (token,) = result.sampled_token_ids[1]
    assert result.kept_mass.log_mass[1] == pytest.approx(float(kept), abs=1e-6)
    assert result.kept_mass.drawn_logprobs[1] == pytest.approx(float(whole[token] - kept), abs=1e-6)


@pytest.mark.parametrize("name", ["lay_out", "greedy", "advance"])
@pytest.mark.parametrize("steps_ahead", [None, 1])
def test_a_step_that_fails_half_way_is_sent_again(name: str, steps_ahead: int | None) -> None:
    """In either half, with another step on its way or none: it is as if it had not been begun."""
    countdown = [8]

    def fails(*arguments: Any, **keywords: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise RuntimeError("out of luck")
        return getattr(donating, name)(*arguments, **keywords)

    class Stubborn(GPUModelRunner):
        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
            self.output = scheduler_output
            try:
                return super().execute_model(scheduler_output)
            except RuntimeError:
                return super().execute_model(scheduler_output)

        def sample_tokens(self, grammar_output: Any = None) -> Any:
            try:
                return super().sample_tokens(grammar_output)
            except RuntimeError:
                assert super().execute_model(self.output) is None
                return super().sample_tokens(grammar_output)

    buffers = PersistentBuffers(MODEL, LIMITS, dtype=PARAMS.tree["norm"].dtype)
    bound = BoundStep(buffers, MODEL, PARAMS, replace(donating, **{name: fails}))
    own = Stubborn(bound, async_scheduling=steps_ahead is not None)
    requests = [((5, 9, 2, 7, 1), GREEDY), ((1, 4), KINDS[3]), ((2, 2, 8), KINDS[4])]

    tokens, _ = served(own, requests, steps_ahead or 0, budget=6)

    assert countdown[0] < 0
    assert tokens == [alone(p, params, f"r{i}") for i, (p, params) in enumerate(requests)]


def test_buffers_that_somebody_else_took_are_not_taken_back() -> None:
    own = runner()
    scheduler = begun(own)
    own._bound.buffers.lease()

    for call in (own.sample_tokens, own.sample_tokens):
        with pytest.raises(StaleStateError, match="consumed at step 2; the buffers are at step 3"):
            call()
    assert scheduler.schedule() is not None


def test_a_step_without_tokens_drops_who_finished_and_zeroes_blocks() -> None:
    own = runner()
    scheduler = begun(own, max_tokens=1)
    own.sample_tokens()
    zeroed = own._now.leased.value.kv[0]
    assert zeroed[scheduler.clients["a"].blocks[0]].any()
    scheduler.end(scheduler.clients["a"])
    output = scheduler.schedule()
    output.new_block_ids_to_zero = [1]
    assert own.execute_model(output) is EMPTY_MODEL_RUNNER_OUTPUT

    assert not own.input_batch.row_of and not own.input_batch.parked
    assert not own._now.leased.value.kv[0][1].any()
    scheduler.add("b", (3, 3), GREEDY)
    assert serve(own, scheduler)
    assert tuple(scheduler.clients["b"].outputs) == alone((3, 3), GREEDY, "b")


@pytest.mark.parametrize(
    "params", [GREEDY, replace(GREEDY, temperature=1.5, seed=3), replace(GREEDY, temperature=1.5)]
)
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_streaming_request_goes_on_with_a_longer_prompt(params: SamplingParams, steps_ahead: int) -> None:
    """Its outputs are prompt now, its counts begin anew; it has no row of its old life, and draws other noise."""
    own, scheduler = runner(async_scheduling=steps_ahead > 0), upstream()
    scheduler.add("a", (5, 9, 2), params)
    scheduler.add("b", (4, 4), GREEDY)
    client = scheduler.clients["a"]
    while client.status != "finished":
        output = scheduler.schedule()
        assert own.execute_model(output) is None
        answer: Any = own.sample_tokens()
        scheduler.update(output, answer.get_output() if steps_ahead else answer)
    first = tuple(client.outputs)
    scheduler.go_on("a", (7, 1))
    results = serve(own, scheduler, steps_ahead=steps_ahead)

    assert results
    longer = (5, 9, 2, *first, 7, 1)
    assert client.prompt == list(longer)
    name = f"{'' if params.seed is not None else 'a'} after {len(longer)} tokens"
    assert tuple(client.outputs) == alone(longer, params, name)
    assert tuple(scheduler.clients["b"].outputs) == alone((4, 4), GREEDY, "b")


def calls_of(run: Callable[[list[str]], GPUModelRunner]) -> list[str]:
    """What a runner calls out to, in order, in a step of tokens and in one without."""
    calls: list[str] = []
    own, scheduler = run(calls), upstream()
    scheduler.add("a", (5, 9, 2), replace(GREEDY, max_tokens=1))
    output = scheduler.schedule()
    assert own.execute_model(output) is None
    calls.append("|")
    result = own.sample_tokens()
    assert isinstance(result, ModelRunnerOutput)
    assert result.kv_connector_output == REPORT and result.routed_experts == "routed 3"
    scheduler.update(output, result)
    calls.append("|")
    empty = own.execute_model(scheduler.schedule())
    assert empty is not None and empty.kv_connector_output == REPORT and empty.req_ids == ()
    return calls


REPORT = KVConnectorOutput(finished_sending=frozenset({"x"}))


def outsiders(calls: list[str]) -> dict[str, Any]:
    def note(name: str, value: Any = None) -> Callable[..., Any]:
        return lambda *_: (calls.append(name), value)[1]

    connector = KVConnector(
        handle_preemptions=note("handle_preemptions"),
        begin=note("begin"),
        wait_for_save=note("wait_for_save"),
        collect=note("collect", REPORT),
        end=note("end"),
    )

    def take(inputs: Any, num_tokens: int) -> str:
        calls.append("take")
        assert len(inputs.positions) == num_tokens
        return f"routed {num_tokens}"

    return {
        "kv_connector": connector,
        "routed_experts": RoutedExperts(clear=note("clear"), take=take),
        "kernels": replace(
            donating,
            lay_out=lambda *a, **k: (calls.append("forward"), donating.lay_out(*a, **k))[1],
            advance=lambda *a, **k: (calls.append("sampled"), donating.advance(*a, **k))[1],
        ),
    }


def test_who_is_called_when() -> None:
    """Upstream's order: preemptions first, the forward pass between begin and save, experts when all is done."""
    assert calls_of(lambda calls: runner(**outsiders(calls))) == [
        *("clear", "handle_preemptions", "begin", "forward", "wait_for_save", "collect", "end", "|"),
        *("sampled", "take", "|"),
        *("clear", "handle_preemptions", "begin", "collect", "end"),
    ]


def test_a_drafter_is_called_once_tokens_are_known_and_its_keys_and_values_are_saved() -> None:
    def with_drafter(calls: list[str]) -> GPUModelRunner:
        def draft(kept: Any, histories: Any, budgets: Any) -> Any:
            calls.append("draft")
            return kept, ((),)

        return runner(drafter=HostDrafter(2, draft), **outsiders(calls))

    assert calls_of(with_drafter) == [
        *("clear", "handle_preemptions", "begin", "forward", "collect", "|"),
        *("sampled", "take", "draft", "wait_for_save", "end", "|"),
        *("clear", "handle_preemptions", "begin", "collect", "end"),
    ]


def test_a_drafter_is_given_what_is_known_and_what_it_kept() -> None:
    """Histories with the step's token, of requests that got one; no more drafts than may follow, or are wanted."""
    asked = list[tuple[Any, ...]]()

    def draft(kept: int, histories: Any, budgets: Any) -> Any:
        asked.append((kept, [own.tolist() for own in histories], budgets))
        return kept + 1, tuple((1, 2, 3)[: len(own)] for own in histories)

    own, scheduler = runner(drafter=HostDrafter(3, draft, lambda: 7)), upstream()
    assert own.take_draft_token_ids() is None
    scheduler.add("a", (5, 9, 2), replace(GREEDY, max_tokens=4))
    found = []
    for most in (3, 1):
        output = scheduler.schedule()
        output.num_spec_tokens_to_schedule = most
        own.execute_model(output)
        scheduler.update(output, own.sample_tokens())
        found.append(own.take_draft_token_ids())
    tokens = [5, 9, 2, *alone((5, 9, 2), GREEDY, "a")]
    assert asked == [(7, [tokens[:4]], [2]), (8, [tokens[:5]], [1])]
    assert [(f.req_ids, f.draft_token_ids) for f in found if f] == [(("a",), ((1, 2),)), (("a",), ((1,),))]
    with pytest.raises(InvalidParameterError, match="still on their way"):
        runner(drafter=HostDrafter(2, draft), async_scheduling=True)


@pytest.mark.parametrize(
    ("name", "expected"), [("lay_out", []), ("advance", ["wait_for_save", "collect", "end"])]
)
def test_a_connector_ends_its_step_wherever_that_fails(name: str, expected: list[str]) -> None:
    calls: list[str] = []

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    own = runner(**outsiders(calls) | {"kernels": replace(donating, **{name: fails})})
    scheduler = upstream()
    scheduler.add("a", (5, 9, 2), GREEDY)
    with pytest.raises(RuntimeError, match="out of luck"):
        own.execute_model(scheduler.schedule())
        own.sample_tokens()
    assert calls == ["clear", "handle_preemptions", "begin", *expected, "end"]
