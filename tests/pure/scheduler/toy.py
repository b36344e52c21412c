"""A driver of the scheduler against the toy device, which checks every law at every step."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from purestep.pure.errors import OutOfBlocksError, OutOfRowsError
from purestep.pure.record import replace
from purestep.pure.records.outputs import DraftTokenIds, StepOutput
from purestep.pure.records.queue import Finished, Queue, Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.scheduler import (
    abort,
    add,
    check_invariants,
    fork,
    go_back,
    hold,
    let_go,
    make_queue,
    schedule,
    set_version,
    take_drafts,
    update,
)
from tests.pure.scheduler.toy_device import Device, foretold, guesses


def config(**changes: object) -> SchedulerConfig:
    """Blocks of 4 tokens, 15 of them."""
    fields: dict[str, object] = {
        "num_blocks": (16,),
        "block_sizes": (4,),
        "max_num_reqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(fields | changes))  # type: ignore[arg-type]


def request(req_id: str, prompt: Iterable[int] = (1, 2, 3), **fields: object) -> Request:
    """A request; fields of its sampling parameters may be given too. It has no end-of-sequence id unless asked."""
    own = {"priority", "arrival", "stream", "salt", "adapter", "eos_token_ids", "fork_of"}
    params = SamplingParams(**{name: value for name, value in fields.items() if name not in own})  # type: ignore[arg-type]
    return Request(req_id, tuple(prompt), params, **{n: v for n, v in fields.items() if n in own})  # type: ignore[arg-type]


@attrs.frozen(eq=False)
class Remembered:
    """A moment: a queue that holds its blocks, and what device and driver knew."""

    name: int
    queue: Queue
    device: dict[str, Any]
    requests: dict[str, Request]
    given: dict[str, tuple[int, ...]]
    on_the_way: list[tuple[tuple[str, ...], StepOutput]]


class Driver:
    """A queue and a device, stepped together; every law is checked at every step."""

    def __init__(
        self, config: SchedulerConfig, nan_at: Mapping[str, int] | None = None, *, freezes: bool = True
    ) -> None:
        self.config = config
        self.queue: Queue = make_queue(config)
        self.device = Device(config, freezes=freezes)
        self.device.nan_at = dict(nan_at or {})
        self.requests: dict[str, Request] = {}
        self.given: dict[str, tuple[int, ...]] = {}  # outputs that forks began with
        self.moments: list[Remembered] = []
        self.on_the_way: list[tuple[tuple[str, ...], StepOutput]] = []
        self.finished: dict[str, Finished] = {}
        self.outputs: list[SchedulerOutput] = []
        self.num_added = 0
        self.num_steps = 1  # to be scheduled at once

    def add(self, new: Request) -> None:
        self.queue = add(self.queue, new)
        self.requests[new.req_id] = new
        self.given[new.req_id] = ()
        check_invariants(self.queue)

    def fork(self, parent: str, req_id: str) -> None:
        """Refused only for want of rows or blocks, and then nothing has changed."""
        self._await_drafts()
        if parent not in self.requests:
            return
        self.num_added += 1
        try:
            forked = fork(self.queue, parent, req_id, arrival=self.num_added, stream=self.num_added)
        except (OutOfRowsError, OutOfBlocksError):
            return
        self.queue = forked.queue
        self.requests[req_id] = own = replace(self.requests[parent], req_id=req_id, fork_of=None)
        self.given[req_id] = ()
        self.device.keep(forked.kept)
        ticket = self.queue.live.get(req_id)
        waits = self.queue.waiting.states.get(ticket) if ticket is not None else None
        if waits is None or waits.num_cached_tokens is not None:  # the parent has run
            self.given[req_id] = tuple(self.device.tokens[parent][len(own.prompt_token_ids) :])
            self.device.fork(parent, own, goes_on=forked.goes_on)
        check_invariants(self.queue)

    def _await_drafts(self) -> None:
        """Blocks are shared once it is known what drafts on their way have become."""
        while self.config.num_spec_tokens and self.on_the_way:
            self.settle()

    def remember(self) -> None:
        self._await_drafts()
        name = 1 + max((moment.name for moment in self.moments), default=0)
        shareable = hold(self.queue, name)
        self.queue = shareable.queue
        self.device.keep(shareable.kept)
        known = dict(self.requests), dict(self.given), list(self.on_the_way)
        self.moments.append(Remembered(name, self.queue, self.device.remembered(), *known))
        check_invariants(self.queue)

    def go_back(self, moment: "Remembered") -> None:
        self.queue = go_back(self.queue, moment.queue)
        self.device.go_back(moment.device)
        self.requests, self.given = dict(moment.requests), dict(moment.given)
        self.on_the_way = list(moment.on_the_way)
        check_invariants(self.queue)

    def let_go(self, moment: "Remembered") -> None:
        self.queue = let_go(self.queue, moment.name)
        self.moments.remove(moment)
        check_invariants(self.queue)

    def abort(self, *req_ids: str) -> None:
        self.queue = abort(self.queue, req_ids)
        for req_id in req_ids:
            self.requests.pop(req_id, None)
        check_invariants(self.queue)

    def set_version(self, version: int, *, keep_kv: bool = False) -> None:
        self.queue = set_version(self.queue, version, keep_kv=keep_kv)
        self.device.version = version
        self.device.good_versions = {version, *(self.device.good_versions if keep_kv else ())}
        check_invariants(self.queue)

    def schedule(self) -> SchedulerOutput:
        """Schedule and run a step; its output stays on its way."""
        idle, before = not self.on_the_way, self.queue
        self.queue, output = schedule(before, self.num_steps)
        check_invariants(self.queue)
        if output.preempted_req_ids and before.news.preempted_req_ids != output.preempted_req_ids:
            self._check_preemption(before)
        if idle:
            stands_still = bool(self.requests) and not output.req_ids
            assert not stands_still or self.moments, "requests are there and nothing runs"
        result = self.device.run(output, self.requests, self.queue.moments.values())
        self.outputs.append(output)
        if output.req_ids:
            self.on_the_way.append((output.req_ids, result))
        return output

    def settle(self) -> None:
        """Take in the oldest output that is on its way."""
        req_ids, result = self.on_the_way.pop(0)
        self.queue, finished = update(self.queue, req_ids, result)
        check_invariants(self.queue)
        self._draft()
        for done in finished:
            new = self.requests.pop(done.req_id)
            nan_at = self.device.nan_at.get(new.req_id)
            told = foretold(new, self.config, nan_at, self.given.pop(new.req_id))
            assert (done.token_ids, done.reason, done.stop_reason) == told
            self.finished[done.req_id] = done

    def _draft(self) -> None:
        """The scheduler is told of guesses, if it is to be; also for requests that have ended."""
        config = self.config
        if not config.num_spec_tokens or config.drafts_on_device:
            return
        tokens = {req_id: tuple(self.device.tokens[req_id]) for req_id in self.outputs[-1].req_ids}
        drafts = [guesses(req_id, own, config.num_spec_tokens) for req_id, own in tokens.items()]
        self.queue = take_drafts(self.queue, DraftTokenIds(tuple(tokens), tuple(drafts)))
        check_invariants(self.queue)

    def step(self) -> SchedulerOutput:
        output = self.schedule()
        if output.req_ids:
            self.settle()
        return output

    def drain(self, lag: int = 0) -> int:
        """Run until nothing is left, outputs coming in so many steps late; the number of steps. No moment is left."""
        while self.moments:
            self.let_go(self.moments[0])
        return self.drain_but_moments(lag)

    def drain_but_moments(self, lag: int = 0) -> int:
        """The same, with the moments that there are."""
        work = sum(
            min(self.config.max_model_len, len(r.prompt_token_ids) + 64) for r in self.requests.values()
        )
        for num_steps in range(20 * work + 20):
            if not self.requests and not self.on_the_way:
                return num_steps
            output = self.schedule()
            while len(self.on_the_way) > (lag if output.req_ids else 0):
                self.settle()
        raise AssertionError(f"{sorted(self.requests)} do not end")

    def _check_preemption(self, before: Queue) -> None:
        """Nobody is preempted for want of blocks that a row holds ahead of need."""
        counts = before.running.counts
        for row, residence in enumerate(before.running.residences):
            for pool, blocks, size in zip(
                before.pools, residence.blocks, self.config.block_sizes, strict=True
            ):
                assert pool.num_available or len(blocks) <= -(-int(counts.num_tokens[row]) // size), (
                    "preempted while blocks were held ahead"
                )


def counts(output: SchedulerOutput) -> dict[str, int]:
    """Tokens of each request in a step."""
    return output.num_scheduled_tokens_by_id


def driver(*prompts: tuple[str, int], max_tokens: int = 8, **changes: object) -> Driver:
    """Requests with prompts of so many tokens, all different."""
    made = Driver(config(**changes))
    for i, (req_id, num_tokens) in enumerate(prompts):
        made.add(request(req_id, [i % 7] * num_tokens, max_tokens=max_tokens, arrival=i))
    return made
