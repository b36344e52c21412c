"""`step`, `execute`, `sample`, `unroll` on a small model: any schedule, any world, padded or not."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map

from purestep.kernels.reference import reference
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from purestep.pure.settle import settle
from purestep.pure.step import execute, joined, sample, step, unroll
from purestep.pure.update import update_states
from tests.laws import assert_pure, equal
from tests.lives import Life
from tests.profiles import examples
from tests.schedules import LIMITS, Schedule, seeds
from tests.tiny import GREEDY, Loop, decode, new_request, scheduled, tiny_llama

MODEL, PARAMS = tiny_llama(groups=(0, 1))
WIDE = BatchLimits(max_num_reqs=3, max_model_len=96, vocab_size=16, block_sizes=(4, 8), num_blocks=(80, 40))


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams, stream: int) -> tuple[int, ...]:
    """Prompt and outputs of a request that has the model to itself: whole prefill, then one token at a time."""
    loop = Loop(MODEL, PARAMS, LIMITS)
    blocks = tuple(tuple(range(1, 1 + LIMITS.max_model_len // size)) for size in LIMITS.block_sizes)
    output = loop.step(
        scheduled(new_request("x", prompt, blocks, params, stream=stream), counts={"x": len(prompt)})
    )
    while output.active[0]:
        output = loop.decode("x")
    return tuple(loop.tokens("x"))


def next_token(life: Life) -> int:
    """What the model says next to a request that is alone."""
    return alone(life.prompt, life.params, life.stream)[len(life.device_tokens)]


def with_canaries(state: StepState) -> StepState:
    """Every block but the null one is full of NaN: whoever reads what nobody wrote will be seen."""
    return replace(
        state, kv=tuple(torch.cat([kv[:1], torch.full_like(kv[1:], torch.nan)]) for kv in state.kv)
    )


def assert_frame(before: StepState, after: StepState, slots: Tensor) -> None:
    """Outside the null block, KV that no slot names is bit for bit what it was."""
    for layer, group in enumerate(before.group_of_layer):
        old, new = (state.kv[layer].transpose(1, 2).flatten(0, 1) for state in (before, after))
        named = torch.zeros(len(old), dtype=torch.bool)
        named[slots[group]] = True
        named[: before.block_sizes[group]] = True
        assert equal(old[~named], new[~named])


class Device:
    """Runs plans with nothing known to the host but what it is told, on a cache full of canaries."""

    def __init__(
        self, limits: BatchLimits, pad: Callable[[InputBatch], InputBatch] = lambda batch: batch
    ) -> None:
        self.loop, self.pad = Loop(MODEL, PARAMS, limits), pad
        self.state, self.absorbed = with_canaries(self.loop.state), self.loop.absorbed

    @torch.no_grad()
    def run(self, batch: InputBatch) -> StepOutput:
        """One step, with the frame rule checked."""
        batch = self.pad(batch)
        before = replace(self.state, inbox=plan_step(batch, self.absorbed).inbox.to("cpu"))
        executed = execute(MODEL, PARAMS, before, kernels=reference)
        slots = executed.inputs.slot_mapping
        assert_frame(before, executed.state, slots)
        self.state, output = sample(executed, kernels=reference)
        self.absorbed = batch
        return output


def random_padding(rng: Random) -> Callable[[InputBatch], InputBatch]:
    """Pads a batch to up to two more requests and three more tokens."""

    def pad(batch: InputBatch) -> InputBatch:
        bounds = batch.layout.bounds
        num_reqs = min(bounds.num_reqs + rng.randrange(3), batch.limits.max_num_reqs)
        return pad_batch(batch, BatchDescriptor(bounds.num_tokens + rng.randrange(4), num_reqs))

    return pad


@examples(0.15)
@given(seeds, st.integers(0, 2), st.booleans())
def test_any_legal_schedule_gives_what_a_request_gives_alone(rng: Random, lag: int, padded: bool) -> None:
    """Chunked, preempted, rolled back, beside others, padded, steps ahead of what the host knows: same tokens, same
    counts, same word on who stopped."""
    schedule = Schedule(rng, next_token=next_token, hits=False)
    device = Device(LIMITS, random_padding(rng) if padded else lambda batch: batch)
    batch, pending = InputBatch.make_empty(LIMITS), list[tuple[InputBatch, StepOutput]]()
    for _ in range(10):
        output = schedule.begin()
        batch = update_states(batch, output)
        if output.req_ids:
            pending.append((batch, device.run(batch)))
        while len(pending) > lag:
            stepped, ours = pending.pop(0)
            theirs, num_reqs = schedule.settle(), len(stepped.req_ids)
            for name in ("sampled_token_ids", "num_computed_tokens", "active", "has_nan"):
                assert getattr(ours, name)[:num_reqs].tolist() == getattr(theirs, name).tolist()
            batch = settle(batch, stepped, ours)
            schedule.check(batch)


def three(limits: BatchLimits = WIDE, lengths: tuple[int, ...] = (5, 9, 3), **params: Any) -> Loop:
    """Requests a, b, c whose prefill is done."""
    loop = Loop(MODEL, PARAMS, limits)
    sampling = SamplingParams(**({"temperature": 0, "max_tokens": None, "ignore_eos": True} | params))
    new = []
    for i, (name, length) in enumerate(zip("abc", lengths, strict=True)):
        blocks = tuple(
            tuple(range(1 + i * (n := 96 // size), 1 + (i + 1) * n)) for size in limits.block_sizes
        )
        new.append(
            new_request(name, tuple((7 * i + j) % 16 for j in range(length)), blocks, sampling, stream=i)
        )
    loop.step(scheduled(*new, counts=dict(zip("abc", lengths, strict=True))))
    return loop


def decoding_state(loop: Loop) -> StepState:
    """The state with the plan of the next decode step in its inbox."""
    batch = decode(loop.batch, "a", "b", "c")
    inbox = plan_step(batch, loop.absorbed).inbox.to("cpu")
    loop.batch = loop.absorbed = batch
    return replace(loop.state, inbox=inbox)


def test_a_step_is_execute_and_then_sample() -> None:
    """And each of them is pure."""
    state = decoding_state(three())
    executed = assert_pure(execute, MODEL, PARAMS, state, kernels=reference)
    in_two = assert_pure(sample, executed, kernels=reference)
    assert equal(in_two, assert_pure(step, MODEL, PARAMS, state, kernels=reference))


def test_a_narrow_execution_has_the_same_logits_of_fewer_hidden_states() -> None:
    """A prefill, whose last layer is computed for three of its tokens: as a step does it."""
    loop = Loop(MODEL, PARAMS, WIDE)
    blocks = [tuple(tuple(range(1 + 8 * i, 5 + 8 * i)) for _ in WIDE.block_sizes) for i in range(3)]
    params = SamplingParams(temperature=0)
    new = [new_request(name, tuple(range(5 + i)), blocks[i], params) for i, name in enumerate("abc")]
    loop.batch = update_states(loop.batch, scheduled(*new, counts={"a": 5, "b": 4, "c": 7}))
    state = replace(loop.state, inbox=plan_step(loop.batch, loop.absorbed).inbox.to("cpu"))
    every = execute(MODEL, PARAMS, state, kernels=reference)
    narrow = assert_pure(execute, MODEL, PARAMS, state, kernels=reference, narrow=True)
    assert every.hidden_states.shape[0] == 16
    rows = every.inputs.logits_indices
    assert torch.allclose(narrow.hidden_states, every.hidden_states[rows], rtol=1e-5, atol=1e-6)
    assert torch.allclose(narrow.logits, every.logits, rtol=1e-5, atol=1e-5)
    assert equal(narrow.state, every.state)
    assert equal(sample(narrow, kernels=reference), step(MODEL, PARAMS, state, kernels=reference))
    decoding = decoding_state(three())
    assert equal(*[execute(MODEL, PARAMS, decoding, kernels=reference, narrow=n) for n in (True, False)])


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_unroll_is_that_many_steps(num_steps: int) -> None:
    """The same state and outputs to the last bit."""
    state = decoding_state(three(temperature=0.9, seed=5))
    at_once, outputs = assert_pure(unroll, MODEL, PARAMS, state, num_steps, kernels=reference)
    singly = []
    for _ in range(num_steps):
        state, output = step(MODEL, PARAMS, state, kernels=reference)
        singly.append(output)
    assert equal(outputs, tuple(singly))
    if num_steps:
        assert equal(at_once, state)


def test_outputs_of_several_steps_are_joined_request_by_request() -> None:
    """A column of tokens for each step; log-probabilities of a request one step after the other."""
    params: dict[str, Any] = {"logprobs": 2, "kept_mass": True, "top_k": 5, "seed": 3, "max_tokens": 4}
    _, outputs = unroll(MODEL, PARAMS, decoding_state(three(**params)), 5, kernels=reference)
    joint = assert_pure(joined, outputs)

    tokens = [[int(output.sampled_token_ids[i, 0]) for output in outputs] for i in range(3)]
    assert joint.sampled_token_ids.tolist() == tokens
    assert any(own[-1] < 0 for own in tokens) and all(own[0] >= 0 for own in tokens)
    assert equal(
        (joint.num_computed_tokens, joint.active), (outputs[-1].num_computed_tokens, outputs[-1].active)
    )
    for i, output in enumerate(outputs):
        rows = slice(i, None, len(outputs))
        assert joint.logprobs_tensors is not None and joint.kept_mass is not None
        assert equal(joint.logprobs_tensors.logprobs[rows], output.logprobs_tensors.logprobs)
        assert equal(
            joint.logprobs_tensors.selected_token_ranks[rows], output.logprobs_tensors.selected_token_ranks
        )
        assert equal(joint.kept_mass.drawn_logprobs[rows], output.kept_mass.drawn_logprobs)
    assert assert_pure(joined, outputs[:1]) is outputs[0]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_unroll_goes_on_where_the_layouts_bound_ends(penalty: float) -> None:
    """Past the length that the layout's bound allows, it still gives what steps give whose bound the host raises."""
    lengths, params = (60, 58, 64), {"repetition_penalty": penalty}
    loop = three(lengths=lengths, **params)
    state = decoding_state(loop)
    bound = (state.inbox.bounds or state.layout.bounds).max_seq_len
    state, outputs = unroll(MODEL, PARAMS, state, 20, kernels=reference)
    assert state.layout.bounds.max_seq_len == bound < 64 + 20
    stepped = three(lengths=lengths, **params)
    for output in outputs:
        assert output.sampled_token_ids.tolist() == stepped.decode("a", "b", "c").sampled_token_ids.tolist()


def test_unroll_refuses_a_prefill() -> None:
    """It repeats a layout, and a prefill can not be repeated."""
    loop = Loop(MODEL, PARAMS, WIDE)
    new = new_request("a", (1, 2, 3), (tuple(range(1, 9)), tuple(range(1, 9))))
    state = loop.plan(scheduled(new, counts={"a": 3}))
    with pytest.raises(ValueError, match="unroll of 2 steps over a layout that runs up to 3 tokens"):
        unroll(MODEL, PARAMS, state, 2, kernels=reference)


def test_frozen_rows_write_nothing() -> None:
    """A row at its limit runs idle: its tokens, its ledger and all KV but its neighbours' stay as they are."""
    loop = three(max_tokens=3)
    state, outputs = unroll(MODEL, PARAMS, decoding_state(loop), 2, kernels=reference)
    assert outputs[-1].active.tolist() == [False] * 3
    later, outputs = unroll(MODEL, PARAMS, state, 3, kernels=reference)
    assert [output.sampled_token_ids.tolist() for output in outputs] == [[[-1]] * 3] * 3
    assert equal(later.token_ids[:-1], state.token_ids[:-1])
    assert equal(later.ledger.table[:-1], state.ledger.table[:-1])
    for kv, old in zip(later.kv, state.kv, strict=True):
        assert equal(kv[1:], old[1:])


@examples(0.1)
@given(seeds)
def test_the_order_of_the_batch_does_not_matter(rng: Random) -> None:
    """Index is not row: decoding in another order gives every request the same token."""
    names = rng.sample("abc", 3)
    loop, other = three(temperature=0.8, seed=1), three(temperature=0.8, seed=1)
    for _ in range(3):
        loop.decode("a", "b", "c")
        other.decode(*names)
    assert {name: loop.tokens(name) for name in "abc"} == {name: other.tokens(name) for name in "abc"}


def as_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function over a batch of one."""

    def run(params: Params, state: StepState) -> Any:
        lifted = tree_map(lambda leaf: leaf[None], (params, state))
        return tree_map(lambda leaf: leaf[0], torch.vmap(function)(*lifted))

    return run


def as_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as make_fx sees it, checked to run on other data than it was traced with."""

    def run(params: Params, state: StepState) -> Any:
        other = tree_map(lambda leaf: leaf * 0.5 if leaf.is_floating_point() else leaf, params)
        return make_fx(function)(other, state)(params, state)

    return run


def as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one graph."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="eager")
    return compiled


WORLDS = {"vmap": as_vmap, "make_fx": as_trace, "compile": as_compiled}


def the_step(params: Params, state: StepState) -> Any:
    return step(MODEL, params, state, kernels=reference)


def the_execution(params: Params, state: StepState) -> Any:
    executed = execute(MODEL, params, state, kernels=reference)
    return executed.logits, executed.state, executed.inputs


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (the_step, "greedy"),
        (the_step, "random"),
        (the_step, "constrained"),
        (the_step, "prefill"),
        (the_execution, "prefill"),
    ],
)
def test_four_worlds(world: str, function: Callable[..., Any], kind: str, unchecked_records: None) -> None:
    """Eager = vmap over a batch of one = a make_fx trace = one compiled graph; records go in and come out."""
    params = {
        "greedy": {},
        "random": {"temperature": 0.7, "seed": 3, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
        "constrained": {
            "repetition_penalty": 1.2,
            "min_tokens": 4,
            "stop_token_ids": (3,),
            "logit_bias": {2: 1.5},
            "bad_words_token_ids": ((4, 5), (6,)),
            "allowed_token_ids": range(1, 15),
        },
        "prefill": {},
    }[kind]
    loop = three(**params)
    state = decoding_state(loop)
    if kind == "prefill":
        loop = Loop(MODEL, PARAMS, WIDE)
        new = [new_request(n, (1, 2, 3), ((i,), (i,)), GREEDY) for i, n in enumerate("ab", 1)]
        state = loop.plan(scheduled(*new, counts={"a": 3, "b": 2}))
    with torch.no_grad():
        eager = function(PARAMS, state)
        other = WORLDS[world](function)(PARAMS, state)
    leaves, structure = tree_flatten(eager)
    others, other_structure = tree_flatten(other)
    assert structure == other_structure
    for ours, theirs in zip(leaves, others, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)
