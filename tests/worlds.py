"""The whole step in two worlds at once, with every law checked after every step.

One world is free values and reference kernels, the other is buffers and kernels that write them, and its batches are
padded. Both are driven by one scheduler, and both begin with a canary in every slot of the KV cache.
"""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest
import torch

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.errors import InvalidRequestError, OutOfBlocksError, OutOfRowsError, SchedulerOutputError
from purestep.pure.fork import fork_request, keep_blocks
from purestep.pure.initial import initial_state
from purestep.pure.models.model import Model
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.propose import propose
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.outputs import DraftTokenIds, StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Finished, Queue, Request, SchedulerConfig
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.records.state import StepState
from purestep.pure.rows import drop, free_rows
from purestep.pure.scheduler import (
    abort,
    add,
    check_invariants,
    finish,
    fork,
    go_back,
    hold,
    let_go,
    make_queue,
    preempt_all,
    schedule,
    take_drafts,
    update,
)
from purestep.pure.settle import give_up, settle
from purestep.pure.step import execute, sample
from purestep.pure.update import update_states
from purestep.state.buffers import PersistentBuffers
from purestep.state.moments import Moment, remember, rewind
from purestep.state.pending import Pending
from purestep.state.run import BoundStep, run
from tests import laws
from tests.toy_drafter import guessed, toy_drafter

Streams = tuple[
    tuple[int, int], ...
]  # of a fork: the streams of its ancestors, and outputs after the last of each
Expected = Callable[[Request, Streams], tuple[int, ...]]
KV_TOLERANCE = 1e-9  # of keys and values, which are float64 and of the order of 1


@attrs.frozen
class Begun:
    """A step whose output the host does not know yet."""

    batch: InputBatch
    output: StepOutput
    pending: Pending


@attrs.frozen
class Remembered:
    """All that there was at a moment."""

    name: int
    queue: Queue
    batch: InputBatch
    absorbed: InputBatch
    state: StepState
    device: Moment
    buffers: StepState  # a copy, to compare with
    requests: dict[str, Request]
    streams: dict[str, Streams]
    begun: list[Begun]


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
            num_drafts=config.num_spec_tokens,
        )
        self.drafter = toy_drafter(config.num_spec_tokens) if config.drafts_on_device else None
        self.queue, self.batch = make_queue(config), InputBatch.make_empty(self.limits)
        self.bound = BoundStep(
            PersistentBuffers(model, self.limits, dtype=torch.float64, drafter=self.drafter),
            model,
            params,
            donating,
            drafter=self.drafter,
        )
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, Streams] = {}
        self.moments: list[Remembered] = []
        self.begun: list[Begun] = []
        self.is_sound = True  # no law has been found broken
        self.lose_kv()

    def lose_kv(self) -> None:
        """Both devices are emptied, as after a step that failed: all requests are computed again.

        Blocks that moments hold are not: no step was writing them.
        """
        for (
            req_id
        ) in self.requests:  # tokens on their way are lost, and a fork draws those that it has not got anew
            num_known = self._num_outputs(req_id)
            cut = [(stream, min(num, num_known)) for stream, num in self.streams[req_id]]
            self.streams[req_id] = tuple(cut)
        self.begun.clear()
        self.queue, self.batch = preempt_all(self.queue), give_up(self.batch)
        self.absorbed = InputBatch.make_empty(self.limits)
        empty = initial_state(self.model, self.limits, dtype=torch.float64)
        lost = laws.with_canary(empty, self.canary)
        self.leased = self.bound.buffers.lease()
        cache = []
        for layer, group in enumerate(empty.group_of_layer):
            ours, theirs = lost.kv[layer], self.leased.value.kv[layer]
            kept = np.unique(np.concatenate([[0], *(m[group] for m in self.queue.moments.values())])).tolist()
            if self.moments:
                ours[kept] = self.state.kv[layer][kept]
            gone = [block for block in range(len(ours)) if block not in kept or not self.moments]
            theirs[gone] = self.canary
            cache.append(ours)
        self.state = replace(lost, kv=tuple(cache))

    def add(self, request: Request) -> None:
        self.queue = add(self.queue, request, vocab_size=self.limits.vocab_size)
        self.requests[request.req_id] = request
        self.streams[request.req_id] = ()

    def fork(self, parent: str, req_id: str, *, arrival: int, stream: int | None) -> None:
        """A request goes on under a second id; what is refused for want of room changes nothing."""
        self._await_drafts()
        if parent not in self.requests or req_id in self.requests:
            return
        has_row = parent in self.batch.row_of and bool(free_rows(drop(self.batch, [req_id])))
        on_its_way = sum(
            bool(step.samples[step.ticket == self.queue.live.get(parent)].any())
            for step in self.queue.in_flight
        )
        num_outputs, before = self._num_outputs(parent) + on_its_way, laws.digest(self.queue)
        try:
            forked = fork(self.queue, parent, req_id, arrival=arrival, stream=stream, has_row=has_row)
        except (OutOfRowsError, OutOfBlocksError):
            assert laws.digest(self.queue) == before
            return
        self.queue, self.batch = forked.queue, keep_blocks(self.batch, forked.kept)
        if forked.has_run:
            self.batch = fork_request(self.batch, parent, req_id, stream=stream, goes_on=forked.goes_on)
        old = self.requests[parent]
        self.requests[req_id] = replace(
            old, req_id=req_id, arrival=arrival, stream=old.stream if stream is None else stream
        )
        self.streams[req_id] = (*self.streams[parent], (old.stream, num_outputs))
        check_invariants(self.queue)

    def _num_outputs(self, req_id: str) -> int:
        """Outputs that the host knows."""
        ticket, num_prompt = self.queue.live.get(req_id), len(self.requests[req_id].prompt_token_ids)
        running = self.queue.running
        for row in np.flatnonzero(running.facts.ticket == ticket).tolist():
            return int(running.counts.num_known[row]) - num_prompt
        assert ticket is not None
        state = self.queue.waiting.states.get(ticket)
        assert state is not None
        return len(state.tokens) - num_prompt

    def remember(self) -> None:
        """In both worlds; in that of free values it is keeping the values."""
        self._await_drafts()
        name = 1 + max((moment.name for moment in self.moments), default=0)
        shareable = hold(self.queue, name)
        self.queue, self.batch = shareable.queue, keep_blocks(self.batch, shareable.kept)
        check_invariants(self.queue)
        self.moments.append(
            Remembered(
                name,
                self.queue,
                self.batch,
                self.absorbed,
                self.state,
                remember(self.leased, self.batch),
                self.leased.clone(),
                dict(self.requests),
                dict(self.streams),
                list(self.begun),
            )
        )

    def go_back(self, moment: Remembered) -> None:
        """To a moment, whatever ran in between. What is dropped with it is never settled."""
        self.is_sound = False
        self.queue = go_back(self.queue, moment.queue)
        check_invariants(self.queue)
        kv = self.state.kv
        self.batch, self.absorbed, self.state = moment.batch, moment.absorbed, replace(moment.state, kv=kv)
        self.requests, self.streams = dict(moment.requests), dict(moment.streams)
        self.begun = list(moment.begun)
        consumed, self.leased = self.leased, rewind(moment.device, self.leased)
        assert not consumed.is_valid
        running = [moment.batch.row_of.get(req_id, -1) for req_id in moment.queue.running.req_ids]
        rows = [row for row in running if row >= 0 and is_held(row, moment.absorbed, moment.batch)]
        laws.assert_rewound(moment.state, self.state, rows)
        laws.assert_rewound(moment.buffers, self.leased.value, rows)
        self._assert_same_worlds(rows)
        self.is_sound = True

    def let_go(self, moment: Remembered) -> None:
        self.queue = let_go(self.queue, moment.name)
        self.moments.remove(moment)
        check_invariants(self.queue)

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
        laws.assert_rows_are_a_partition(replace(self.batch, forks=()))
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
        self._assert_same_worlds(sorted(self.batch.row_of.values()))
        laws.assert_same_output(pending.result(), result, bounds.num_reqs)
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
            sampled = sample(executed, kernels=reference)
            self.state, result = propose(self.drafter, self.params, executed, *sampled, kernels=reference)
        self.absorbed = self.batch
        assert laws.leaf_bytes(old) == before, "a step changed the state that it began with"
        self.slots = laws.written_slots(self.state, executed.inputs)
        laws.assert_one_writer(self.state, executed.inputs)
        laws.assert_frame(old, self.state, self.slots, targets(output))
        laws.assert_bounds(self.batch, self.state)
        return result

    def _assert_same_worlds(self, rows: Sequence[int]) -> None:
        """What the device holds of these rows, alike. One that sits out may have given up the block that it goes on in:
        it gets a copy before it does, and what lies past its room is somebody else's until then."""
        free, bound = self.state, self.leased.value
        laws.assert_same_rows(free, bound, rows)
        for row in rows:
            num_here = min(int(free.ledger.num_computed_tokens[row]), int(free.room[row]))
            position = torch.arange(num_here)
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
        if self.config.num_spec_tokens and self.drafter is None:
            self._draft()
        check_invariants(self.queue)
        laws.assert_rows_are_a_partition(self.batch)
        for done in finished:
            self._check(done)
        self.is_sound = True

    def _draft(self) -> None:
        """The scheduler is told of guesses for all who run."""
        own = {r: self.batch.rows.tokens[row].tolist() for r, row in self.batch.row_of.items()}  # type: ignore[union-attr]
        drafts = [guessed(tokens, self.config.num_spec_tokens) for tokens in own.values()]
        self.queue = take_drafts(self.queue, DraftTokenIds(tuple(own), tuple(drafts)))

    def _await_drafts(self) -> None:
        """Until it is known what becomes of them, nobody knows which blocks are full."""
        while self.config.num_spec_tokens and self.begun:
            self.settle()

    def _check(self, done: Finished) -> None:
        request = self.requests.pop(done.req_id)
        expected = self.expected(request, self.streams[done.req_id])
        assert done.token_ids == expected, f"{done.req_id} got other tokens than alone"

    def drain(self) -> None:
        """Run until everybody has ended; then, without moments, no block is held."""
        while self.moments:
            self.let_go(self.moments[0])
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
