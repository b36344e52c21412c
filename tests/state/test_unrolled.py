"""Many steps in one go, captured or not: the tokens, the ledger and the batch of single steps."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.dispatch import determine_batch_execution_and_padding, dispatch_keys
from purestep.pure.errors import PlanBaseError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import add, make_queue, schedule, update
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers
from purestep.state.graphs import GraphKey
from purestep.state.run import BoundStep, run, run_unrolled
from purestep.state.sizes import GREEDY_SHAPE, RANDOM_SHAPE
from tests.profiles import examples
from tests.state.fake_graphs import FakeGraphs

CONFIG = tiny_config()
MODEL = llama(CONFIG)
PARAMS = random_params(CONFIG, seed=1, std=0.5)
LIMITS = BatchLimits(max_num_reqs=4, max_model_len=40, vocab_size=64, block_sizes=(4,), num_blocks=(48,))
SCHEDULER = SchedulerConfig(
    num_blocks=(48,),
    block_sizes=(4,),
    max_num_reqs=4,
    max_num_batched_tokens=64,
    max_model_len=40,
    block_horizon=40,
    async_scheduling=True,
)
KEYS = dispatch_keys(DispatchConfig((1, 2, 4), 4), CUDAGraphMode.FULL_DECODE_ONLY)
PROMPTS = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=7), min_size=1, max_size=4)
PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (3, 17, 40, 22)]),
    max_tokens=st.integers(6, 12),
)


class World:
    """A scheduler, a batch and buffers, some requests behind their prefill."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, *, num_steps: int, captured: bool):
        api = FakeGraphs() if captured else None
        self.bound = BoundStep(PersistentBuffers(MODEL, LIMITS), MODEL, PARAMS, donating, api)
        if self.bound.captured is not None:
            shapes = (RANDOM_SHAPE, GREEDY_SHAPE)
            descriptors = KEYS.full.values()
            self.bound.captured.capture([GraphKey(d, s, num_steps) for d in descriptors for s in shapes])
        self.queue, self.batch = make_queue(SCHEDULER), InputBatch.make_empty(LIMITS)
        for i, prompt in enumerate(prompts):
            request = Request(str(i), tuple(prompt), params, arrival=i, stream=i)
            self.queue = add(self.queue, request, vocab_size=64)
        self.leased = self.bound.buffers.lease()
        self.outputs: list[Any] = []
        self.advance(1, key=None)

    def advance(self, num_steps: int, *, key: GraphKey | None) -> None:
        """So many steps as one, then what they brought."""
        plans, scheduled, absorbed = [], [], self.leased.absorbed
        for _ in range(num_steps):
            self.queue, output = schedule(self.queue)
            self.batch = update_states(self.batch, output)
            padded = (
                self.batch if key is None else pad_batch(self.batch, key.descriptor, before=absorbed.layout)
            )
            plans.append(plan_step(padded, absorbed))
            scheduled.append(output)
            absorbed = padded
        self.leased, pending = run_unrolled(self.bound, self.leased, plans, key=key)
        for output, own in zip(scheduled, pending, strict=True):
            result = own.result()
            self.queue, _ = update(self.queue, output.req_ids, result)
            self.batch = settle(self.batch, own.batch, result)
            self.outputs.append(result.sampled_token_ids[: len(output.req_ids), 0].tolist())

    def key(self, num_steps: int) -> GraphKey | None:
        """The graph of so many steps for a batch of the requests that run."""
        if self.bound.captured is None:
            return None
        _, output = schedule(self.queue)
        bounds = update_states(self.batch, output).layout.bounds
        execution = determine_batch_execution_and_padding(KEYS, bounds)
        return self.bound.captured.covering(execution, bounds.sampler, num_steps=num_steps)


@examples(0.2)
@given(PROMPTS, PARAMETERS, st.integers(2, 5), st.booleans())
def test_unrolled_steps_are_single_steps(
    prompts: list[list[int]], params: SamplingParams, num_steps: int, captured: bool
) -> None:
    single = World(prompts, params, num_steps=1, captured=captured)
    many = World(prompts, params, num_steps=num_steps, captured=captured)
    if not single.queue.running.req_ids:
        return
    key = many.key(num_steps)
    assert (key is not None) is captured

    many.advance(num_steps, key=key)
    # The single steps are begun one after another, and told what they brought only at the end, as in `many`.
    plans, scheduled, pending, absorbed = [], [], [], single.leased.absorbed
    for _ in range(num_steps):
        single.queue, output = schedule(single.queue)
        single.batch = update_states(single.batch, output)
        own = single.batch if key is None else pad_batch(single.batch, key.descriptor, before=absorbed.layout)
        plans.append(plan_step(own, absorbed))
        single.leased, result = run(single.bound, single.leased, plans[-1])
        absorbed = own
        scheduled.append(output)
        pending.append(result)
    tokens = [
        p.result().sampled_token_ids[: len(s.req_ids), 0].tolist()
        for p, s in zip(pending, scheduled, strict=True)
    ]

    assert many.outputs[1:] == tokens
    assert torch.equal(many.leased.value.ledger.table, single.leased.value.ledger.table)
    assert torch.equal(many.leased.value.token_ids[:-1], single.leased.value.token_ids[:-1])
    for a, b in zip(many.leased.value.kv, single.leased.value.kv, strict=True):
        assert torch.equal(a[1:], b[1:])


def test_a_later_plan_that_brings_something_is_refused_and_the_lease_stays_good() -> None:
    world = World([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20), num_steps=2, captured=False)
    absorbed = world.leased.absorbed
    queue, output = schedule(world.queue)
    first = update_states(world.batch, output)
    queue = add(queue, Request("late", (4, 5), SamplingParams(temperature=0.0)), vocab_size=64)
    _, output = schedule(queue)
    second = update_states(first, output)
    plans = [plan_step(first, absorbed), plan_step(second, first)]

    with pytest.raises(PlanBaseError, match=r"plan 1 of 2 brings the device \d+ words"):
        run_unrolled(world.bound, world.leased, plans)

    run(world.bound, world.leased, plans[0])


def test_plans_that_do_not_follow_each_other_are_refused() -> None:
    world = World([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20), num_steps=2, captured=False)
    absorbed = world.leased.absorbed
    _, output = schedule(world.queue)
    plan = plan_step(update_states(world.batch, output), absorbed)

    with pytest.raises(PlanBaseError, match="plan 1 starts from a batch of"):
        run_unrolled(world.bound, world.leased, [plan, plan])
