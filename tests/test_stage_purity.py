"""Every stage leaves its arguments bit for bit as they were and gives the same again, on inputs of a busy engine.

The stages are found in the modules of `pure/`: a new one fails here until it is called below, or handed to
`assert_pure` in a test of its own.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import purestep.pure
from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.advance import advance
from purestep.pure.dispatch import dispatch_keys, is_uniform_decode, lora_cases, pad_table
from purestep.pure.forward import compute_logits, model_forward, preprocess
from purestep.pure.graph_modes import has_pieces
from purestep.pure.initial import initial_state
from purestep.pure.inputs import build_attention_metadata, prepare_inputs
from purestep.pure.interop import sampling_params_from_vllm, stream_of
from purestep.pure.kv_config import (
    check_kv_cache_config,
    group_by_window,
    kernel_block_size,
    kv_cache_config,
    kv_cache_groups,
    kv_cache_shape,
    kv_cache_strides,
    num_blocks_for,
)
from purestep.pure.padding import dummy_query_lens, fill_batch, pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig, LoRACapture
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.kv_config import MultipleOf
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Queue, Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.records.state import StepState
from purestep.pure.sampling import batch_params, sample_tokens
from purestep.pure.scheduler import (
    abort,
    add,
    check_invariants,
    find_stop,
    finish,
    make_queue,
    num_free,
    preempt_all,
    schedule,
    set_version,
    update,
)
from purestep.pure.settle import give_up, settle
from purestep.pure.split import split_decodes_and_prefills
from purestep.pure.step import execute, sample, step, unroll
from purestep.pure.update import update_states
from tests.laws import assert_pure
from tests.syntax import ROOT
from tests.test_imports import LAYERS, layer_of
from tests.tiny import tiny_llama

VOCAB = 16
MODEL, PARAMS = tiny_llama(vocab_size=VOCAB, groups=(0, 1))
LIMITS = BatchLimits(4, 32, VOCAB, (4, 2), (12, 20), (0,))
CONFIG = SchedulerConfig(
    num_blocks=LIMITS.num_blocks,
    block_sizes=LIMITS.block_sizes,
    max_num_reqs=LIMITS.max_num_reqs,
    max_num_batched_tokens=9,
    max_model_len=LIMITS.max_model_len,
)
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(seed=1, temperature=0.7, top_k=4, top_p=0.9, min_p=0.01, max_tokens=8),
    SamplingParams(
        seed=2,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        logit_bias={3: 1.0},
        bad_words_token_ids=((2, 3), (7,)),
        min_tokens=3,
        stop_token_ids=tuple(range(1, 11)),
        max_tokens=10,
        logprobs=1,
        logprobs_mode="processed_logits",
    ),
    SamplingParams(
        temperature=0.0, allowed_token_ids=(1, 4, 9), presence_penalty=0.5, max_tokens=12, ignore_eos=True
    ),
)


@attrs.frozen
class Moment:
    """What there is in one turn of an engine."""

    queue: Queue  # before the turn
    scheduled: Queue
    output: SchedulerOutput
    before: InputBatch
    batch: InputBatch
    state: StepState  # its inbox holds the turn's plan
    result: StepOutput


def request(i: int) -> Request:
    prompt = tuple((3 * i + 5 * k) % VOCAB for k in range(4 + 3 * (i % 3)))
    return Request(f"r{i}", prompt, KINDS[i % 4], arrival=i, stream=i, eos_token_ids=(0,))


def turns(num_turns: int) -> Iterator[Moment]:
    """An engine with more requests than it has blocks for: chunks, prefix hits, preemption, resumption, finish."""
    queue, batch = make_queue(CONFIG), InputBatch.make_empty(LIMITS)
    absorbed, state = batch, initial_state(MODEL, LIMITS, dtype=torch.float64)
    for turn in range(num_turns):
        if turn < 8:
            queue = add(queue, request(turn))
        scheduled, output = schedule(queue)
        before, batch = batch, update_states(batch, output)
        state = replace(state, inbox=plan_step(batch, absorbed).inbox.to("cpu"))
        state_after, result = step(MODEL, PARAMS, state, kernels=reference)
        yield Moment(queue, scheduled, output, before, batch, state, result)
        queue, _ = update(scheduled, output.req_ids, result)
        absorbed, batch, state = batch, settle(batch, batch, result), state_after


@cache
def moments() -> tuple[Moment, ...]:
    """Turns of different kinds, and few of them: the first, and those in which something happens."""
    found = tuple(moment for moment in turns(24) if moment.output.req_ids)
    happens = [
        m.output.scheduled_cached_reqs.resumed_req_ids or m.output.preempted_req_ids or m.output.block_copies
        for m in found
    ]
    return tuple(m for i, m in enumerate(found) if i < 4 or happens[i] or i % 6 == 0)


def on_device(name: str) -> Callable[[Moment], object]:
    """A call of one of the stages between plan and output."""

    def call(moment: Moment) -> object:
        state = absorb(moment.state, kernels=reference)
        inputs = prepare_inputs(state, kernels=reference)
        metadata = build_attention_metadata(state, inputs, kernels=reference)
        executed = execute(MODEL, PARAMS, moment.state, kernels=reference)
        calls: dict[str, tuple[Any, ...]] = {
            "absorb": (absorb, moment.state),
            "prepare_inputs": (prepare_inputs, state),
            "model_forward": (model_forward, MODEL, PARAMS, preprocess(inputs), state.kv, metadata),
            "compute_logits": (compute_logits, MODEL, PARAMS, executed.hidden_states, inputs.logits_indices),
            "sample_tokens": (sample_tokens, executed),
            "sample": (sample, executed),
            "advance": (advance, state, inputs, sample_tokens(executed, kernels=reference)),
            "execute": (execute, MODEL, PARAMS, moment.state),
            "step": (step, MODEL, PARAMS, moment.state),
            "unroll": (
                unroll,
                MODEL,
                PARAMS,
                moment.state,
                1 if state.layout.bounds.max_query_len > 1 else 3,
            ),
        }
        return assert_pure(*calls[name], kernels=reference)

    return call


def inputs_of(moment: Moment) -> Any:
    state = absorb(moment.state, kernels=reference)
    return state, prepare_inputs(state, kernels=reference)


def first_of(moment: Moment) -> str:
    """A request that runs or waits."""
    return min(req_id for req_id, _ in moment.queue.live.items())


def host(result: StepOutput) -> StepOutput:
    return torch.utils._pytree.tree_map(lambda leaf: None if leaf is None else leaf.numpy(), result)


CALLS: dict[str, Callable[[Moment], object]] = {
    **{
        name: on_device(name)
        for name in (
            "absorb",
            "prepare_inputs",
            "model_forward",
            "compute_logits",
            "sample_tokens",
            "sample",
            "advance",
            "execute",
            "step",
            "unroll",
        )
    },
    "initial_state": lambda m: assert_pure(initial_state, MODEL, LIMITS),
    "batch_params": lambda m: assert_pure(batch_params, inputs_of(m)[0], kernels=reference),
    "build_attention_metadata": lambda m: assert_pure(
        build_attention_metadata, *inputs_of(m), kernels=reference
    ),
    "preprocess": lambda m: assert_pure(preprocess, inputs_of(m)[1]),
    "update_states": lambda m: assert_pure(update_states, m.before, m.output),
    "plan_step": lambda m: assert_pure(plan_step, m.batch, m.before),
    "settle": lambda m: assert_pure(settle, m.batch, m.batch, host(m.result)),
    "give_up": lambda m: assert_pure(give_up, m.batch),
    "pad_batch": lambda m: assert_pure(pad_batch, m.batch, BatchDescriptor(num_tokens=16, num_reqs=4)),
    "fill_batch": lambda m: assert_pure(
        fill_batch,
        m.batch,
        dispatch_keys(DispatchConfig((9, 18, 27, 36), 4), CUDAGraphMode.FULL_DECODE_ONLY, 9),
    ),
    # the scheduler
    "make_queue": lambda m: assert_pure(make_queue, CONFIG),
    "add": lambda m: assert_pure(add, m.queue, request(99), vocab_size=VOCAB),
    "abort": lambda m: assert_pure(abort, m.queue, [first_of(m), "unknown"]),
    "finish": lambda m: assert_pure(finish, m.queue, first_of(m), "stop", "a string"),
    "set_version": lambda m: [assert_pure(set_version, m.queue, 5, keep_kv=keep) for keep in (True, False)],
    "preempt_all": lambda m: assert_pure(preempt_all, m.queue),
    "num_free": lambda m: assert_pure(num_free, m.queue, 1),
    "check_invariants": lambda m: assert_pure(check_invariants, m.scheduled),
    "schedule": lambda m: assert_pure(schedule, m.queue),
    "update": lambda m: assert_pure(update, m.scheduled, m.output.req_ids, host(m.result)),
    "find_stop": lambda m: assert_pure(find_stop, "one two three", ("two", "o t")),
}


KV_CONFIG = kv_cache_config(MODEL.kv_layers, num_bytes=1 << 14, block_sizes=(4, 2), dtype=torch.float32)

# What is worked out once, from plain values.
PLAIN: dict[FunctionType, tuple[Any, ...]] = {
    check_kv_cache_config: (KV_CONFIG,),
    dispatch_keys: (DispatchConfig((1, 2, 4), 4), CUDAGraphMode.FULL_AND_PIECEWISE),
    dummy_query_lens: (10, 4),
    group_by_window: ([None, 4, None, 8],),
    has_pieces: (MODEL,),
    is_uniform_decode: (4, 2),
    kernel_block_size: (16, [(8, 16), (MultipleOf(4),)]),
    kv_cache_groups: (MODEL.kv_layers, [4, 2]),
    kv_cache_shape: (KV_CONFIG, 1),
    kv_cache_strides: ([4, 2, 8, 1, 4], [0, 2, 1, 3, 4]),
    lora_cases: (LoRACapture(4, specialize_active_lora=True),),
    num_blocks_for: (1 << 12, 128),
    pad_table: ((1, 2, 4, 8), 8),
    sampling_params_from_vllm: ({"temperature": 0.5, "logit_bias": {3: 1.0}, "stop_token_ids": [4]},),
    split_decodes_and_prefills: (np.array([0, 1, 2, 7, 9], np.int32),),
    stream_of: ("a request",),
}
KEYWORDS: dict[FunctionType, dict[str, Any]] = {
    is_uniform_decode: {"max_query_len": 2, "uniform_query_len": 2},
}


def stages() -> set[str]:
    """Public functions of the modules that hold stages, and what the scheduler's package offers."""
    ranks = [rank for rank, (layer, _, _) in enumerate(LAYERS) if layer in ("stages", "step")]
    found = set(purestep.pure.scheduler.__all__)
    for module in pkgutil.walk_packages(purestep.pure.__path__, "purestep.pure."):
        rank, unit = layer_of(module.name)
        if rank in ranks and unit != "scheduler":
            names = vars(importlib.import_module(module.name))
            found |= {
                name
                for name, value in names.items()
                if isinstance(value, FunctionType) and value.__module__ == module.name and name[0] != "_"
            }
    return found


def handed_to_assert_pure() -> set[str]:
    """Functions that some test hands to `assert_pure` by their names."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
            if is_call and node.func.id == "assert_pure" and isinstance(node.args[0], ast.Name):
                found.add(node.args[0].id)
    return found


def test_the_purity_of_every_stage_is_tested() -> None:
    called = CALLS.keys() | {function.__name__ for function in PLAIN}
    assert sorted(stages() - handed_to_assert_pure() - called) == []
    assert sorted(called - stages()) == [], "these are stages no more"


def test_the_turns_are_those_of_a_busy_engine() -> None:
    outputs = [moment.output for moment in moments()]
    assert any(output.scheduled_cached_reqs.resumed_req_ids for output in outputs)
    assert any(output.preempted_req_ids for output in outputs)
    assert any(output.finished_req_ids for output in outputs)
    assert any(
        (np.diff(m.batch.layout.query_start_loc) > 1).any() and len(m.batch.req_ids) > 1 for m in moments()
    )
    assert any(moment.batch.layout.bounds.sampler.random for moment in moments())
    assert any(moment.batch.layout.bounds.sampler.constraints for moment in moments())


@pytest.mark.parametrize("name", CALLS)
def test_a_stage_is_pure(name: str, unchecked_records: None) -> None:
    for moment in moments():
        CALLS[name](moment)


@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_what_is_worked_out_once_is_pure(function: FunctionType) -> None:
    assert_pure(function, *PLAIN[function], **KEYWORDS.get(function, {}))
