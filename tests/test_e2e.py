"""SmolLM2 in float32 through the engine, against what other engines recorded.

Tokens are compared exactly and log-probabilities to the difference of two float32 implementations; in bfloat16
outputs part at near-ties, so nothing is asserted there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.results import RequestOutput
from tests.smollm2 import needs_smollm2

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=5)


@pytest.fixture(scope="module")
def recorded(e2e_dir: Path) -> dict[str, list[dict[str, Any]]]:
    needs_smollm2()
    names = ("hf_f32", "vllm_f32_eager")
    return {name: json.loads((e2e_dir / f"{name}.json").read_text())["outputs"] for name in names}


@pytest.fixture(scope="module")
def results(recorded: dict[str, list[dict[str, Any]]]) -> dict[str, list[RequestOutput]]:
    """Every prompt alone, all in one batch, and all in chunks of 16 tokens a step."""
    prompts = [output["prompt_token_ids"] for output in recorded["hf_f32"]]
    runs = {}
    with Engine(max_model_len=256, enable_prefix_caching=False) as engine:
        runs["alone"] = [engine.generate(prompt, GREEDY, progress=False)[0] for prompt in prompts]
        runs["batched"] = engine.generate(prompts, GREEDY, progress=False)
    with Engine(max_model_len=256, max_num_batched_tokens=16) as engine:
        runs["chunked"] = engine.generate(prompts, GREEDY, progress=False)
    return runs


@pytest.mark.parametrize("run", ["alone", "batched", "chunked"])
@pytest.mark.parametrize("peer", ["hf_f32", "vllm_f32_eager"])
def test_greedy_tokens_are_those_recorded(
    results: dict[str, list[RequestOutput]], recorded: dict[str, list[dict[str, Any]]], run: str, peer: str
) -> None:
    expected = [tuple(output["token_ids"]) for output in recorded[peer]]

    assert [result.token_ids for result in results[run]] == expected


@pytest.mark.parametrize("run", ["alone", "batched", "chunked"])
@pytest.mark.parametrize(("peer", "bound"), [("hf_f32", 1e-4), ("vllm_f32_eager", 2e-4)])
def test_logprobs_are_those_recorded(
    results: dict[str, list[RequestOutput]],
    recorded: dict[str, list[dict[str, Any]]],
    run: str,
    peer: str,
    bound: float,
) -> None:
    num_compared = 0
    for result, output in zip(results[run], recorded[peer], strict=True):
        for ours, theirs in zip(_by_token(result), output["logprobs"], strict=True):
            for token, logprob, _ in theirs:
                if token in ours:
                    assert abs(ours[token] - logprob) < bound
                    num_compared += 1
    num_tokens = sum(len(output["token_ids"]) for output in recorded[peer])
    assert num_compared >= 4 * num_tokens  # five listed at each place, and the fifth may differ


def _by_token(result: RequestOutput) -> Iterator[dict[int, float]]:
    assert result.logprobs is not None
    for ids, values in zip(
        result.logprobs.token_ids.tolist(), result.logprobs.logprobs.tolist(), strict=True
    ):
        yield dict(zip(ids, values, strict=True))
