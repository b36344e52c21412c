"""`Turns`: what the engine knows between steps, and the steps that are in flight.

A turn is schedule -> update_states -> plan_step -> run, and, for the oldest step in flight, settle -> update; then its
tokens are published. What is known is one immutable record, replaced as a whole: whatever interrupts a turn, and
wherever, leaves the old one or the new one. If the buffers were being written, every running request is computed again;
a step that has landed stays until it is published.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch.utils._pytree as pytree

from purestep.pure.errors import OutOfBlocksError, ReentrantCallError
from purestep.pure.fork import fork_request, keep_blocks
from purestep.pure.record import record, replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import DispatchKeys
from purestep.pure.records.drafter import HostDrafter
from purestep.pure.records.layout import LayoutBounds
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Queue, Request
from purestep.pure.rows import drop, first_free_row
from purestep.pure.sampling_extras import try_processors
from purestep.pure.scheduler import (
    abort,
    add,
    finish,
    fork,
    go_back,
    hold,
    let_go,
    preempt_all,
    schedule,
    set_version,
    update,
)
from purestep.pure.settle import give_up, settle
from purestep.pure.update import update_states
from purestep.state.book import (
    Book,
    Unscored,
    admit,
    known,
    publish,
    readers_of,
    tell,
    with_heir,
)
from purestep.state.book import abort as book_abort
from purestep.state.drafting import drafted
from purestep.state.engine_moment import EngineMoment, Known
from purestep.state.flights import InFlight, Landed, Readers, Sample
from purestep.state.grammars import Grammars
from purestep.state.launch import Launched, launch, steps_at_once
from purestep.state.lease import Leased
from purestep.state.moments import remember, rewind
from purestep.state.results import RequestOutput
from purestep.state.run import BoundStep, rebind
from purestep.state.structured import grammar_masks

T = TypeVar("T")


@record
class Now:
    """What is known between two turns."""

    queue: Queue
    batch: InputBatch
    leased: Leased
    bound: BoundStep
    book: Book
    in_flight: tuple[InFlight, ...] = ()  # oldest first
    landed: Landed | None = None  # not published yet
    kept: Any = None  # what a drafter on the host keeps


class Turns:
    """Runs steps, up to `steps_ahead` of them before the oldest one's output is asked for.

    What is called a step here are `unroll` of them, run by one launch, where `schedule` gives so many and a graph of so
    many is captured.
    """

    def __init__(
        self,
        bound: BoundStep,
        limits: BatchLimits,
        queue: Queue,
        dispatch_keys: DispatchKeys,
        grammars: Grammars,
        steps_ahead: int,
        drafter: HostDrafter | None = None,
        unroll: int = 1,
    ) -> None:
        self.dispatch_keys = dispatch_keys
        self._steps_ahead = steps_ahead
        self._unroll = unroll
        self.num_tokens = 0  # sampled so far
        self._drafter = drafter
        self.grammars = grammars
        self._calls_out = False  # to functions of a caller, which must not call back
        self.num_rewinds = 0
        self._moment_numbers = count()
        self._last_readers: tuple[tuple[str, ...], Readers | None] = ((), None)
        self._dropped = deque[int]()  # moments that nobody has any more; put here whenever that happens
        kept = None if drafter is None else drafter.init()
        self.now = Now(queue, InputBatch.make_empty(limits), bound.buffers.lease(), bound, Book(), kept=kept)

    @property
    def bound(self) -> BoundStep:
        """The step, with the parameters in use."""
        return self.now.bound

    def turn(self) -> None:
        """Begin a step, if anything can be scheduled; take in the one whose output is to be known now, if any.

        Raises:
            OutOfBlocksError: moments hold so many blocks that no request can go on; nothing has changed then.
        """
        now = self.ready()
        begun = len(now.in_flight) <= self._steps_ahead and self._begin()
        if self.now.in_flight and (not begun or len(self.now.in_flight) > self._steps_ahead):
            self._take_in()
            if self._drafter is not None:
                now = self.now
                propose = partial(drafted, self._drafter, now.kept, now.queue, now.batch)
                kept, queue = self._calling_out(propose)
                self.now = replace(self.now, kept=kept, queue=queue)
        elif not begun and len(self.now.queue.live):
            self._refuse_to_stand_still()

    def _take_in(self) -> None:
        """The oldest step in flight is known, and published."""
        try:
            self._land()
        except Exception:
            self._recover()
            raise
        self.publish()

    def settled(self) -> Now:
        """What is known, once no drafts are on their way: until then nobody knows which blocks are full."""
        self.ready()
        while self.now.queue.config.num_spec_tokens and self.now.in_flight:
            self._take_in()
        return self.now

    def ready(self) -> Now:
        """What is known, once what interrupted turns and dropped moments have left is cleared away.

        Raises:
            StaleStateError: the buffers are closed.
            ReentrantCallError: see `refuse_reentry`.
        """
        self.refuse_reentry()
        self.swept()
        self.publish()
        if self.bound.captured is not None:
            self.bound.captured.complete()
        if not self.now.leased.is_valid:
            self._recover()
        return self.now

    def refuse_reentry(self) -> None:
        """Refuse a call from inside a step: what that is about to put down would be without it.

        Raises:
            ReentrantCallError: a logits processor (or another thread, while a step runs) called the engine.
        """
        if self._calls_out:
            raise ReentrantCallError(
                "the engine was called from inside its own step, by a logits processor or another thread: return "
                "from the step first, and call it from the loop that calls step"
            )

    def _calling_out(self, call: Callable[[], T]) -> T:
        """What a call gives that may come by functions of a caller."""
        try:
            try:
                self._calls_out = True
                return call()
            finally:
                self._calls_out = False
        finally:  # an interrupt may have come before the line above
            self._calls_out = False

    def swept(self) -> Now:
        """What is known, without moments that were dropped."""
        while self._dropped and not self._calls_out:
            self.now = replace(self.now, queue=let_go(self.now.queue, self._dropped[0]))
            self._dropped.popleft()
        return self.now

    def publish(self) -> None:
        """Put the tokens of a step that has landed into the book, and end samples at stop strings, all at once."""
        now = self.now
        if now.landed is None:
            return
        self.num_tokens += int(np.count_nonzero(now.landed.output.sampled_token_ids >= 0))
        book, stopped = publish(now.book, now.landed)
        queue = now.queue
        for req_id, reason, stop in stopped:
            if req_id in queue.live:  # else its last token ended it already
                num_outputs = None if stop is None else len(book.tokens_of(known(now.book.live, req_id)))
                queue = finish(queue, req_id, reason, stop, num_outputs=num_outputs)
        self.now = replace(now, queue=queue, book=book, landed=None)

    def add(self, requests: Iterable[Request], book: Book, *, vocab_size: int) -> None:
        """Queue requests that are in this book: all of them, or none and an error."""
        queue = self.now.queue
        for request in requests:
            queue = add(queue, request, vocab_size=vocab_size)
            self._calling_out(partial(self._try_processors, request))
        self.now = replace(self.now, queue=queue, book=book)

    def abort(self, req_ids: Sequence[str]) -> list[RequestOutput]:
        """Drop submissions; what they have so far. Ids that are not in use are ignored."""
        self.refuse_reentry()
        self.publish()
        book, samples, outputs = book_abort(self.now.book, req_ids)
        self.now = replace(self.now, queue=abort(self.now.queue, samples), book=book)
        return outputs

    def tell(self, numbers: Iterable[int], *, of: Container[int] | None = None) -> dict[int, RequestOutput]:
        """What these submissions have, or some of them; there is no news of them any more."""
        book, outputs = tell(self.now.book, numbers, of=of)
        self.now = replace(self.now, book=book)
        return outputs

    def forget(self) -> None:
        """Nothing was submitted, and there is no news of anything."""
        self.now = replace(self.now, book=Book())

    def use(self, params: Params, *, keep_kv: bool) -> None:
        """Other parameters from the next step on; graphs are captured anew if the tensors lie elsewhere.

        An interrupt leaves the old ones or the new ones. What is captured by then is completed before the next step.
        """
        now = self.ready()
        queue = set_version(now.queue, params.version, keep_kv=keep_kv)
        self.now = replace(now, queue=queue, bound=rebind(now.bound, params))
        self.ready()

    def remember(self) -> EngineMoment:
        """All that is known now, and the device's ledger: with steps in flight, as these will leave it."""
        now = self.settled()
        number = next(self._moment_numbers)
        shareable = hold(now.queue, number)
        now = replace(now, queue=shareable.queue, batch=keep_blocks(now.batch, shareable.kept))
        known = Known(now.queue, now.batch, now.book, now.in_flight, now.kept)
        moment = EngineMoment(number, known, remember(now.leased, now.batch), self._dropped)
        self.now = now
        return moment

    def rewind(self, moment: EngineMoment) -> None:
        """Know again what was known then, with the parameters of now. Steps in flight are dropped."""
        now, then = self.ready(), moment.known_to(self._dropped)
        queue = go_back(now.queue, then.queue)
        leased = rewind(moment.device, now.leased)
        self.num_rewinds += 1
        self.now = Now(queue, then.batch, leased, now.bound, then.book, then.in_flight, kept=then.kept)

    def fork(self, parent: Sample, child: Sample, *, stream: int | None, book: Book) -> None:
        """A sample goes on as a second one too, which is in this book, made of the `settled` one."""
        now, req_id, new_req_id = self.now, parent.sample_id, child.sample_id
        batch = drop(now.batch, [new_req_id])
        has_row = req_id in batch.row_of and first_free_row(batch) is not None
        forked = fork(now.queue, req_id, new_req_id, arrival=child.number, stream=stream, has_row=has_row)
        batch = keep_blocks(batch, forked.kept)
        if forked.has_run:
            batch = fork_request(batch, req_id, new_req_id, stream=stream, goes_on=forked.goes_on)
        in_flight = tuple(
            [
                InFlight(f.req_ids, with_heir(f.readers, parent, child), f.pending, f.prompts, f.failed)
                for f in now.in_flight
            ]
        )
        self.now = Now(forked.queue, batch, now.leased, now.bound, book, in_flight, kept=now.kept)

    def steps_at_once(self, bounds: LayoutBounds) -> int:
        """Of how many steps a turn is while batches have these bounds, if nothing else is to be done."""
        return steps_at_once(self.bound, self.dispatch_keys, bounds, self._unroll)

    def _begin(self) -> bool:
        """Whether a step was begun. The new state is put down once, when the buffers have been written."""
        before = self.now
        queue, scheduled = schedule(before.queue, self.steps_at_once(before.batch.layout.bounds))
        batch = update_states(before.batch, scheduled)
        if not scheduled.req_ids:
            self.now = replace(before, queue=queue, batch=batch)
            return False
        book = before.book
        if scheduled.scheduled_new_reqs:
            book = admit(book, scheduled.scheduled_new_reqs)
        readers = self._readers(scheduled.req_ids, book)
        launched = self._calling_out(partial(self._launch, queue, batch, book))
        flight = InFlight(scheduled.req_ids, readers, launched.pending, launched.prompts, launched.failed)
        in_flight = (*before.in_flight, flight)
        self.now = Now(queue, batch, launched.leased, before.bound, book, in_flight, kept=before.kept)
        return True

    def _launch(self, queue: Queue, batch: InputBatch, book: Book) -> Launched:
        """The step that this queue has scheduled last."""
        now = self.now
        masks = partial(grammar_masks, self.grammars, book, now.in_flight, queue.in_flight[-1])
        return launch(now.bound, now.leased, batch, self.dispatch_keys, unscored=Unscored(book), masks=masks)

    def _land(self) -> None:
        """The oldest step in flight is known. It stays in flight if its output can not be had now."""
        now = self.now
        flight = now.in_flight[0]
        output = flight.pending.result()
        queue, finished = update(now.queue, flight.req_ids, output)
        self.now = replace(
            now,
            queue=queue,
            batch=settle(now.batch, flight.pending.batch, output),
            in_flight=now.in_flight[1:],
            landed=Landed(flight.readers, output, finished, flight.scores(), flight.failed),
        )

    def _readers(self, req_ids: tuple[str, ...], book: Book) -> Readers:
        """Whom the output of a step will concern; the same object as for the last one, if it is the same samples."""
        last_ids, readers = self._last_readers
        if readers is None or req_ids is not last_ids or book.live is not readers.live:
            readers = readers_of(book, [known(book.live, req_id) for req_id in req_ids], range(len(req_ids)))
            self._last_readers = req_ids, readers
        return readers

    def _try_processors(self, request: Request) -> None:
        """Refuse logits processors that fail on the prompt; samples of one prompt have the same ones."""
        if request.sampling_params.logits_processors and request.fork_of is None:
            leaf = pytree.tree_leaves(self.bound.params.tree)[0]
            try_processors(
                request.sampling_params,
                request.prompt_token_ids,
                vocab_size=self.bound.model.vocab_size,
                device=self.bound.buffers.device,
                dtype=leaf.dtype,
            )

    def _refuse_to_stand_still(self) -> None:
        queue = self.now.queue
        per_group = zip(*queue.moments.values(), strict=True)
        held = [len(np.unique(np.concatenate(blocks))) for blocks in per_group]
        raise OutOfBlocksError(
            f"{len(queue.live)} requests are there and none can go on: {len(queue.moments)} moments hold {held} of "
            f"{[n - 1 for n in queue.config.num_blocks]} blocks: close some of them, or abort requests"
        )

    def _recover(self) -> None:
        """After a failure half-way: the buffers start empty, and every running request is computed again."""
        now = self.now
        self.now = replace(
            now,
            queue=preempt_all(now.queue),
            batch=give_up(now.batch),
            leased=now.bound.buffers.lease(),
            in_flight=(),
        )
