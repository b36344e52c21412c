"""Dispatch against what upstream's dispatcher chose, and against the decisions of recorded steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purestep.pure.dispatch import (
    capture_descriptors,
    determine_batch_execution_and_padding,
    dispatch,
    dispatch_keys,
    is_uniform_decode,
)
from purestep.pure.errors import CaptureSizeError, DispatchError
from purestep.pure.padding import pad_layout
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig, LoRACapture
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import Layout, LayoutBounds

NUM_GROUPS, NUM_CASES, NUM_UNIFORM_CASES = 60, 742, 36
TRACES = ("full_and_piecewise", "full_decode_only", "piecewise", "ngram")
NULL_ROW = 99


def _load(file: Path) -> Any:
    return json.loads(file.read_text())


def _config(group: dict[str, Any]) -> DispatchConfig:
    lora = LoRACapture(**group["lora"]) if group["lora"] else None
    return DispatchConfig(tuple(group["capture_sizes"]), group["max_num_seqs"], lora)


def _descriptor(fields: dict[str, Any]) -> BatchDescriptor:
    return BatchDescriptor(**{name: value for name, value in fields.items() if name != "mode"})


def _modes(names: list[str] | None) -> frozenset[CUDAGraphMode] | None:
    return None if names is None else frozenset(CUDAGraphMode[name] for name in names)


def test_every_configuration_gives_the_keys_and_the_capture_order_of_upstream(oracle_dir: Path) -> None:
    """Keys are equal as sets; what upstream asserts while it builds them is a named error here."""
    groups = _load(oracle_dir / "dispatch.json")["groups"]
    assert len(groups) == NUM_GROUPS
    for group in groups:
        mode, query_len = CUDAGraphMode[group["mode"]], group["uniform_decode_query_len"]
        if "init_error" in group:
            with pytest.raises(CaptureSizeError, match="multiple"):
                dispatch_keys(_config(group), mode, query_len)
            continue
        keys = dispatch_keys(_config(group), mode, query_len)
        expected = {name: {_descriptor(d) for d in found} for name, found in group["keys"].items()}
        assert {"PIECEWISE": set(keys.piecewise.values()), "FULL": set(keys.full.values())} == expected
        order = [
            [m.name, [[d.num_tokens, d.num_active_loras] for d in found]]
            for m, found in capture_descriptors(keys)
        ]
        assert order == group["capture_order"]


def test_every_recorded_dispatch_is_chosen_alike(oracle_dir: Path) -> None:
    """Mode and descriptor are equal; where upstream asserts, a DispatchError says what is wrong."""
    num_cases = 0
    for group in _load(oracle_dir / "dispatch.json")["groups"]:
        if "init_error" in group:
            continue
        keys = dispatch_keys(_config(group), CUDAGraphMode[group["mode"]], group["uniform_decode_query_len"])
        for case in group["cases"]:
            num_cases += 1
            assert case["has_lora"] == (case["num_active_loras"] > 0)
            arguments = {
                "uniform_decode": case["uniform_decode"],
                "num_active_loras": case["num_active_loras"],
                "valid_modes": _modes(case["valid_modes"]),
                "invalid_modes": _modes(case["invalid_modes"]),
            }
            if "error" in case:
                with pytest.raises(DispatchError):
                    dispatch(keys, case["num_tokens"], **arguments)
            else:
                mode, descriptor = dispatch(keys, case["num_tokens"], **arguments)
                assert (mode.name, descriptor) == (case["out"]["mode"], _descriptor(case["out"])), case
    assert num_cases == NUM_CASES


def test_every_recorded_predicate_of_uniform_decode(oracle_dir: Path) -> None:
    """The same answer for the same counts."""
    cases = _load(oracle_dir / "is_uniform_decode.json")
    assert len(cases) == NUM_UNIFORM_CASES
    for case in cases:
        answer = is_uniform_decode(
            case["num_tokens"],
            case["num_reqs"],
            max_query_len=case["max_num_scheduled_tokens"],
            uniform_query_len=case["uniform_decode_query_len"],
            force=case["force_uniform_decode"],
        )
        assert answer == case["out"], case


@pytest.mark.parametrize("name", TRACES)
def test_recorded_steps_are_decided_and_padded_alike(traces_dir: Path, name: str) -> None:
    """Mode, padded tokens and requests of every step; and in full graphs the padded query_start_loc and seq_lens."""
    trace = _load(traces_dir / f"cudagraph_{name}.json")
    meta = trace["meta"]
    config = DispatchConfig(tuple(meta["cudagraph"]["sizes"]), meta["max_num_seqs"])
    mode = CUDAGraphMode[meta["cudagraph"]["mode"]]
    keys = dispatch_keys(config, mode, meta["uniform_decode_query_len"])
    num_full = 0
    for step in trace["steps"]:
        counts = list(step["scheduler_output"]["num_scheduled_tokens"].values())
        if not counts:
            continue
        layout = _layout(counts)
        chosen = determine_batch_execution_and_padding(keys, layout.bounds)
        recorded = dict(step["execution"])
        assert chosen.cudagraph_mode.name == recorded.pop("cudagraph_mode")
        assert chosen.should_ubatch == recorded.pop("should_ubatch")
        assert chosen.num_tokens_across_dp == recorded.pop("num_tokens_across_dp")
        assert chosen.descriptor == BatchDescriptor(**recorded)
        padded = pad_layout(layout, chosen.descriptor, null_row=NULL_ROW)
        assert padded.bounds.num_tokens == step["forward"]["input_ids_len"]
        for attention in step["attention"]:
            if chosen.cudagraph_mode is CUDAGraphMode.FULL:
                num_full += 1
                assert padded.query_start_loc.tolist() == attention["query_start_loc"]
                assert padded.bounds.num_reqs == chosen.num_reqs == attention["num_reqs"]
                assert [n > 0 for n in np.diff(padded.query_start_loc)] == [
                    n > 0 for n in attention["seq_lens"]
                ]
    assert (num_full > 0) == (name in ("full_and_piecewise", "full_decode_only"))


def _layout(counts: list[int]) -> Layout:
    rows, num_reqs = np.arange(len(counts), dtype=np.int32), len(counts)
    bounds = LayoutBounds(
        num_reqs=num_reqs, num_tokens=sum(counts), max_query_len=max(counts), max_seq_len=64
    )
    return Layout(rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), bounds)
