import numpy as np
import pytest

from purestep.pure.record import replace
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Queue
from purestep.pure.scheduler import add, make_queue, num_free, schedule, update
from purestep.pure.scheduler.rows import rows_of
from tests.laws import assert_pure, digest
from tests.pure.scheduler.toy import Driver, config, counts, driver, request
from tests.pure.scheduler.toy_device import next_token

pytestmark = pytest.mark.usefixtures("unchecked_records")


class TestSteadyDecode:
    def test_the_same_ids_and_counts_are_the_same_objects(self) -> None:
        """A steady batch shares everything but the columns that count."""
        made = driver(("a", 3), ("b", 5), max_tokens=30, block_horizon=16)
        made.step()
        first, second = made.step(), made.step()
        cached = second.scheduled_cached_reqs

        assert second.req_ids is first.req_ids is cached.req_ids
        assert second.num_scheduled_tokens is first.num_scheduled_tokens
        assert cached.num_computed_tokens.tolist() == [4, 6]
        assert cached.num_output_tokens.tolist() == [2, 2]
        assert not cached.new_block_ids and not cached.all_token_ids
        assert not cached.num_computed_tokens.flags.writeable

    def test_the_pools_are_the_same_objects(self) -> None:
        made = driver(("a", 3), max_tokens=30, block_horizon=16)
        made.step()
        made.step()
        before = made.queue.pools
        made.step()

        assert made.queue.pools is before

    def test_a_long_log_is_put_into_the_tapes(self) -> None:
        """Thousands of steps: tokens are complete, and the log stays short."""
        made = driver(
            ("a", 3), ("b", 3), max_tokens=1300, max_model_len=2000, num_blocks=(800,), block_horizon=64
        )
        made.drain()

        assert len(made.finished["a"].token_ids) == 1300
        assert made.queue.log.num_lines < 600


class TestChunkedPrefill:
    def test_the_budget_is_used_in_order(self) -> None:
        made = driver(("a", 10), ("b", 10), ("c", 3), max_num_batched_tokens=12)

        assert [counts(made.step()) for _ in range(3)] == [
            {"a": 10, "b": 2},
            {"a": 1, "b": 8, "c": 3},
            {"a": 1, "b": 1, "c": 1},
        ]

    def test_one_request_takes_no_more_than_the_threshold(self) -> None:
        made = driver(("a", 10), ("b", 3), long_prefill_token_threshold=4)

        assert [counts(made.step()) for _ in range(3)] == [
            {"a": 4, "b": 3},
            {"a": 4, "b": 1},
            {"a": 2, "b": 1},
        ]

    @pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 32])
    def test_chunks_change_no_token(self, budget: int) -> None:
        """Chunk law: the driver compares every finished request with its run alone."""
        made = driver(("a", 13), ("b", 9), ("c", 1), max_num_batched_tokens=budget)
        made.drain()

        assert set(made.finished) == {"a", "b", "c"}

    def test_no_more_requests_run_than_there_are_rows(self) -> None:
        made = driver(("a", 3), ("b", 3), ("c", 3), max_num_reqs=2, max_tokens=2)

        assert [tuple(counts(made.step())) for _ in range(3)] == [("a", "b"), ("a", "b"), ("c",)]


class TestOrder:
    def test_waiting_requests_come_by_priority_then_arrival(self) -> None:
        made = Driver(config(max_num_reqs=1))
        for req_id, priority, arrival in [("a", 1, 0), ("b", 0, 2), ("c", 0, 1), ("d", -1, 3)]:
            made.add(request(req_id, max_tokens=1, priority=priority, arrival=arrival))

        assert [made.step().req_ids for _ in range(4)] == [("d",), ("c",), ("b",), ("a",)]

    def test_who_can_not_be_served_is_not_overtaken(self) -> None:
        """A small request behind a large one waits, or the large one might wait for ever."""
        made = driver(("a", 8), ("large", 56), ("small", 1), max_tokens=4)

        assert made.step().req_ids == ("a",)
        assert made.step().req_ids == ("a",)
        made.drain()

    def test_nothing_to_do_is_an_empty_output(self) -> None:
        output = driver().schedule()

        assert output.req_ids == () and output.total_num_scheduled_tokens == 0


class TestPreemption:
    def test_the_last_is_preempted_and_comes_back_with_all_its_tokens(self) -> None:
        """7 blocks of 4 for two requests of 8 + 12 tokens, at 3.5 blocks each one has to go."""
        made = driver(("a", 8), ("b", 8), max_tokens=12, num_blocks=(8,), enable_prefix_caching=False)
        preempting = next(output for _ in range(20) if (output := made.step()).preempted_req_ids)
        assert preempting.preempted_req_ids == {"b"} and preempting.req_ids == ("a",)
        num_outputs = 12 - 8 + 1

        resuming = next(o for _ in range(20) if (o := made.step()).scheduled_cached_reqs.resumed_req_ids)
        cached = resuming.scheduled_cached_reqs
        assert cached.req_ids == ("b",) and cached.resumed_req_ids == {"b"}
        assert "a" in resuming.finished_req_ids
        assert counts(resuming) == {"b": 8 + num_outputs}
        assert cached.num_computed_tokens.tolist() == [0]
        assert cached.num_output_tokens.tolist() == [num_outputs]
        assert len(cached.all_token_ids["b"]) == 8 + num_outputs
        assert len(cached.new_block_ids["b"][0]) == 4
        made.drain()
        assert made.finished["b"].num_preemptions == 1

    def test_lower_priority_goes_first(self) -> None:
        made = Driver(config(num_blocks=(8,), enable_prefix_caching=False))
        made.add(request("late but important", [1] * 8, max_tokens=12, priority=0, arrival=1))
        made.add(request("early", [2] * 8, max_tokens=12, priority=1, arrival=0))
        made.drain()

        assert made.finished["early"].num_preemptions == 1
        assert made.finished["late but important"].num_preemptions == 0

    def test_who_was_preempted_stands_in_front_of_its_priority(self) -> None:
        made = Driver(config(max_num_reqs=1))
        made.add(request("a", max_tokens=3, arrival=5))
        made.step()
        made.add(request("b", max_tokens=1, arrival=1))
        made.add(request("c", max_tokens=1, arrival=9, priority=-1))
        made.set_version(1)

        assert [made.step().req_ids for _ in range(4)] == [("c",), ("a",), ("a",), ("b",)]

    def test_nobody_is_preempted_when_nothing_would_come_of_it(self) -> None:
        """The last row lacks a block: it sits out, keeps its blocks, and goes on when the other is done."""
        made = driver(("a", 8), ("b", 7), max_tokens=5, num_blocks=(6,), enable_prefix_caching=False)
        made.drain()

        assert all(done.num_preemptions == 0 for done in made.finished.values())
        sat_out = [output for output in made.outputs if output.req_ids == ("a",)]
        assert sat_out

    def test_a_prefill_boundary_after_preemption_is_that_of_all_tokens(self) -> None:
        """Prompt 6, 5 outputs, preempted: in chunks of 4, 4 and 3 no token is kept before the eleventh is computed."""
        made = Driver(
            config(max_num_batched_tokens=4, enable_prefix_caching=False, num_blocks=(9,), max_num_reqs=1)
        )
        made.add(request("a", [1, 2, 3, 4, 5, 6], max_tokens=9))
        while len(made.queue.running) == 0 or made.queue.running.counts.num_known[0] < 11:
            made.step()
        made.set_version(1)

        kept = []
        for _ in range(3):
            output = made.schedule()
            kept.append((counts(output), int(made.on_the_way[-1][1].sampled_token_ids[0, 0]) >= 0))
            made.settle()
        assert kept == [({"a": 4}, False), ({"a": 4}, False), ({"a": 3}, True)]
        made.drain()

    def test_a_lone_request_may_fill_the_cache(self) -> None:
        """It ends by length with as many tokens as fit, and one more that needs no place."""
        made = driver(("a", 5), max_tokens=60, num_blocks=(4,), max_model_len=64)
        made.drain()

        assert made.finished["a"].reason == "length"
        assert len(made.finished["a"].token_ids) == 3 * 4 + 1 - 5


class TestHorizon:
    def test_all_rows_are_covered_at_once(self) -> None:
        """Blocks change in one step of H."""
        made = driver(
            ("a", 3), ("b", 4), max_tokens=40, block_horizon=16, max_num_batched_tokens=64, num_blocks=(64,)
        )
        changes = [bool(made.step().scheduled_cached_reqs.new_block_ids) for _ in range(36)]

        assert sum(changes) == 2

    def test_a_row_is_not_covered_past_its_length(self) -> None:
        made = driver(("a", 3), max_tokens=2, block_horizon=100, num_blocks=(64,))
        made.step()

        assert num_free(made.queue) == 63 - 1

    @pytest.mark.parametrize("num_before", range(2, 8))
    def test_a_row_that_sits_out_is_given_no_blocks(self, num_before: int) -> None:
        """c's last chunk takes b's part of the budget while a may lack a block; the device knows who is in the step."""
        made = driver(
            ("a", 4), ("b", 4), max_tokens=30, block_horizon=5, max_num_batched_tokens=3, num_blocks=(64,)
        )
        while len(made.queue.running) < 2 or made.queue.running.counts.num_known[0] < 5 + num_before:
            made.step()
        made.add(request("c", [6] * 9, max_tokens=2, priority=-1))

        assert [counts(made.step()) for _ in range(4)][-1] == {"c": 2, "a": 1}
        made.drain()

    def test_half_of_what_is_available_is_left(self) -> None:
        """Two rows lack a block each. 5 more for each are as much as half of 20, but more than half of 19."""
        for num_blocks, given in [(25, 5), (24, 1)]:
            made = driver(("a", 8), ("b", 8), max_tokens=40, num_blocks=(num_blocks,))
            made.step()
            made.queue = replace(made.queue, config=replace(made.config, block_horizon=20))
            new = made.step().scheduled_cached_reqs.new_block_ids

            assert {req_id: len(ids[0]) for req_id, ids in new.items()} == {"a": given, "b": given}

    def test_who_lacks_a_block_sits_out_while_another_holds_one_ahead(self) -> None:
        """a uses up its blocks while b, which came later, has 3 and needs 2: b is preempted when it needs the third."""
        made = driver(("a", 4), max_tokens=20, num_blocks=(7,), block_horizon=8)
        for _ in range(6):
            made.step()
        made.add(request("b", [5] * 4, max_tokens=20, arrival=1))
        outputs = [made.step() for _ in range(14)]
        ran = [output.req_ids for output in outputs if not output.preempted_req_ids]
        made.drain()

        assert ("b",) in ran
        assert any(output.preempted_req_ids for output in outputs)

    def test_blocks_ahead_cost_no_preemption(self) -> None:
        made = driver(("a", 4), ("b", 4), ("c", 4), max_tokens=16, num_blocks=(13,), block_horizon=12)
        made.drain()
        without = driver(("a", 4), ("b", 4), ("c", 4), max_tokens=16, num_blocks=(13,), block_horizon=1)
        without.drain()

        preemptions = [sum(f.num_preemptions for f in d.finished.values()) for d in (made, without)]
        assert preemptions[0] <= preemptions[1]


class TestAsynchronousScheduling:
    def test_a_step_is_scheduled_before_the_last_ones_tokens_are_known(self) -> None:
        made = driver(("a", 3), max_tokens=4, async_scheduling=True)
        outputs = [made.schedule() for _ in range(5)]

        assert [counts(output) for output in outputs] == [{"a": 3}, {"a": 1}, {"a": 1}, {"a": 1}, {}]
        assert [o.scheduled_cached_reqs.num_output_tokens.tolist() for o in outputs[1:4]] == [[1], [2], [3]]

    def test_without_it_a_row_sits_out_until_its_token_is_known(self) -> None:
        made = driver(("a", 3), max_tokens=4)
        made.schedule()

        assert made.schedule().req_ids == ()

    @pytest.mark.parametrize("lag", [0, 1, 2])
    def test_late_outputs_change_no_token(self, lag: int) -> None:
        """Async law: the driver compares every finished request with its run alone."""
        made = Driver(config(async_scheduling=True, num_blocks=(8,)), freezes=False)
        for i, req_id in enumerate("abcd"):
            made.add(request(req_id, range(i + 4), max_tokens=12, stop_token_ids=(3,), arrival=i))
        made.drain(lag)

        assert set(made.finished) == set("abcd")

    def test_a_row_that_steps_on_their_way_may_write_is_given_to_nobody(self) -> None:
        """The only row's request is aborted while two steps run it: the next one waits until both are known."""
        made = driver(("a", 3), max_num_reqs=1, async_scheduling=True)
        made.schedule()
        made.schedule()
        made.abort("a")
        made.add(request("b"))

        assert made.schedule().req_ids == ()
        made.settle()
        assert made.schedule().req_ids == ()
        made.settle()
        assert made.schedule().req_ids == ("b",)


def output_of(queue: Queue, token: int = 1) -> StepOutput:
    """What a device would say of the oldest step in flight."""
    step = queue.in_flight[0]
    ids = np.where(step.samples, token, -1).astype(np.int32)[:, None]
    none = np.zeros(len(ids), np.bool_)
    rows = rows_of(queue.running, step.ticket)
    return StepOutput(ids, queue.running.counts.num_settled[rows] + step.num_scheduled, ~none, none)  # type: ignore[arg-type]


def test_every_step_is_a_pure_function() -> None:
    """Purity, also of old queues that are stepped again after newer ones were."""
    queue = make_queue(config(block_horizon=8))
    for i, req_id in enumerate("abcde"):
        queue = assert_pure(add, queue, request(req_id, range(i, i + 5), max_tokens=9, arrival=i))
    history = []
    for _ in range(25):
        queue, output = assert_pure(schedule, queue)
        if output.req_ids:
            history.append((queue, output.req_ids))
            queue, _ = assert_pure(update, queue, output.req_ids, output_of(queue))

    assert not len(queue.live)
    for old, req_ids in reversed(history):
        first = update(old, req_ids, output_of(old))
        assert digest(first) == digest(update(old, req_ids, output_of(old)))


def test_going_back_to_an_old_queue_forgets_what_came_after() -> None:
    """Two futures of one queue, with other tokens, do not see each other."""
    queue = add(make_queue(config()), request("a", [1, 2, 3], max_tokens=9))
    queue, output = schedule(queue)
    futures = []
    for token in (4, 5, 4):
        future, _ = update(queue, output.req_ids, output_of(queue, token))
        for _ in range(3):
            future, more = schedule(future)
            future, _ = update(future, more.req_ids, output_of(future, token))
        futures.append(digest(future))

    assert futures[0] == futures[2] != futures[1]


def test_the_toy_model_is_no_constant() -> None:
    """The tests above would see nothing otherwise."""
    assert len({next_token(req_id, [token]) for req_id in "ab" for token in range(7)}) > 3
