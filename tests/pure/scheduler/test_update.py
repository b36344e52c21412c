import numpy as np
import pytest

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Finished, Queue, Request
from purestep.pure.scheduler import abort, add, check_invariants, make_queue, num_free, schedule, update
from tests.laws import digest
from tests.pure.scheduler.toy import Driver, config, request

pytestmark = pytest.mark.usefixtures("unchecked_records")


def step_output(tokens: list[int], computed: list[int], nan: tuple[int, ...] = ()) -> StepOutput:
    has_nan = np.isin(np.arange(len(tokens)), nan)
    return StepOutput(
        np.array(tokens, np.int32)[:, None],  # type: ignore[arg-type]
        np.array(computed, np.int32),  # type: ignore[arg-type]
        ~has_nan,  # type: ignore[arg-type]
        has_nan,  # type: ignore[arg-type]
    )


def feed(new: Request, tokens: list[int], **changes: object) -> Finished | None:
    """How a request alone ends when the model says these tokens."""
    queue = add(make_queue(config(**changes)), new)
    for i, token in enumerate(tokens):
        queue, output = schedule(queue)
        queue, finished = update(queue, output.req_ids, step_output([token], [len(new.prompt_token_ids) + i]))
        check_invariants(queue)
        if finished:
            assert i == len(tokens) - 1, "it ended early"
            return finished[0]
    return None


@pytest.mark.parametrize(
    ("fields", "tokens", "end"),
    [
        ({"max_tokens": 2}, [4, 4], ("length", None)),
        ({"max_tokens": None}, [4] * 12, ("length", None)),  # max_model_len
        ({"eos_token_ids": (4,)}, [4], ("stop", None)),
        ({"eos_token_ids": (3, 4)}, [4], ("stop", None)),
        ({"eos_token_ids": (4,), "ignore_eos": True, "max_tokens": 2}, [4, 4], ("length", None)),
        ({"stop_token_ids": (5, 6)}, [4, 6], ("stop", 6)),
        ({"stop_token_ids": (4,), "eos_token_ids": (4,)}, [4], ("stop", None)),
        ({"stop_token_ids": (4,), "eos_token_ids": (4,), "ignore_eos": True}, [4], ("stop", 4)),
        ({"stop_token_ids": (4,), "max_tokens": 1}, [4], ("stop", 4)),  # stop goes before length
        ({"stop_token_ids": (4,), "min_tokens": 3}, [4, 4, 4], ("stop", 4)),
        ({"eos_token_ids": (4,), "min_tokens": 2}, [4, 1, 4], ("stop", None)),
        ({"stop_token_ids": (4,), "min_tokens": 2, "max_tokens": 2}, [4, 3], ("length", None)),
    ],
)
def test_a_request_ends_for_the_first_reason_that_holds(
    fields: dict[str, object], tokens: list[int], end: tuple[str, int | None]
) -> None:
    finished = feed(request("a", [1, 2, 3], **{"max_tokens": 50} | fields), tokens, max_model_len=15)

    assert finished is not None
    assert (finished.reason, finished.stop_reason) == end
    assert finished.token_ids == tuple(tokens)


def test_only_its_own_stops_end_a_request() -> None:
    """Stop ids of a neighbour count for the neighbour, whoever leaves or joins before."""
    queue = make_queue(config())
    for i, stops in enumerate([(4,), (), (5,), (4, 5)]):
        queue = add(queue, request(f"{i}", [i], stop_token_ids=stops, max_tokens=50, arrival=i))
    queue, output = schedule(queue)
    queue, finished = update(queue, output.req_ids, step_output([1, 4, 4, 4], [1] * 4))
    assert [done.req_id for done in finished] == ["3"]

    queue, output = schedule(queue)
    queue, finished = update(queue, output.req_ids, step_output([4, 5, 4], [2] * 3))
    assert [done.req_id for done in finished] == ["0"]

    queue = add(queue, request("4", [4], stop_token_ids=(6,), max_tokens=50, priority=-1))
    queue, output = schedule(queue)
    assert output.req_ids == ("4", "1", "2")
    queue, finished = update(queue, output.req_ids, step_output([5, 6, 5], [1, 3, 3]))
    assert [(done.req_id, done.stop_reason) for done in finished] == [("2", 5)]


def test_nothing_is_left_when_all_are_done() -> None:
    made = Driver(config())
    for req_id in "abc":
        made.add(request(req_id, [1, 2, 3], max_tokens=9))
    made.drain()

    assert num_free(made.queue) == 15
    assert not len(made.queue.live) and not len(made.queue.running) and not len(made.queue.waiting)
    assert made.schedule().finished_req_ids == set("abc")
    assert made.schedule().finished_req_ids == set()


class TestNaN:
    def spoilt(self) -> Driver:
        """Request a has NaN logits at its third output; b beside it is well."""
        made = Driver(config(), {"a": 2})
        made.add(request("a", [1] * 9, max_tokens=9, arrival=0))
        made.add(request("b", [2] * 9, max_tokens=9, arrival=1))
        made.drain()
        return made

    def test_the_row_ends_with_an_error_and_neighbours_are_exact(self) -> None:
        made = self.spoilt()

        assert made.finished["a"].reason == "error" and len(made.finished["a"].token_ids) == 2
        assert made.finished["b"].reason == "length"

    def test_its_blocks_are_not_in_the_prefix_cache(self) -> None:
        made = self.spoilt()
        made.add(request("c", [1] * 9, max_tokens=1))
        made.add(request("d", [2] * 9, max_tokens=1))
        made.drain()

        assert made.finished["c"].num_cached_tokens == 0
        assert made.finished["d"].num_cached_tokens == 8

    def test_blocks_that_it_had_from_others_stay(self) -> None:
        made = Driver(config(), {"a": 2})
        made.add(request("before", [1] * 9, max_tokens=1))
        made.drain()
        made.add(request("a", [1] * 14, max_tokens=9))
        made.drain()
        made.add(request("after", [1] * 14, max_tokens=1))
        made.drain()

        assert made.finished["a"].reason == "error"
        assert made.finished["after"].num_cached_tokens == 8


class TestContradictions:
    def scheduled(self) -> tuple[Queue, tuple[str, ...]]:
        queue = make_queue(config(max_num_batched_tokens=5))
        queue = add(queue, request("a", [1, 2, 3], arrival=0))
        queue = add(queue, request("b", [1, 2, 3], arrival=1))
        queue, output = schedule(queue)
        assert output.num_scheduled_tokens_by_id == {"a": 3, "b": 2}
        return queue, output.req_ids

    @pytest.mark.parametrize(
        ("tokens", "computed", "named"),
        [
            ([-1, -1], [3, 2], "'a'"),
            ([1, 1], [3, 2], "'b'"),
            ([1, -1], [2, 2], "'a'"),
            ([1, -1], [3, 3], "'b'"),
        ],
    )
    def test_an_output_of_another_plan_is_refused(
        self, tokens: list[int], computed: list[int], named: str
    ) -> None:
        queue, req_ids = self.scheduled()

        with pytest.raises(SchedulerOutputError, match=f"request {named}.*the device ran another plan"):
            update(queue, req_ids, step_output(tokens, computed))
        update(queue, req_ids, step_output([1, -1], [3, 2]))

    def test_an_output_of_another_step_is_refused(self) -> None:
        queue, req_ids = self.scheduled()

        with pytest.raises(SchedulerOutputError, match="oldest step in flight is of"):
            update(queue, req_ids[::-1], step_output([-1, 1], [2, 3]))
        queue, _ = update(queue, req_ids, step_output([1, -1], [3, 2]))
        with pytest.raises(SchedulerOutputError, match="no step is in flight"):
            update(queue, req_ids, step_output([1, -1], [3, 2]))

    @pytest.mark.parametrize("name", ["sampled_token_ids", "num_computed_tokens", "active", "has_nan"])
    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_a_column_of_another_length_is_refused_and_nothing_changes(self, name: str, length: int) -> None:
        queue, req_ids = self.scheduled()
        right = step_output([1, -1], [3, 2])
        column = np.resize(getattr(right, name), (length, *getattr(right, name).shape[1:]))
        before = digest(queue)

        with pytest.raises(SchedulerOutputError, match=r"an output of 2 requests has .* at least 2 entries"):
            update(queue, req_ids, replace(right, **{name: column}))
        assert digest(queue) == before
        assert update(queue, req_ids, right)[1] == ()

    def test_more_tokens_than_the_step_can_keep_are_refused(self) -> None:
        """One, where no drafts were scheduled."""
        queue, req_ids = self.scheduled()
        wide = replace(step_output([1, -1], [3, 2]), sampled_token_ids=np.array([[1, 4], [-1, -1]], np.int32))

        with pytest.raises(SchedulerOutputError, match=r"0 of them drafts.* has \[1, 4\]"):
            update(queue, req_ids, wide)

    def test_padding_behind_the_batch_is_ignored(self) -> None:
        queue, req_ids = self.scheduled()
        queue, finished = update(queue, req_ids, step_output([1, -1, 9, 9], [3, 2, 9, 9], nan=(3,)))

        assert finished == ()
        assert queue.running.counts.num_known.tolist() == [4, 3]


def test_what_is_said_about_a_request_that_is_gone_is_dropped() -> None:
    """Aborted, and its id given to another request, while its step was under way: the other gets its own token."""
    queue = make_queue(config(async_scheduling=True))
    queue = add(queue, request("a", [1, 2, 3], max_tokens=3))
    queue, first = schedule(queue)
    queue = add(abort(queue, ["a"]), request("a", [4, 5], max_tokens=3))
    queue, second = schedule(queue)
    assert second.finished_req_ids == {"a"} and second.scheduled_new_reqs[0].prompt_token_ids == (4, 5)

    queue, finished = update(queue, first.req_ids, step_output([6], [3]))
    assert finished == () and queue.running.counts.num_known.tolist() == [2]
    queue, _ = update(queue, second.req_ids, step_output([5], [2]))
    assert queue.running.counts.num_known.tolist() == [3]


def test_a_request_preempted_while_its_token_was_under_way_gets_the_token() -> None:
    """It waits for it before it comes back, and ends with it if it is its last."""
    made = Driver(config(async_scheduling=True), freezes=False)
    made.add(request("a", [1, 2, 3], max_tokens=2))
    made.schedule()
    made.schedule()
    made.set_version(1)
    assert made.schedule().req_ids == ()
    made.settle()
    assert made.schedule().req_ids == ()
    made.settle()

    assert made.finished["a"].num_preemptions == 1 and len(made.finished["a"].token_ids) == 2
