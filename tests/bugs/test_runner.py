"""What a scheduler is told of a step is of that step, of the right request, and was computed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.initial import initial_state
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import InputBatch
from purestep.pure.records.outputs import LogprobsTensors, ModelRunnerOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.step import execute
from purestep.pure.update import update_states
from purestep.state.runner import GPUModelRunner
from tests.state.test_runner import LIMITS, MODEL, PARAMS, VOCAB, alone, runner, served, upstream
from tests.state.upstream import serve
from tests.tiny import new_request, scheduled

SHARED = (5, 9, 2, 7, 1, 1, 3, 8)
SCORED = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)


def scored(
    own: GPUModelRunner, req_id: str, prompt: tuple[int, ...], blocks: tuple[int, ...], computed: int
) -> Any:
    """The prompt's table, of a request that is admitted with so many computed tokens, and run in two chunks."""
    new = new_request(req_id, prompt, (blocks,), SCORED, num_computed_tokens=computed)
    first = scheduled(new, counts={req_id: 2}, finished=tuple(own.input_batch.row_of))
    assert told(own, first).prompt_logprobs_dict == {}
    batch, count = own.input_batch, len(prompt) - computed - 2
    cached = SimpleNamespace(
        req_ids=[req_id], new_block_ids=[None], num_computed_tokens=[computed + 2], num_output_tokens=[0]
    )
    second = {"scheduled_cached_reqs": cached, "num_scheduled_tokens": {req_id: count}}
    assert batch.row_of.keys() == {req_id}
    return told(own, second).prompt_logprobs_dict[req_id]


def told(own: GPUModelRunner, output: SchedulerOutput | dict[str, Any]) -> ModelRunnerOutput:
    assert own.execute_model(output) is None
    result = own.sample_tokens()
    assert isinstance(result, ModelRunnerOutput)
    return result


def whole_forward(prompt: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] after every token of a prompt that is run at once."""
    batch = update_states(
        InputBatch.make_empty(LIMITS),
        scheduled(new_request("r", prompt, ((1, 2, 3, 4),)), counts={"r": len(prompt)}),
    )
    plan = plan_step(batch, InputBatch.make_empty(LIMITS))
    state = replace(initial_state(MODEL, LIMITS, dtype=torch.float64), inbox=plan.inbox.to("cpu"))
    executed = execute(MODEL, PARAMS, state, kernels=reference)
    logits = reference.linear(executed.hidden_states, PARAMS.tree["head"], None)
    return logits.log_softmax(-1)


def test_log_probabilities_of_cached_prompt_tokens_are_absent_and_the_others_are_computed() -> None:
    """Two prompts share two blocks; whichever comes second finds them in the cache, and is told so."""
    prompts = {"a": (*SHARED, 4, 6, 6, 12), "b": (*SHARED, 11, 2, 10, 9)}
    for order in ("ab", "ba"):
        own = runner(kernels=donating)
        for place, name in enumerate(order):
            prompt, computed = prompts[name], 0 if place == 0 else len(SHARED)
            table: LogprobsTensors = scored(own, name, prompt, (1, 2, 3 + place), computed)
            expected = whole_forward(prompt)
            assert len(table.logprobs) == len(prompt) - 1
            for row, target in enumerate(prompt[1:]):
                if row < computed:
                    assert np.isnan(table.logprobs[row]).all()
                    assert (table.logprob_token_ids[row] == -1).all() and table.selected_token_ranks[row] == 0
                    continue
                assert table.logprob_token_ids[row, 0] == target
                for token, value in zip(table.logprob_token_ids[row], table.logprobs[row], strict=True):
                    assert abs(value - float(expected[row, token])) < 1e-5
                assert table.selected_token_ranks[row] == int((expected[row] >= expected[row, target]).sum())


def test_penalties_count_the_token_that_is_still_on_its_way() -> None:
    """One id is favoured, and each time that it comes it costs: one and two steps ahead as when all is known."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=2.0,
        logit_bias={7: 8.0, 3: 7.0},
    )
    requests = [((5, 9, 2), params), ((1, 1), params), ((4,), replace(params, temperature=0.9, seed=3))]
    expected = [alone(prompt, own_params, f"r{i}") for i, (prompt, own_params) in enumerate(requests)]
    assert all(tokens.count(7) > 1 and len(set(tokens)) > 2 for tokens in expected[:2])
    for steps_ahead in (None, 1, 2):
        own = runner(kernels=donating, async_scheduling=steps_ahead is not None)
        tokens, _ = served(own, requests, steps_ahead or 0)
        assert tokens == expected


def test_a_grammar_masks_its_own_request_and_no_other() -> None:
    """Two grammars of disjoint alphabets, listed in another order than the batch, between requests that have none."""
    alphabets = {"r1": {2, 3, 5}, "r3": {8, 9, 13}}
    params = SamplingParams(temperature=0.0, max_tokens=5)
    prompts = [(5, 9, 2), (5, 9, 2), (1, 4), (1, 4)]
    own, scheduler = runner(kernels=donating), upstream()
    for i, prompt in enumerate(prompts):
        scheduler.add(f"r{i}", prompt, params)
    bits = [sum(1 << token for token in alphabets[name]) for name in ("r3", "r1")]
    grammar = SimpleNamespace(
        structured_output_request_ids=["r3", "r1"], grammar_bitmask=np.array(bits, np.int32)[:, None]
    )
    for _ in range(5):
        output = scheduler.schedule()
        assert own.execute_model(output) is None
        result = own.sample_tokens(grammar)
        assert isinstance(result, ModelRunnerOutput)
        scheduler.update(output, result)
    assert serve(own, scheduler) == []

    outputs = {name: client.outputs for name, client in scheduler.clients.items()}
    assert {name: len(tokens) for name, tokens in outputs.items()} == dict.fromkeys(outputs, 5)
    for name, alphabet in alphabets.items():
        assert set(outputs[name]) <= alphabet
    assert tuple(outputs["r0"]) == alone(prompts[0], params, "r0")
    assert tuple(outputs["r2"]) == alone(prompts[2], params, "r2")
    assert max(token for tokens in outputs.values() for token in tokens) < VOCAB
