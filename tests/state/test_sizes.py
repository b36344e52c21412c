"""What an engine is asked for is judged by kind and by what the device has."""

from typing import Any

import pytest
import torch

from purestep.pure.errors import InvalidParameterError, InvalidRequestError
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.layout import SamplerShape
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.setup import as_dtype
from purestep.state.sizes import Sizes
from tests.state.fake_graphs import FakeGraphs
from tests.state.test_drafters import MODEL, PARAMS, PROMPTS, with_weights

SMALL: dict[str, Any] = {"kv_cache_bytes": 2**14, "block_size": 4, "max_model_len": 32, "max_num_reqs": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_a_mode_may_be_said_by_its_name(mode: CUDAGraphMode) -> None:
    assert Sizes(cudagraph_mode=mode.name).cudagraph_mode is mode is Sizes(cudagraph_mode=mode).cudagraph_mode


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"cudagraph_mode": "full"},
            "cudagraph_mode='full': give a CUDAGraphMode or its name: NONE, PIECEWISE, FULL",
        ),
        ({"cudagraph_mode": 2}, "cudagraph_mode=2: give"),
        ({"gpu_memory_utilization": None}, "gpu_memory_utilization=None: it is a share"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9': it is a share"),
        ({"capture_sizes": 8}, "capture_sizes=8: give a tuple"),
        ({"capture_sizes": (1, "2")}, "capture_sizes=.*: give a tuple"),
        ({"capture_sizes": (0, 2)}, "capture_sizes=.*: give a tuple"),
        ({"capture_samplers": SamplerShape()}, "capture_samplers=.*: give a tuple of SamplerShape"),
        ({"capture_samplers": ("greedy",)}, "capture_samplers=.*: give a tuple of SamplerShape"),
        ({"block_size": None}, "block_size=None: it must be a whole number"),
        ({"max_num_reqs": None}, "max_num_reqs=None: it must be a whole number"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no': it must be True or False"),
        ({"capture_halves": 1}, "capture_halves=1: it must be True or False"),
        ({"calculate_kv_scales": None}, "calculate_kv_scales=None: it must be True or False"),
        ({"capture_progress": torch.ones(2)}, "capture_progress=tensor.*: it must be True or False"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        Sizes(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kernels": "triton"}, "kernels='triton': give a Kernels record"),
        ({"graph_api": FakeGraphs}, "graph_api=.*FakeGraphs.*: give an object with capture"),
        ({"graph_api": 3}, "graph_api=3: give an object with capture"),
        (
            {"max_model_length": 3},
            "max_model_length=3: an engine has no such setting; did you mean max_model_len",
        ),
        ({"zzz": None}, "zzz=None: an engine has no such setting; they are kv_cache_bytes, "),
    ],
)
def test_parts_of_the_wrong_kind_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        Engine((MODEL, PARAMS), **SMALL, **wrong)


@pytest.mark.parametrize("pair", [(4, 2), (PARAMS, MODEL), (MODEL,), (MODEL, PARAMS.tree)])
def test_a_pair_in_memory_is_a_model_and_its_parameters(pair: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"model=\(.*\): .* given as \(Model, Params\)"):
        Engine(pair, **SMALL)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        3,
        "hello",
        b"",
        ["hello"],
        [3],
        {"role": "user"},
        [["hello"]],
        [[None]],
        [{"role": "user"}, "hello"],
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with (
        Engine((MODEL, PARAMS), **SMALL) as engine,
        pytest.raises(InvalidRequestError, match=r"chat\(.*: give a list of messages"),
    ):
        engine.chat(messages)


@pytest.mark.parametrize("mode", ["FULL", CUDAGraphMode.FULL_DECODE_ONLY])
def test_graphs_that_a_device_has_not_are_refused(mode: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"cudagraph_mode=FULL.* on cpu: only CUDA has graphs"):
        Engine((MODEL, PARAMS), cudagraph_mode=mode, **SMALL)


@pytest.mark.parametrize("mode", [None, "NONE", CUDAGraphMode.NONE])
def test_no_graphs_may_be_asked_for_anywhere(mode: Any) -> None:
    with Engine((MODEL, PARAMS), cudagraph_mode=mode, **SMALL) as engine:
        assert len(engine.generate(PROMPTS[0], GREEDY, progress=False)[0].token_ids) == 4


def test_a_mode_by_name_is_what_is_captured() -> None:
    reports = []
    for mode in ("FULL", CUDAGraphMode.FULL):
        with Engine(
            (MODEL, PARAMS), cudagraph_mode=mode, graph_api=FakeGraphs(), capture_progress=False, **SMALL
        ) as engine:
            assert engine.capture_report is not None
            reports.append(engine.capture_report.num_graphs)
    assert reports[0] == reports[1] > 0


def test_a_type_may_be_said_by_its_name() -> None:
    with Engine((MODEL, PARAMS), dtype="bfloat16", **SMALL) as engine:
        assert engine.params.tree["norm"].dtype == torch.bfloat16
    assert as_dtype(torch.float16) is torch.float16


@pytest.mark.parametrize("dtype", ["float33", "Tensor", 32, None, float])
def test_what_names_no_type_is_refused(dtype: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"give a torch\.dtype or its name"):
        Engine((MODEL, PARAMS), dtype=dtype, **SMALL)


def test_weights_without_the_drafters_are_refused_with_what_joins_them() -> None:
    drafter, tree = with_weights("draft model")
    with Engine((MODEL, PARAMS), drafter=drafter, draft_params=Params(tree), **SMALL) as engine:
        before = engine.params
        with pytest.raises(
            InvalidParameterError, match=r"lack \['draft'\].*with_draft_params\(params, draft_params\)"
        ):
            engine.update_weights(PARAMS)
        assert engine.params is before
        with pytest.raises(InvalidParameterError, match=r"lack \['embed'\].*from_hf_names"):
            engine.update_weights({"draft": before.tree["draft"]})
