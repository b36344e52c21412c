"""The tables of dispatch, cell by cell: mode, padded tokens, padded requests, U if uniform."""

from typing import Any

import pytest

from purestep.pure.dispatch import (
    capture_descriptors,
    determine_batch_execution_and_padding,
    dispatch,
    dispatch_keys,
    lora_cases,
    pad_table,
)
from purestep.pure.errors import DispatchError
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig, LoRACapture
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import LayoutBounds
from tests.laws import assert_pure

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, FULL_AND_PIECEWISE = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


def _bounds(counts: list[int]) -> LayoutBounds:
    return LayoutBounds(len(counts), sum(counts), max(counts), 64)


def _cell(chosen: tuple[CUDAGraphMode, BatchDescriptor]) -> str:
    mode, d = chosen
    short = "PW" if mode is PIECEWISE else mode.name
    return f"{short}({d.num_tokens},{d.num_reqs}{',U' if d.uniform else ''})"


TABLE = {
    NONE: "NONE(3,None) NONE(3,None) NONE(5,None) NONE(8,None) NONE(9,None) NONE(1,None)",
    PIECEWISE: "PW(4,None) PW(4,None) PW(8,None) PW(8,None) NONE(9,None) PW(1,None)",
    FULL: "FULL(4,4) NONE(3,None) FULL(8,6) FULL(8,6) NONE(9,None) FULL(1,1)",
    DECODE_ONLY: "FULL(4,4,U) NONE(3,None) NONE(5,None) NONE(8,None) NONE(9,None) FULL(1,1,U)",
    FULL_AND_PIECEWISE: "FULL(4,4,U) PW(4,None) PW(8,None) PW(8,None) NONE(9,None) FULL(1,1,U)",
}


@pytest.mark.parametrize("mode", TABLE)
def test_table_of_all_modes(mode: CUDAGraphMode) -> None:
    """Sizes 1, 2, 4, 8 and at most 6 requests: 3 uniform, 3 uniform without FULL, 5 mixed, 8 uniform, 9, 1 uniform."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 6), mode)
    chosen = [
        dispatch(keys, 3, uniform_decode=True),
        dispatch(keys, 3, uniform_decode=True, invalid_modes={FULL}),
        dispatch(keys, 5),
        dispatch(keys, 8, uniform_decode=True),
        dispatch(keys, 9, uniform_decode=True),
        dispatch(keys, 1, uniform_decode=True),
    ]
    assert " ".join(map(_cell, chosen)) == TABLE[mode]


def test_few_requests_leave_large_uniform_batches_without_a_full_graph() -> None:
    """With at most 2 requests there is no uniform graph of 4 tokens."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 2), FULL_AND_PIECEWISE)
    cells = [_cell(dispatch(keys, n, uniform_decode=True)) for n in (3, 2)]
    assert cells == ["PW(4,None)", "FULL(2,2,U)"]


def test_table_of_capture_order() -> None:
    """PIECEWISE 8, 4, 2, 1, then FULL 4, 2, 1."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 6), FULL_AND_PIECEWISE)
    order = [(mode, [d.num_tokens for d in found]) for mode, found in capture_descriptors(keys)]
    assert order == [(PIECEWISE, [8, 4, 2, 1]), (FULL, [4, 2, 1])]


def test_table_of_two_drafts() -> None:
    """Sizes 3, 6, 12 and at most 4 requests of 3 tokens."""
    keys = dispatch_keys(DispatchConfig((3, 6, 12), 4), FULL_AND_PIECEWISE, 3)
    uniform = [_cell(dispatch(keys, n, uniform_decode=True)) for n in (3, 6, 9, 12)]
    assert uniform == ["FULL(3,1,U)", "FULL(6,2,U)", "FULL(12,4,U)", "FULL(12,4,U)"]
    assert [_cell(dispatch(keys, n)) for n in (5, 13)] == ["PW(6,None)", "NONE(13,None)"]


@pytest.mark.parametrize(
    ("lora", "cells"),
    [
        (LoRACapture(4, True, False), ["FULL L0", "FULL L5", "FULL L5", "FULL L5"]),
        (LoRACapture(4, True, True), ["FULL L0", "FULL L1", "FULL L4", "FULL L4"]),
        (LoRACapture(4, False, False), ["NONE L0", "FULL L5", "FULL L5", "FULL L5"]),
    ],
)
def test_table_of_adapters(lora: LoRACapture, cells: list[str]) -> None:
    """2 uniform tokens with 0, 1, 3 and 4 active adapters."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 6, lora), FULL_AND_PIECEWISE)
    chosen = [dispatch(keys, 2, uniform_decode=True, num_active_loras=n) for n in (0, 1, 3, 4)]
    assert [f"{mode.name} L{d.num_active_loras}" for mode, d in chosen] == cells


def test_adapters_that_graphs_are_captured_for() -> None:
    """Powers of two and one more than the most, where counts are specialised."""
    assert lora_cases(LoRACapture(4, True, True)) == (0, 1, 2, 4, 5)
    assert lora_cases(LoRACapture(1, True, True)) == (0, 1, 2)
    assert lora_cases(LoRACapture(6, True, True)) == (0, 1, 2, 4, 7)
    assert lora_cases(LoRACapture(6)) == (0, 7)
    assert lora_cases(None) == (0,)


def test_table_of_restricted_modes() -> None:
    """5 tokens: pieces alone, full alone (nothing fits), nothing at all."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 6), FULL_AND_PIECEWISE)
    assert _cell(dispatch(keys, 5, valid_modes={PIECEWISE})) == "PW(8,None)"
    assert _cell(dispatch(keys, 5, valid_modes={NONE})) == "NONE(5,None)"
    with pytest.raises(DispatchError, match=r"no captured graph of FULL holds 5 tokens .*: allow NONE"):
        dispatch(keys, 5, valid_modes={FULL})


def test_table_of_padding() -> None:
    """Up to the last size, and beyond it to a size that matches no key."""
    assert pad_table((1, 2, 4, 8), 8) == (0, 1, 2, 4, 4, 8, 8, 8, 8)
    assert pad_table((1, 2, 4), 6) == (0, 1, 2, 4, 4, 7, 7)
    keys = dispatch_keys(DispatchConfig((1, 2, 4), 6, max_capture_size=6), FULL)
    assert _cell(dispatch(keys, 5)) == "NONE(5,None)"


@pytest.mark.parametrize(
    ("mode", "counts", "known", "cell"),
    [
        (FULL_AND_PIECEWISE, [1, 1, 1], {}, "FULL(4,4,U)"),
        (FULL_AND_PIECEWISE, [3, 1, 1], {}, "PW(8,None)"),
        (FULL_AND_PIECEWISE, [9], {}, "NONE(9,None)"),
        (FULL_AND_PIECEWISE, [1, 1, 1], {"use_cascade_attention": True}, "PW(4,None)"),
        (FULL_AND_PIECEWISE, [1, 1, 1], {"has_encoder_output": True}, "PW(4,None)"),
        (FULL_AND_PIECEWISE, [1, 1, 1], {"force_eager": True}, "NONE(3,None)"),
        (FULL_AND_PIECEWISE, [1, 1, 1], {"force_uniform_decode": False}, "PW(4,None)"),
        (FULL_AND_PIECEWISE, [3, 1], {"force_uniform_decode": True}, "FULL(4,4,U)"),
        (FULL_AND_PIECEWISE, [1, 1, 1], {"num_active_loras": 2}, "NONE(3,None)"),
        (DECODE_ONLY, [3, 1, 1], {}, "NONE(5,None)"),
        (FULL, [3, 1, 1], {}, "FULL(8,8)"),
        (FULL, [3, 1, 1], {"has_encoder_output": True}, "NONE(5,None)"),
        (FULL_AND_PIECEWISE, [1, 1, 1], {"sequence_parallel_size": 4}, "FULL(4,4,U)"),
        (FULL_AND_PIECEWISE, [1], {"sequence_parallel_size": 2}, "FULL(2,2,U)"),
        (FULL_AND_PIECEWISE, [9], {"sequence_parallel_size": 4}, "NONE(12,None)"),
    ],
)
def test_table_of_decisions(mode: CUDAGraphMode, counts: list[int], known: dict[str, Any], cell: str) -> None:
    """Sizes 1, 2, 4, 8 and at most 8 requests of one token."""
    keys = dispatch_keys(DispatchConfig((1, 2, 4, 8), 8), mode)
    chosen = assert_pure(determine_batch_execution_and_padding, keys, _bounds(counts), **known)
    assert _cell((chosen.cudagraph_mode, chosen.descriptor)) == cell
    assert chosen.num_tokens == sum(counts)
    assert not chosen.should_ubatch and chosen.num_tokens_across_dp is None


def test_a_batch_is_uniform_only_if_every_request_has_all_its_drafts() -> None:
    """3 tokens of each of two requests are; 3 and 2 are not."""
    keys = dispatch_keys(DispatchConfig((3, 6, 12), 4), FULL_AND_PIECEWISE, 3)
    uniform = determine_batch_execution_and_padding(keys, _bounds([3, 3]))
    mixed = determine_batch_execution_and_padding(keys, _bounds([3, 2]))
    assert _cell((uniform.cudagraph_mode, uniform.descriptor)) == "FULL(6,2,U)"
    assert _cell((mixed.cudagraph_mode, mixed.descriptor)) == "PW(6,None)"


def test_properties_of_modes() -> None:
    """What a pair means for decode and for mixed batches; only NONE is false."""
    assert (FULL_AND_PIECEWISE.decode_mode, FULL_AND_PIECEWISE.mixed_mode) == (FULL, PIECEWISE)
    assert (DECODE_ONLY.decode_mode, DECODE_ONLY.mixed_mode) == (FULL, NONE)
    assert (PIECEWISE.decode_mode, PIECEWISE.mixed_mode) == (PIECEWISE, PIECEWISE)
    assert [mode for mode in CUDAGraphMode if mode.separate_routine] == [DECODE_ONLY, FULL_AND_PIECEWISE]
    assert [mode for mode in CUDAGraphMode if mode.has_mode(PIECEWISE)] == [PIECEWISE, FULL_AND_PIECEWISE]
    assert [mode for mode in CUDAGraphMode if mode.has_mode(NONE)] == [NONE, DECODE_ONLY]
    assert [mode for mode in CUDAGraphMode if not mode] == [NONE]
