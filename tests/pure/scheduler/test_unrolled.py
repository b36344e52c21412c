"""Several steps scheduled at once: where nobody could notice but by when tokens come, and else one."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.outputs import StepOutput
from purestep.pure.scheduler import finish, num_free, update
from tests.pure.scheduler.toy import Driver, config, counts, driver, request

pytestmark = pytest.mark.usefixtures("unchecked_records")

PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([2, 9, 17, 30]),
        "min_tokens": st.sampled_from([0, 2]),
        "stop_token_ids": st.sampled_from([(), (), (3,)]),
        "eos_token_ids": st.sampled_from([(), (0,)]),
    }
)


@given(
    st.lists(st.tuples(st.integers(1, 9), PARAMS), min_size=1, max_size=4),
    st.integers(2, 6),
    st.integers(0, 2),
    st.sampled_from([6, 12, 40]),
    st.sampled_from([1, 4, 16]),
    st.lists(st.sampled_from(["step", "step", "fork", "remember", "go back", "abort", "arrive"]), max_size=8),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 12), max_size=1),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_request_gets_the_tokens_that_it_gets_alone(
    asked: list[tuple[int, dict[str, Any]]],
    num_steps: int,
    lag: int,
    num_blocks: int,
    horizon: int,
    doings: list[str],
    nan_at: dict[str, int],
    freezes: bool,
    rng: Random,
) -> None:
    """Whatever is done between turns, outputs late or not, blocks few or many: the driver compares."""
    made = Driver(
        config(num_blocks=(num_blocks,), block_horizon=horizon, max_num_reqs=6, async_scheduling=lag > 0),
        nan_at,
        freezes=freezes,
    )
    made.num_steps, free = num_steps, list("efghijkl")
    for i, (length, params) in enumerate(asked):
        made.add(request("abcd"[i], [i] * length, arrival=i, **params))
    for doing in doings:
        names = sorted(made.requests)
        if doing == "step":
            while len(made.on_the_way) > lag or (made.on_the_way and rng.random() < 0.3):
                made.settle()
            made.schedule() if lag else made.step()
        elif doing == "fork" and names and free:
            made.fork(rng.choice(names), free.pop(0))
        elif doing == "remember":
            made.remember()
        elif doing == "go back" and made.moments:
            made.go_back(rng.choice(made.moments))
        elif doing == "abort" and names:
            made.abort(rng.choice(names))
        elif doing == "arrive" and free:
            made.add(request(free.pop(0), [9] * 5, arrival=9, max_tokens=7))
    made.drain(lag)


def test_steps_are_scheduled_at_once_as_soon_as_all_decode() -> None:
    made = driver(("a", 3), ("b", 5), max_tokens=12)
    made.num_steps = 4
    outputs = [made.step() for _ in range(5)]

    assert [output.num_steps for output in outputs] == [1, 4, 4, 1, 1]
    assert [counts(output)["a"] for output in outputs] == [3, 4, 4, 1, 1]


def test_a_request_takes_no_step_beyond_its_limit_and_another_takes_all() -> None:
    made = driver(("a", 3), max_tokens=12)
    made.add(request("b", (1, 2), max_tokens=3, arrival=1))
    made.num_steps = 4
    made.step()
    output = made.step()

    assert (output.num_steps, counts(output)) == (4, {"a": 4, "b": 2})
    assert set(made.finished) == {"b"}
    assert made.step().num_steps == 4


def test_a_request_that_has_reached_its_limit_holds_nobody_up() -> None:
    made = driver(("a", 3), max_tokens=12, async_scheduling=True)
    made.add(request("b", (1, 2), max_tokens=3, arrival=1))
    made.num_steps = 4
    for expected in ({"a": 3, "b": 2}, {"a": 4, "b": 2}, {"a": 4}):
        assert counts(made.schedule()) == expected


@pytest.mark.parametrize("why", ["somebody waits", "a prompt", "it is not for long", "drafts", "sat out"])
def test_else_it_is_one(why: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "somebody waits": {"max_num_reqs": 1},
        "a prompt": {"max_num_batched_tokens": 4},
        "drafts": {"num_spec_tokens": 2},
    }
    made = driver(("a", 3), max_tokens=4 if why == "it is not for long" else 20, **changes.get(why, {}))
    made.num_steps = 4
    made.step()
    if why in ("somebody waits", "a prompt"):
        made.add(request("b", [5] * 20, max_tokens=3, arrival=1))
    if why == "sat out":
        running = made.queue.running
        still = np.zeros_like(running.counts.ran)
        made.queue = replace(made.queue, running=replace(running, counts=replace(running.counts, ran=still)))
        made.device.batch = set()

    assert made.step().num_steps == 1


def test_nobody_is_preempted_for_further_steps() -> None:
    """Two requests fill the cache to two tokens: blocks for four steps of both are not there."""
    made = driver(("a", 4), ("b", 4), max_tokens=9, num_blocks=(5,), block_sizes=(3,))
    made.num_steps = 4
    outputs = [made.step() for _ in range(2)]

    assert [output.num_steps for output in outputs] == [1, 1]
    assert counts(outputs[1]) == {"a": 1, "b": 1}
    assert not outputs[1].preempted_req_ids
    made.drain()
    assert {name: len(done.token_ids) for name, done in made.finished.items()} == {"a": 9, "b": 9}


@example([[1, 2, 3, 4, 5]], [7])
@example([[1, 2, 3, -1]], [7])
@example([[-1, -1, -1, -1]], [3])
@given(
    st.lists(st.lists(st.integers(-1, 6), max_size=6), max_size=2), st.lists(st.integers(0, 9), max_size=2)
)
def test_an_output_of_another_plan_is_refused(tokens: list[list[int]], computed: list[int]) -> None:
    """Four steps of one request that had three tokens: what comes is 1 to 4 tokens, and one computed for each."""
    made = driver(("a", 3), max_tokens=12)
    made.num_steps = 4
    made.step()
    made.schedule()
    width = max(map(len, tokens), default=0)
    rows = np.array([[*own, *[-1] * (width - len(own))] for own in tokens], np.int32).reshape(
        len(tokens), width
    )
    flags = np.zeros(len(rows), np.bool_)
    output = StepOutput(rows, np.array(computed, np.int32), flags, flags)  # type: ignore[arg-type]
    num_kept = int((rows[:1] >= 0).sum())
    is_right = len(rows) >= 1 and len(computed) == len(rows) and 1 <= num_kept <= 4
    if is_right and computed[0] == 3 + num_kept:
        update(made.queue, ("a",), output)
    else:
        with pytest.raises(SchedulerOutputError):
            update(made.queue, ("a",), output)


def test_what_lies_behind_a_stop_string_is_not_cached() -> None:
    """Found after five outputs, and it ends the second one: of seven computed tokens four are the request's."""
    made = driver(("a", 3), max_tokens=20, block_sizes=(2,), num_blocks=(32,))
    made.num_steps = 4
    for _ in range(2):
        made.step()
    whole = finish(made.queue, "a", "stop", "text")
    cut = finish(made.queue, "a", "stop", "text", num_outputs=2)

    assert [len(queue.pools[0].key_of) for queue in (whole, cut)] == [3, 2]
    assert [num_free(queue) for queue in (whole, cut)] == [31, 31]
