"""Recorded runs of upstream's engine, replayed: `pytest tests/test_traces.py --traces DIR --models DIR`.

The last line of the run says how many were replayed, and which need what the step does not have.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.state.loading.load import load_model
from purestep.state.loading.loaded import LoadedModel
from tests.last_lines import say_last
from tests.runner_replay import RunnerReplay
from tests.trace_replay import Json, Replay, needs_the_runner, why_not

REPLAYED = (
    "aborts",
    "async_batch",
    "async_staggered",
    "async_stop_penalties",
    "chunked_prefill_small",
    "cudagraph_full_and_piecewise",
    "cudagraph_full_decode_only",
    "cudagraph_ngram",
    "cudagraph_piecewise",
    "draft_model",
    "logprobs",
    "max_model_len_stop",
    "max_seqs_queue",
    "max_tokens_one",
    "mixed_sampling",
    "ngram_abort_stop",
    "ngram_budget_skip",
    "ngram_chunked",
    "ngram_max_len",
    "ngram_min1",
    "ngram_prefix_cache",
    "ngram_random_model",
    "ngram_seeded",
    "preempt_heavy",
    "preempt_resume",
    "preempt_seeded",
    "prefix_cache_hits",
    "qwen3_batch",
    "reorder_decode_first",
    "reset_prefix_running",
    "seeded_all",
    "single_bs32",
    "single_greedy",
    "smollm_batch",
    "smollm_grammar",
    "smollm_ngram",
    "staggered",
    "stop_tokens",
)
ONLY_THE_RUNNER = ("async_batch", "async_staggered", "async_stop_penalties", "smollm_grammar")
SPECULATION = (
    "cudagraph_ngram",
    "draft_model",
    "ngram_abort_stop",
    "ngram_budget_skip",
    "ngram_chunked",
    "ngram_max_len",
    "ngram_min1",
    "ngram_prefix_cache",
    "ngram_random_model",
    "ngram_seeded",
    "smollm_ngram",
)
THROUGH_THE_RUNNER = (*ONLY_THE_RUNNER, *SPECULATION, "logprobs")
NUM_TRACES = 41

Loader = Callable[[str], LoadedModel]


def read(folder: Path, name: str) -> Json:
    trace: Json = json.loads((folder / f"{name}.json").read_text())
    return trace


@pytest.fixture(params=["reference", "donating"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels that the step is replayed with."""
    return {"reference": reference, "donating": donating}[request.param]


@pytest.fixture(scope="module")
def load(models_dir: Path) -> Loader:
    """Models by the name that a trace gives them, each read once."""
    loaded: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in loaded:
            loaded[name] = load_model(None if name == "smollm2" else models_dir / name)
        return loaded[name]

    return get


@pytest.fixture(scope="module")
def passed(traces_dir: Path, pytestconfig: pytest.Config) -> Iterator[set[str]]:
    """Names of the runs that were replayed; told at the end, with those that can not be."""
    names: set[str] = set()
    yield names
    recorded = sorted(path.stem for path in traces_dir.glob("*.json"))
    left_out = [name for name in recorded if why_not(read(traces_dir, name))]
    say_last(pytestconfig, f"replayed {len(names)}, not supported {len(left_out)}: {', '.join(left_out)}")


def test_every_other_trace_needs_what_the_step_does_not_have(traces_dir: Path) -> None:
    """Exactly these traces can be replayed: one that is left out says why."""
    reasons = {path.stem: why_not(read(traces_dir, path.stem)) for path in traces_dir.glob("*.json")}
    assert len(reasons) == NUM_TRACES
    assert {name for name, reason in reasons.items() if reason is None} == set(REPLAYED)


@pytest.mark.parametrize("name", [name for name in REPLAYED if name not in ONLY_THE_RUNNER])
def test_a_recorded_run_is_reproduced(
    name: str, traces_dir: Path, load: Loader, kernels: Kernels, passed: set[str]
) -> None:
    """Fed the recorded SchedulerOutputs, our loop has the recorded batch, inputs, logits and tokens at every step."""
    trace = read(traces_dir, name)
    Replay(trace, load(trace["meta"]["model"]), kernels).run()
    passed.add(name)


@pytest.mark.parametrize("name", THROUGH_THE_RUNNER)
def test_a_recorded_run_is_reproduced_by_the_runner(
    name: str, traces_dir: Path, load: Loader, passed: set[str]
) -> None:
    """Its two calls, in upstream's order and with upstream's kind of objects, give what is recorded."""
    trace = read(traces_dir, name)
    assert needs_the_runner(trace) == (name in ONLY_THE_RUNNER)
    RunnerReplay(trace, load(trace["meta"]["model"])).run()
    passed.add(name)
