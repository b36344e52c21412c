"""Several steps in one go, captured or not: the tokens, the ledger, the cache and the batch of single steps."""

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.dispatch import determine_batch_execution_and_padding, dispatch_keys
from purestep.pure.errors import DispatchError, SchedulerOutputError
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import add, make_queue, schedule, update
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers
from purestep.state.graphs import GraphKey
from purestep.state.run import BoundStep, run
from purestep.state.sizes import GREEDY_SHAPE
from purestep.state.two_phase import execute
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
    logprobs=st.sampled_from([None, None, 2]),
    kept_mass=st.booleans(),
)


class World:
    """A scheduler, a batch and buffers, some requests behind their prefill."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, *, num_steps: int, captured: bool):
        api = FakeGraphs() if captured else None
        self.bound = BoundStep(PersistentBuffers(MODEL, LIMITS), MODEL, PARAMS, donating, api)
        self.queue, self.batch = make_queue(SCHEDULER), InputBatch.make_empty(LIMITS)
        for i, prompt in enumerate(prompts):
            request = Request(str(i), tuple(prompt), params, arrival=i, stream=i)
            self.queue = add(self.queue, request, vocab_size=64)
        self.leased = self.bound.buffers.lease()
        self.begin()
        self.settle()
        if self.bound.captured is not None:
            sampler = self.batch.layout.bounds.sampler
            self.bound.captured.capture([GraphKey(d, sampler, num_steps) for d in KEYS.full.values()])

    def begin(self, num_steps: int = 1) -> None:
        """So many steps as one, in a graph if there is one."""
        self.queue, self.scheduled = schedule(self.queue, num_steps)
        self.batch, absorbed = update_states(self.batch, self.scheduled), self.leased.absorbed
        padded, key = self.batch, None
        if self.bound.captured is not None:
            bounds = self.batch.layout.bounds
            execution = determine_batch_execution_and_padding(KEYS, bounds)
            key = self.bound.captured.covering(execution, bounds.sampler, num_steps=bounds.num_steps)
            padded = (
                padded if key is None else pad_batch(padded, execution.descriptor, before=absorbed.layout)
            )
        self.key = key
        self.leased, self.pending = run(self.bound, self.leased, plan_step(padded, absorbed), key=key)

    def settle(self) -> StepOutput:
        """What the last one brought, of its requests."""
        output = self.pending.result()
        self.queue, _ = update(self.queue, self.scheduled.req_ids, output)
        self.batch = settle(self.batch, self.pending.batch, output)
        return output


@examples(0.1)
@given(PROMPTS, PARAMETERS, st.integers(2, 5), st.booleans())
def test_unrolled_steps_are_single_steps(
    prompts: list[list[int]], params: SamplingParams, num_steps: int, captured: bool
) -> None:
    """Bit by bit, if single steps are begun one after another, and told what they brought at the end."""
    single = World(prompts, params, num_steps=1, captured=captured)
    many = World(prompts, params, num_steps=num_steps, captured=captured)
    if not single.queue.running.req_ids:
        return
    num_reqs, pending = len(many.queue.running), []
    many.begin(num_steps)
    for _ in range(num_steps):
        single.begin()
        pending.append(single.pending)

    assert many.batch.layout.bounds.num_steps == num_steps
    assert (many.key is not None, single.key is not None) == (captured, captured)
    output, outputs = many.settle(), [own.result() for own in pending]
    tokens = np.concatenate([own.sampled_token_ids for own in outputs], axis=1)
    assert output.sampled_token_ids[:num_reqs].tolist() == tokens[:num_reqs].tolist()
    assert output.num_computed_tokens.tolist() == outputs[-1].num_computed_tokens.tolist()
    assert output.active.tolist() == outputs[-1].active.tolist()
    for table in ("logprobs_tensors", "kept_mass"):
        theirs = [pytree.tree_leaves(getattr(own, table)) for own in outputs]
        for ours, *columns in zip(pytree.tree_leaves(getattr(output, table)), *theirs, strict=True):
            if ours is not None:
                expected = np.stack(columns, axis=1).reshape(-1, *columns[0].shape[1:])
                assert ours.tobytes() == expected.tobytes()
    assert torch.equal(many.leased.value.ledger.table, single.leased.value.ledger.table)
    assert torch.equal(many.leased.value.token_ids[:-1], single.leased.value.token_ids[:-1])
    for a, b in zip(many.leased.value.kv, single.leased.value.kv, strict=True):
        assert torch.equal(a[1:], b[1:])


def decoding(num_steps: int = 4) -> World:
    return World(
        [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20), num_steps=num_steps, captured=True
    )


def test_what_contradicts_several_steps_is_refused_and_the_batch_stays_good() -> None:
    world = decoding()
    _, output = schedule(world.queue, 4)
    counts = output.num_scheduled_tokens
    for wrong in (
        replace(output, num_scheduled_tokens=counts + 1),
        replace(output, num_steps=0),
        replace(output, num_device_drafts=counts - 1),
        replace(output, scheduled_spec_decode_tokens={"0": (1,)}),
    ):
        with pytest.raises(SchedulerOutputError, match="steps at once"):
            update_states(world.batch, wrong)

    world.begin(4)
    assert (world.settle().sampled_token_ids >= 0).sum() == 4


def test_a_prompt_is_no_part_of_several_steps() -> None:
    """Device and scheduler would not agree on how far it got."""
    queue = add(make_queue(SCHEDULER), Request("r", (1, 2, 3), SamplingParams(max_tokens=9)), vocab_size=64)
    _, output = schedule(queue)
    wrong = replace(output, num_steps=2, num_scheduled_tokens=np.array([2], np.int32))

    with pytest.raises(SchedulerOutputError, match="prompts before"):
        update_states(InputBatch.make_empty(LIMITS), wrong)


def test_graphs_of_another_number_of_steps_are_refused_and_so_are_halves_and_the_lease_stays_good() -> None:
    world = decoding()
    absorbed = world.leased.absorbed
    _, output = schedule(world.queue, 4)
    plan = plan_step(update_states(world.batch, output), absorbed)
    key = GraphKey(KEYS.full[1, True, 0], GREEDY_SHAPE, 1)

    with pytest.raises(DispatchError, match="a plan of 4 steps, and graphs of 1"):
        run(world.bound, world.leased, plan, key=key)
    with pytest.raises(DispatchError, match="4 steps at once has no halves"):
        execute(world.bound, world.leased, plan)

    run(world.bound, world.leased, plan)
