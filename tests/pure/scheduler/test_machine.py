"""Any order of arrivals, steps, one or several at once, late outputs, aborts, forks, moments and new parameters: all
get their own tokens.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from purestep.pure.records.queue import SchedulerConfig
from tests.pure.scheduler.toy import Driver, config, request
from tests.pure.scheduler.toy_device import VOCAB

IDS = tuple("abcdefgh")
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=24, max_size=24)


@st.composite
def configs(draw: Any) -> SchedulerConfig:
    """Small caches, so that they overflow."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=2))
    is_async, on_device = draw(st.booleans()), draw(st.booleans())
    num_drafts = draw(st.sampled_from([0, 0, 1, 3])) if on_device or not is_async else 0
    return config(
        num_blocks=tuple(draw(st.integers(2, 20)) for _ in sizes),
        block_sizes=tuple(sizes),
        max_num_reqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        max_model_len=draw(st.sampled_from([8, 24, 64])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        block_horizon=draw(st.sampled_from([1, 4, 16])),
        long_prefill_token_threshold=draw(st.sampled_from([None, 3])),
        async_scheduling=is_async,
        num_spec_tokens=num_drafts,
        drafts_on_device=on_device,
    )


@st.composite
def parameters(draw: Any) -> dict[str, Any]:
    """Whatever ends a request, and what sets it apart."""
    return {
        "max_tokens": draw(st.sampled_from([1, 2, 5, 12, None])),
        "min_tokens": draw(st.sampled_from([0, 0, 1])),
        "stop_token_ids": draw(st.sampled_from([(), (3,), (3, 5)])),
        "eos_token_ids": draw(st.sampled_from([(), (0,), (0, 3)])),
        "ignore_eos": draw(st.booleans()),
        "priority": draw(st.sampled_from([0, 0, 1, -1])),
        "salt": draw(st.sampled_from([None, None, "s"])),
        "adapter": draw(st.sampled_from([None, None, "l"])),
    }


class Machine(RuleBasedStateMachine):
    """`Driver` checks every law at every step; here is only what happens."""

    driver: Driver

    @initialize(
        config=configs(),
        nan_at=st.dictionaries(st.sampled_from(IDS), st.integers(0, 4), max_size=1),
        freezes=st.booleans(),
        beginnings=st.tuples(TOKENS, TOKENS),
        num_steps=st.sampled_from([1, 1, 2, 4]),
    )
    def begin(
        self,
        config: SchedulerConfig,
        nan_at: dict[str, int],
        freezes: bool,
        beginnings: tuple[list[int], ...],
        num_steps: int,
    ) -> None:
        self.driver = Driver(config, nan_at, freezes=freezes)
        self.driver.num_steps = num_steps
        self.beginnings = beginnings
        self.version = 0

    def free_ids(self) -> list[str]:
        return [req_id for req_id in IDS if req_id not in self.driver.requests]

    @precondition(lambda self: self.free_ids())
    @rule(data=st.data(), params=parameters(), forks=st.booleans())
    def arrives(self, data: st.DataObject, params: dict[str, Any], forks: bool) -> None:
        """A request under a new or a used id, with a prompt that others begin with too, or a fork."""
        driver = self.driver
        longest = min(driver.config.max_model_len - 1, driver.config.capacity, 24)
        prompt = tuple(data.draw(st.sampled_from(self.beginnings))[: data.draw(st.integers(1, longest))])
        parent = data.draw(st.sampled_from(sorted(driver.requests))) if forks and driver.requests else None
        if parent is not None:
            prompt = driver.requests[parent].prompt_token_ids
        driver.num_added += 1
        req_id = data.draw(st.sampled_from(self.free_ids()))
        driver.add(request(req_id, prompt, arrival=driver.num_added, fork_of=parent, **params))

    @rule()
    def steps(self) -> None:
        if self.driver.config.async_scheduling and len(self.driver.on_the_way) < 3:
            self.driver.schedule()
        else:
            self.settles()
            self.driver.step() if not self.driver.on_the_way else None

    @rule(n=st.integers(2, 8))
    def runs(self, n: int) -> None:
        for _ in range(n):
            self.steps()

    @precondition(lambda self: self.driver.on_the_way)
    @rule()
    def settles(self) -> None:
        if self.driver.on_the_way:
            self.driver.settle()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.requests))), "unknown")

    @precondition(lambda self: self.driver.requests and self.free_ids())
    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        """A request goes on under a second id, from where it is."""
        parent = data.draw(st.sampled_from(sorted(self.driver.requests)))
        self.driver.fork(parent, data.draw(st.sampled_from(self.free_ids())))

    @precondition(lambda self: len(self.driver.moments) < 3)
    @rule()
    def remembers(self) -> None:
        self.driver.remember()

    @precondition(lambda self: self.driver.moments)
    @rule(data=st.data())
    def goes_back(self, data: st.DataObject) -> None:
        """To any moment, as often as it likes, whatever ran in between."""
        self.driver.go_back(data.draw(st.sampled_from(self.driver.moments)))

    @precondition(lambda self: self.driver.moments)
    @rule(data=st.data())
    def forgets(self, data: st.DataObject) -> None:
        self.driver.let_go(data.draw(st.sampled_from(self.driver.moments)))

    @rule(keep_kv=st.booleans(), goes_back=st.booleans())
    def learns(self, keep_kv: bool, goes_back: bool) -> None:
        self.version += not goes_back
        self.driver.set_version(0 if goes_back else self.version, keep_kv=keep_kv)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain(lag=2 if self.driver.config.async_scheduling else 0)


def test_every_request_gets_the_tokens_that_it_gets_alone(unchecked_records: None) -> None:
    """Over chunks, preemption, prefix hits, forks, moments, priorities, late outputs and new parameters."""
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))


def test_every_record_on_the_way_has_the_shapes_that_it_says() -> None:
    """The same, with records checked as they are built; few examples, because that takes long."""
    run_state_machine_as_test(Machine, settings=settings(max_examples=5, stateful_step_count=20))
