"""`Turns`: what the engine knows between steps, and the steps that are in flight.

A turn is schedule -> update_states -> plan_step -> run, and, for the oldest step in flight, settle -> update. What is
known is one immutable record, replaced as a whole: a turn that fails leaves the old one, and one that fails while the
buffers are written has every running request computed again.
"""

from collections import deque
from collections.abc import Iterable

import attrs

from purestep.pure.dispatch import determine_batch_execution_and_padding
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchKeys
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Finished, Queue, Request
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.scheduler import abort, add, finish, preempt_all, schedule, set_version, update
from purestep.pure.settle import give_up, settle
from purestep.pure.update import update_states
from purestep.state.graphs import GraphKey
from purestep.state.lease import Leased
from purestep.state.pending import Pending
from purestep.state.run import BoundStep, rebind, run


@attrs.frozen
class Now:
    """What is known between two turns."""

    queue: Queue
    batch: InputBatch
    leased: Leased


@attrs.frozen
class InFlight:
    """A step whose output is on its way; `age` says how old requests are that it can concern."""

    scheduled: SchedulerOutput
    pending: Pending
    age: int


@attrs.frozen
class Landed:
    """A step whose output is known: what it was, what it brought, which requests ended with it."""

    scheduled: SchedulerOutput
    output: StepOutput
    finished: tuple[Finished, ...]
    age: int


class Turns:
    """Runs steps, up to `steps_ahead` of them before the oldest one's output is asked for."""

    def __init__(
        self,
        bound: BoundStep,
        limits: BatchLimits,
        queue: Queue,
        dispatch_keys: DispatchKeys,
        steps_ahead: int,
    ) -> None:
        self.bound = bound
        self._dispatch_keys = dispatch_keys
        self._steps_ahead = steps_ahead
        self._in_flight: deque[InFlight] = deque()
        self.now = Now(queue, InputBatch.make_empty(limits), bound.buffers.lease())

    def turn(self, age: int) -> tuple[SchedulerOutput | None, Landed | None]:
        """The step that was begun, if anything was scheduled, and the one whose output is known now, if any."""
        scheduled = self._begin(age)
        if self._in_flight and (scheduled is None or len(self._in_flight) > self._steps_ahead):
            return scheduled, self._land()
        return scheduled, None

    def add(self, requests: Iterable[Request], *, vocab_size: int) -> None:
        """Queue requests: all of them, or none and an error."""
        queue = self.now.queue
        for request in requests:
            queue = add(queue, request, vocab_size=vocab_size)
        self.now = attrs.evolve(self.now, queue=queue)

    def abort(self, req_ids: Iterable[str]) -> None:
        """Drop requests; ids that are not in use are ignored."""
        self.now = attrs.evolve(self.now, queue=abort(self.now.queue, req_ids))

    def finish(self, req_id: str, stop: str) -> None:
        """End a request at a stop string, unless its last token ended it already."""
        if req_id in self.now.queue.live:
            self.now = attrs.evolve(self.now, queue=finish(self.now.queue, req_id, "stop", stop))

    def use(self, params: Params, *, keep_kv: bool) -> None:
        """Other parameters from the next step on; graphs are captured anew if the tensors lie elsewhere."""
        queue = set_version(self.now.queue, params.version, keep_kv=keep_kv)
        self.bound = rebind(self.bound, params)
        self.now = attrs.evolve(self.now, queue=queue)

    def _begin(self, age: int) -> SchedulerOutput | None:
        before = self.now
        queue, scheduled = schedule(before.queue)
        batch = update_states(before.batch, scheduled)
        if not scheduled.req_ids:
            self.now = Now(queue, batch, before.leased)
            return None
        absorbed = before.leased.absorbed
        padded, key = self._dispatched(batch, absorbed)
        plan = plan_step(padded, absorbed)
        try:
            leased, pending = run(self.bound, before.leased, plan, key=key)
            self.now = Now(queue, batch, leased)
            self._in_flight.append(InFlight(scheduled, pending, age))
        except BaseException:
            self._recover()
            raise
        return scheduled

    def _land(self) -> Landed:
        try:
            flight = self._in_flight.popleft()
            output = flight.pending.result()
            queue, finished = update(self.now.queue, flight.scheduled.req_ids, output)
            batch = settle(self.now.batch, flight.pending.batch, output)
            self.now = Now(queue, batch, self.now.leased)
        except BaseException:
            self._recover()
            raise
        return Landed(flight.scheduled, output, finished, flight.age)

    def _dispatched(self, batch: InputBatch, absorbed: InputBatch) -> tuple[InputBatch, GraphKey | None]:
        """The batch as the device is to see it, and the graph that runs it; without one, the batch as it is."""
        captured = self.bound.captured
        if captured is None:
            return batch, None
        execution = determine_batch_execution_and_padding(self._dispatch_keys, batch.layout.bounds)
        if execution.cudagraph_mode is CUDAGraphMode.NONE:
            return batch, None
        key = captured.covering(execution, batch.layout.bounds.sampler)
        if key is None:
            return batch, None
        return pad_batch(batch, execution.descriptor, before=absorbed.layout), key

    def _recover(self) -> None:
        """After a failure half-way: the buffers start empty, and every running request is computed again."""
        self._in_flight.clear()
        self.now = Now(preempt_all(self.now.queue), give_up(self.now.batch), self.bound.buffers.lease())
