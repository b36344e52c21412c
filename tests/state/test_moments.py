"""The moves on whole states, on buffers without an engine: rewind and rerun give what was there, to the last bit."""

from collections import deque
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.donating import donating
from purestep.pure.errors import PlanBaseError, StaleStateError
from purestep.pure.fork import keep_blocks
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.plan import StepPlan
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.scheduler import abort, add, go_back, hold, make_queue, schedule, update
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers
from purestep.state.lease import Leased
from purestep.state.moments import Moment, remember, rerun, rewind
from purestep.state.pending import Pending
from purestep.state.run import BoundStep, run
from tests.laws import assert_reruns, assert_rewound, equal
from tests.profiles import examples
from tests.tiny import cached_requests, new_request, scheduled, tiny_llama

LIMITS = BatchLimits(4, 40, 16, (4, 2), (30, 60))
CONFIG = SchedulerConfig(LIMITS.num_blocks, LIMITS.block_sizes, 4, 12, 40, async_scheduling=True)
MODEL, PARAMS = tiny_llama(groups=(0, 1))
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=1, temperature=0.9, max_tokens=10),
    SamplingParams(seed=2, max_tokens=9, frequency_penalty=0.4, logit_bias={3: 1.5}),
    SamplingParams(temperature=0.0, max_tokens=3),
)


class Device:
    """Buffers, driven by a scheduler whose outputs come late."""

    def __init__(self) -> None:
        self.bound = BoundStep(PersistentBuffers(MODEL, LIMITS, dtype=torch.float64), MODEL, PARAMS, donating)
        self.leased = self.bound.buffers.lease()
        self.queue, self.batch = make_queue(CONFIG), InputBatch.make_empty(LIMITS)
        self.begun = deque[Pending]()
        self.plans: list[StepPlan] = []
        self.outputs: list[Pending] = []
        self.num_added = 0

    def add(self, rng: Random) -> None:
        prompt = tuple(rng.randrange(1, 16) for _ in range(rng.randrange(1, 14)))
        params = rng.choice(KINDS)
        self.queue = add(self.queue, Request(f"r{self.num_added}", prompt, params, arrival=self.num_added))
        self.num_added += 1

    def step(self, lag: int) -> None:
        self.queue, output = schedule(self.queue)
        self.batch = update_states(self.batch, output)
        if output.req_ids:
            plan = plan_step(self.batch, self.leased.absorbed)
            self.leased, pending = run(self.bound, self.leased, plan)
            self.plans.append(plan)
            self.outputs.append(pending)
            self.begun.append(pending)
        while self.begun and (len(self.begun) > lag or not output.req_ids):
            self.settle()

    def settle(self) -> None:
        pending = self.begun.popleft()
        self.queue, _ = update(self.queue, pending.batch.req_ids, pending.result())
        self.batch = settle(self.batch, pending.batch, pending.result())

    def remember(self) -> Moment:
        shareable = hold(self.queue, "moment")
        self.queue, self.batch = shareable.queue, keep_blocks(self.batch, shareable.kept)
        return remember(self.leased, self.batch)


@examples(0.25)
@given(st.randoms(use_true_random=False), st.integers(0, 2), st.integers(1, 9))
def test_the_same_plans_give_the_same_tokens_and_ledger(rng: Random, lag: int, num_steps: int) -> None:
    """Whatever ran in between, with steps in flight at the moment and at the rewind; twice."""
    device = Device()
    for _ in range(num_steps):
        if rng.random() < 0.6:
            device.add(rng)
        device.step(lag)
    moment, queue, begun = device.remember(), device.queue, list(device.begun)
    there, first = device.leased.clone(), len(device.plans)
    for _ in range(rng.randrange(1, 6)):
        device.step(lag)
    plans, ledger = device.plans[first:], device.leased.value.ledger.table.clone()
    tokens = [pending.result().sampled_token_ids.tolist() for pending in device.outputs[first:]]
    device.queue = abort(device.queue, [f"r{i}" for i in range(device.num_added) if rng.random() < 0.3])
    for _ in range(rng.randrange(6)):
        if rng.random() < 0.5:
            device.add(rng)
        device.step(lag)

    back = go_back(
        device.queue, queue
    )  # nobody runs but those that ran then: the plans' blocks are free again
    device.leased = rewind(moment, device.leased)
    running = [moment.batch.row_of[r] for r in back.running.req_ids if r in moment.absorbed.row_of]
    assert_rewound(there, device.leased.value, running)
    for _ in range(2):
        device.leased = assert_reruns(device.bound, moment, device.leased, plans, tokens, ledger)
    device.leased = rewind(moment, device.leased)
    device.queue, device.batch, device.begun = back, moment.batch, deque(begun)
    while device.queue.live:
        device.step(lag)


def decoding(num_steps: int = 3) -> tuple[BoundStep, Leased, InputBatch]:
    """One request that has run so many steps, all settled, with blocks for more."""
    limits = BatchLimits(2, 40, 16, (4,), (30,))
    model, params = tiny_llama()
    bound = BoundStep(PersistentBuffers(model, limits, dtype=torch.float64), model, params, donating)
    leased = bound.buffers.lease()
    new = new_request("a", (1, 2, 3), (tuple(range(1, 9)),))
    output = scheduled(new, counts={"a": 3})
    batch = leased.absorbed
    for _ in range(num_steps):
        batch = update_states(batch, output)
        leased, pending = run(bound, leased, plan_step(batch, leased.absorbed))
        batch = settle(batch, batch, pending.result())
        output = scheduled(cached=cached_requests(batch, "a"), counts={"a": 1})
    return bound, leased, batch


def test_a_moment_is_a_copy_of_what_is_overwritten_and_no_more() -> None:
    _, leased, batch = decoding()
    moment = remember(leased, batch)
    state = leased.value

    (ledger,) = moment.overwritten
    assert equal(ledger, state.ledger.table)
    assert ledger.data_ptr() != state.ledger.table.data_ptr()
    assert moment.token_ids.tolist() == state.token_ids[:1, :6].tolist()
    assert moment.nbytes == 4 * (7 * 3 + 1 + 6)
    assert [blocks.tolist() for blocks in moment.blocks] == [list(range(1, 9))]


def test_rewinding_consumes_the_lease_and_leaves_every_buffer_where_it_was() -> None:
    bound, leased, batch = decoding()
    moment, before = remember(leased, batch), leased.generation
    places = [buffer.tensor.data_ptr() for buffer in bound.buffers.specification]
    rewound = rewind(moment, leased)

    assert (rewound.generation, rewound.absorbed) == (before + 1, moment.absorbed)
    with pytest.raises(
        StaleStateError, match=r"To branch on purpose, remember it first:  here = remember\(leased"
    ):
        rewind(moment, leased)
    assert [buffer.tensor.data_ptr() for buffer in bound.buffers.specification] == places


def test_a_moment_can_be_gone_back_to_from_emptied_buffers_and_after_a_failure() -> None:
    bound, leased, batch = decoding()
    moment, there = remember(leased, batch), leased.clone()
    plan = plan_step(
        update_states(batch, scheduled(cached=cached_requests(batch, "a"), counts={"a": 1})), leased.absorbed
    )

    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    broken = BoundStep(bound.buffers, bound.model, bound.params, replace(donating, greedy=fails))
    with pytest.raises(RuntimeError, match="out of luck"):
        run(broken, leased, plan)
    with pytest.raises(StaleStateError, match=r"failed half-way.*rewind\(here, buffers\.lease\(\)\)"):
        rewind(moment, leased)
    rewound = rewind(moment, bound.buffers.lease())
    assert_rewound(there, rewound.value, [0])
    _, first = run(bound, rewound, plan)
    _, (again,) = rerun(bound, moment, bound.buffers.lease(), [plan])
    assert first.result().sampled_token_ids.tolist() == again.result().sampled_token_ids.tolist()


def test_a_moment_is_of_its_buffers_alone() -> None:
    bound, leased, batch = decoding()
    moment = remember(leased, batch)
    _, other, _ = decoding()
    with pytest.raises(StaleStateError, match="other buffers than the lease"):
        rewind(moment, other)
    assert other.is_valid
    bound.buffers.close()
    with pytest.raises(StaleStateError, match="closed"):
        rewind(moment, leased)
    with pytest.raises(StaleStateError, match="closed"):
        remember(leased, batch)
    del bound, leased
    with pytest.raises(StaleStateError, match="buffers that are gone"):
        rewind(moment, other)


def test_plans_of_another_history_are_refused() -> None:
    bound, leased, batch = decoding()
    early = remember(leased, batch)
    output = scheduled(cached=cached_requests(batch, "a"), counts={"a": 1})
    batch = update_states(batch, output)
    leased, _ = run(bound, leased, plan_step(batch, leased.absorbed))
    late = remember(leased, batch)
    with pytest.raises(PlanBaseError):
        rerun(bound, early, leased, [plan_step(batch, late.absorbed)])
