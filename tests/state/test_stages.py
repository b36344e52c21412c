"""A model split into stages, a runner for each: together they do what one runner of the whole model does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.dispatch import dispatch_keys
from purestep.pure.errors import InvalidParameterError, SchedulerOutputError, StaleStateError
from purestep.pure.models.config import AttentionConfig
from purestep.pure.models.llama import llama
from purestep.pure.models.stages import split
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.inputs import IntermediateTensors
from purestep.pure.records.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from purestep.state.buffers import PersistentBuffers
from purestep.state.run import BoundStep
from purestep.state.runner import GPUModelRunner
from tests.profiles import examples
from tests.state.test_runner import BLOCK_SIZE, GREEDY, LONGEST, REQUESTS, VOCAB, upstream
from tests.state.upstream import serve
from tests.tiny import tiny_llama

PLAIN, PARAMS = tiny_llama(vocab_size=VOCAB, groups=(0, 0, 0))
WINDOWS: AttentionConfig = replace(PLAIN.config.attention, sliding_window=(None, 3, 5))
MODELS = {
    "plain": PLAIN,
    "windows": llama(replace(PLAIN.config, attention=WINDOWS)),
    "tied": llama(replace(PLAIN.config, tied_embeddings=True)),
}
LIMITS = BatchLimits(4, LONGEST, VOCAB, (BLOCK_SIZE,), (64,))


def runner(model: Any, **changes: Any) -> GPUModelRunner:
    buffers = PersistentBuffers(model, LIMITS, dtype=PARAMS.tree["norm"].dtype)
    return GPUModelRunner(BoundStep(buffers, model, PARAMS, donating), **changes)


def stages(model: Any, first_layers: Sequence[int], **changes: Any) -> list[GPUModelRunner]:
    models, last = split(model, first_layers), len(first_layers)
    return [
        runner(own, is_first_stage=i == 0, is_last_stage=i == last, **changes) for i, own in enumerate(models)
    ]


class Pipeline:
    """Runners of stages as one: what one hands over the next takes in, and what the last samples all are told."""

    def __init__(self, runners: list[GPUModelRunner]) -> None:
        self.runners = runners

    def execute_model(self, scheduler_output: Any) -> Any:
        taken: Any = None
        for own in self.runners:
            taken = own.execute_model(scheduler_output, None if taken is EMPTY_MODEL_RUNNER_OUTPUT else taken)
        return taken

    def sample_tokens(self) -> ModelRunnerOutput:
        *others, last = self.runners
        sampled: Any = last.sample_tokens()
        told = sampled if isinstance(sampled, ModelRunnerOutput) else sampled.get_output()
        for own in others:
            assert own.sample_tokens(sampled=told) is told
        return told


def told_of(own: Any, requests: Any, **how: Any) -> tuple[list[list[int]], list[ModelRunnerOutput]]:
    scheduler = upstream(**how)
    for i, (prompt, params) in enumerate(requests):
        scheduler.add(f"r{i}", prompt, params)
    results = serve(own, scheduler)
    return [client.outputs for client in scheduler.clients.values()], results


@examples(0.15)
@given(
    REQUESTS,
    st.integers(4, 40),
    st.none() | st.integers(0, 9),
    st.sampled_from(list(MODELS)),
    st.sampled_from([(1,), (2,), (1, 2)]),
    st.booleans(),
)
def test_stages_together_are_the_whole_model(
    unchecked_records: None,
    requests: Any,
    budget: int,
    seed: int | None,
    name: str,
    first_layers: tuple[int, ...],
    is_async: bool,
) -> None:
    """In two parts and three, chunks, preemption: tokens and log-probabilities, of prompts too; and equal ledgers."""
    how = {"budget": budget, "seed": seed}
    parts = stages(MODELS[name], first_layers, async_scheduling=is_async)
    ours, said = told_of(Pipeline(parts), requests, **how)
    whole, expected = told_of(runner(MODELS[name]), requests, **how)
    assert ours == whole
    for mine, other in zip(said, expected, strict=True):
        assert mine.sampled_token_ids == other.sampled_token_ids
        assert mine.prompt_logprobs_dict.keys() == other.prompt_logprobs_dict.keys()
        if mine.logprobs is not None and other.logprobs is not None:
            torch.testing.assert_close(
                torch.from_numpy(mine.logprobs.logprobs), torch.from_numpy(other.logprobs.logprobs)
            )
    first, *_, last = (own._now.leased.value.ledger for own in parts)
    assert torch.equal(first.num_computed_tokens, last.num_computed_tokens)
    assert torch.equal(first.num_known_tokens, last.num_known_tokens)


def begun(**changes: Any) -> tuple[list[GPUModelRunner], Any]:
    scheduler = upstream()
    scheduler.add("a", (5, 9, 2), replace(GREEDY, **changes))
    return stages(PLAIN, (1,)), scheduler.schedule()


def test_what_is_handed_over_is_what_the_layers_before_give() -> None:
    (first, _), output = begun()
    handed = first.execute_model(output)
    assert isinstance(handed, IntermediateTensors)
    assert {name: list(tensor.shape) for name, tensor in handed.tensors.items()} == {
        "hidden_states": [3, 8],
        "residual": [3, 8],
    }
    cut = handed[1:]
    assert torch.equal(cut.tensors["residual"], handed.tensors["residual"][1:])


def test_activations_that_are_missing_or_odd_are_refused_and_nothing_has_changed() -> None:
    (first, last), output = begun()
    handed = first.execute_model(output)
    assert isinstance(handed, IntermediateTensors)
    odd = IntermediateTensors({**handed.tensors, "more": handed.tensors["residual"]})
    for wrong in (None, handed[:2], odd, IntermediateTensors({})):
        with pytest.raises(SchedulerOutputError, match="reads hidden_states and residual"):
            last.execute_model(output, wrong)
    assert last.execute_model(output, handed) is None
    with pytest.raises(SchedulerOutputError, match="no piece reads them"):
        runner(PLAIN).execute_model(output, handed)


def test_tokens_are_told_to_every_stage_but_the_last() -> None:
    (first, last), output = begun()
    handed: Any = first.execute_model(output)
    with pytest.raises(StaleStateError, match=r"sample_tokens\(\) must be called"):
        first.execute_model(output)
    last.execute_model(output, handed)
    sampled: Any = last.sample_tokens()
    others = replace(sampled, req_ids=("b",), req_id_to_index={"b": 0})
    with pytest.raises(SchedulerOutputError, match=r"the step is of \['a'\]"):
        first.sample_tokens(sampled=others)
    with pytest.raises(SchedulerOutputError, match="every other one is told"):
        first.sample_tokens()
    assert first.sample_tokens(sampled=sampled) is sampled
    whole = runner(PLAIN)
    assert whole.execute_model(output) is None
    with pytest.raises(SchedulerOutputError, match="samples by itself"):
        whole.sample_tokens(sampled=sampled)
    assert whole.sample_tokens() is not None


def test_a_stage_holds_the_caches_of_its_layers_and_no_more() -> None:
    first, middle, last = split(MODELS["windows"], (1, 2))
    assert [len(own.kv_layers) for own in (first, middle, last)] == [1, 1, 1]
    assert [own.kv_layers[0].sliding_window for own in (first, middle, last)] == [None, 3, 5]
    assert (first.head, middle.head) == (None, None) and last.head is not None
    assert {path[1] for path in middle.linear_paths} == {1}


@pytest.mark.parametrize("first_layers", [(0,), (3,), (2, 1), (1, 1)])
def test_stages_without_layers_are_refused(first_layers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="from 1 to 2"):
        split(PLAIN, first_layers)


def test_what_can_not_be_split_or_captured_is_refused() -> None:
    (part, _), keys = split(PLAIN, (2,)), dispatch_keys(DispatchConfig((2, 4), 4), CUDAGraphMode.PIECEWISE)
    with pytest.raises(InvalidParameterError, match="can not be split"):
        split(part, (1,))
    with pytest.raises(InvalidParameterError, match="runs eagerly"):
        runner(part, is_last_stage=False, dispatch_keys=keys)
