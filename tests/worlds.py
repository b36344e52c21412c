"""The whole step in two worlds at once, with every law checked after every step.

One world is free values and reference kernels, the other is buffers and kernels that write them, and its batches are
padded. Both are driven by one scheduler, and both begin with a canary in every slot of the KV cache.
"""

from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.errors import InvalidRequestError, SchedulerOutputError
from purestep.pure.initial import initial_state
from purestep.pure.models.model import Model
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Finished, Request, SchedulerConfig
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.scheduler import (
    abort,
    add,
    check_invariants,
    finish,
    make_queue,
    preempt_all,
    schedule,
    update,
)
from purestep.pure.settle import give_up, settle
from purestep.pure.step import execute, sample
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers
from purestep.state.pending import Pending
from purestep.state.run import BoundStep, run
from tests import laws

Expected = Callable[[Request], tuple[int, ...]]
KV_TOLERANCE = 1e-9  # of keys and values, which are float64 and of the order of 1


@attrs.frozen
class Begun:
    """A step whose output the host does not know yet."""

    batch: InputBatch
    output: StepOutput
    pending: Pending


class Worlds:
    """A scheduler and two devices."""

    def __init__(
        self,
        model: Model,
        params: Params,
        config: SchedulerConfig,
        *,
        expected: Expected,
        eos_token_ids: tuple[int, ...] = (),
        canary: float = float("nan"),
        max_begun: int = 1,
    ) -> None:
        self.config, self.model, self.params, self.expected = config, model, params, expected
        self.canary, self.max_begun = canary, max_begun
        self.limits = BatchLimits(
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            vocab_size=model.vocab_size,
            block_sizes=config.block_sizes,
            num_blocks=config.num_blocks,
            eos_token_ids=eos_token_ids,
        )
        self.queue, self.batch = make_queue(config), InputBatch.make_empty(self.limits)
        self.bound = BoundStep(
            PersistentBuffers(model, self.limits, dtype=torch.float64), model, params, donating
        )
        self.requests: dict[str, Request] = {}
        self.begun: list[Begun] = []
        self.is_sound = True  # no law has been found broken
        self.lose_kv()

    def lose_kv(self) -> None:
        """Both devices are emptied, as after a step that failed: all requests are computed again."""
        self.begun.clear()
        self.queue, self.batch = preempt_all(self.queue), give_up(self.batch)
        self.absorbed = InputBatch.make_empty(self.limits)
        empty = initial_state(self.model, self.limits, dtype=torch.float64)
        self.state = laws.with_canary(empty, self.canary)
        self.leased = self.bound.buffers.lease()
        for kv in self.leased.value.kv:
            kv.fill_(self.canary)

    def add(self, request: Request) -> None:
        self.queue = add(self.queue, request, vocab_size=self.limits.vocab_size)
        self.requests[request.req_id] = request

    def refuse(self, request: Request) -> None:
        """A request that can not be served is refused by name, and nothing has changed."""
        before = laws.digest(self.queue)
        with pytest.raises(InvalidRequestError, match=repr(request.req_id)):
            add(self.queue, request, vocab_size=self.limits.vocab_size)
        assert laws.digest(self.queue) == before

    def contradict(self, wrong: Callable[[SchedulerOutput], SchedulerOutput]) -> None:
        """The coming step, made wrong, is refused, and nothing has changed."""
        _, output = schedule(self.queue)
        if output.req_ids:
            before = laws.digest(self.batch)
            with pytest.raises(SchedulerOutputError, match=r"request '|exactly once"):
                update_states(self.batch, wrong(output))
            assert laws.digest(self.batch) == before

    def abort(self, req_id: str) -> None:
        self.queue = abort(self.queue, [req_id, "unknown"])
        del self.requests[req_id]

    def finish(self, req_id: str) -> None:
        self.queue = finish(self.queue, req_id, "stop", "a string")
        del self.requests[req_id]

    def begin(self, more_tokens: int = 0, more_reqs: int | None = None) -> bool:
        """One step in both worlds, in that of buffers padded by so much; whether anything ran."""
        self.is_sound = False
        self.queue, output = schedule(self.queue)
        before, self.batch = self.batch, update_states(self.batch, output)
        check_invariants(self.queue)
        laws.assert_rows_are_a_partition(self.batch)
        assert_rows_are_stable(before, self.batch)
        if not output.req_ids:
            self.is_sound = True
            return False
        bounds = self.batch.layout.bounds
        num_reqs = bounds.num_reqs + (more_reqs or 0)
        shape = BatchDescriptor(
            num_tokens=bounds.num_tokens + more_tokens,
            num_reqs=None if more_reqs is None else min(num_reqs, self.limits.max_num_reqs),
        )
        old, old_absorbed = self.state, self.absorbed
        old_buffers = self.leased.clone()
        result = self._free_step(output)
        padded = pad_batch(self.batch, shape, before=self.leased.absorbed.layout)
        self.leased, pending = run(self.bound, self.leased, plan_step(padded, self.leased.absorbed))
        held = [row for row in self.batch.row_of.values() if is_held(row, old_absorbed, self.batch)]
        laws.assert_prefix_kept(old, self.state, held)
        laws.assert_prefix_kept(old_buffers, self.leased.value, held)
        laws.assert_frame(old_buffers, self.leased.value, self.slots, targets(output))
        self._assert_same_worlds()
        assert_same_output(pending.result(), result, bounds.num_reqs)
        self.begun.append(Begun(self.batch, result, pending))
        self.is_sound = True
        return True

    def _free_step(self, output: SchedulerOutput) -> StepOutput:
        """The step on free values, with the laws about one step alone."""
        old, before = self.state, laws.leaf_bytes(self.state)
        plan = plan_step(self.batch, self.absorbed)
        with torch.no_grad():
            executed = execute(
                self.model, self.params, replace(old, inbox=plan.inbox.to("cpu")), kernels=reference
            )
            self.state, result = sample(executed, kernels=reference)
        self.absorbed = self.batch
        assert laws.leaf_bytes(old) == before, "a step changed the state that it began with"
        self.slots = laws.written_slots(self.state, executed.inputs)
        laws.assert_one_writer(self.state, executed.inputs)
        laws.assert_frame(old, self.state, self.slots, targets(output))
        laws.assert_bounds(self.batch, self.state)
        return result

    def _assert_same_worlds(self) -> None:
        free, bound = self.state, self.leased.value
        rows = sorted(self.batch.row_of.values())
        laws.assert_same_rows(free, bound, rows)
        for row in rows:
            position = torch.arange(int(free.ledger.num_computed_tokens[row]))
            for layer, group in enumerate(free.group_of_layer):
                size = free.block_sizes[group]
                block = free.block_tables[group][row, position // size].long()
                ours, theirs = (state.kv[layer][block, :, position % size] for state in (free, bound))
                difference = (ours - theirs).abs()
                assert (difference <= KV_TOLERANCE * (1 + ours.abs())).all(), (
                    "the worlds hold other keys and values"
                )
                assert (ours.abs() < 1e6).all(), "a computed position holds the canary"

    def settle(self) -> None:
        """The host learns the output of the oldest step."""
        self.is_sound = False
        step = self.begun.pop(0)
        output = step.pending.result()
        self.queue, finished = update(self.queue, step.batch.req_ids, output)
        self.batch = settle(self.batch, step.batch, output)
        check_invariants(self.queue)
        laws.assert_rows_are_a_partition(self.batch)
        for done in finished:
            self._check(done)
        self.is_sound = True

    def _check(self, done: Finished) -> None:
        request = self.requests.pop(done.req_id)
        assert done.token_ids == self.expected(request), f"{done.req_id} got other tokens than alone"

    def drain(self) -> None:
        """Run until everybody has ended; then no block is held."""
        while self.requests or self.begun:
            if len(self.begun) >= self.max_begun or not self.begin():
                self.settle()
        for group, num_blocks in enumerate(self.config.num_blocks):
            assert self.queue.pools[group].num_available == num_blocks - 1


def is_held(row: int, before: InputBatch, after: InputBatch) -> bool:
    """Whether the same admission of a request sat in the row before and after."""
    return before.rows.requests[row] is after.rows.requests[row] is not None


def assert_rows_are_stable(before: InputBatch, after: InputBatch) -> None:
    """A request that was admitted once sits where it sat."""
    for req_id, row in after.row_of.items():
        request = after.rows.requests[row]
        if req_id in before.row_of and before.rows.requests[before.row_of[req_id]] is request:
            assert row == before.row_of[req_id]


def targets(output: SchedulerOutput) -> list[list[int]]:
    """Blocks that a step copies into, per KV group."""
    return [[target for _, target in pairs] for pairs in output.block_copies]


def assert_same_output(ours: StepOutput, theirs: StepOutput, num_reqs: int) -> None:
    """The padded output says of the real requests what the other one says; behind them nothing is kept."""
    assert (ours.sampled_token_ids[num_reqs:] == -1).all()
    for name in ("sampled_token_ids", "num_computed_tokens", "active", "has_nan"):
        assert np.array_equal(getattr(ours, name)[:num_reqs], getattr(theirs, name).numpy())
    if theirs.logprobs_tensors is None:
        assert ours.logprobs_tensors is None
        return
    for name in ("logprob_token_ids", "selected_token_ranks"):
        found = getattr(ours.logprobs_tensors, name)[:num_reqs]
        assert np.array_equal(found, getattr(theirs.logprobs_tensors, name).numpy())
    np.testing.assert_allclose(
        ours.logprobs_tensors.logprobs[:num_reqs], theirs.logprobs_tensors.logprobs.numpy(), rtol=0, atol=1e-9
    )
