"""Moments and forks in the scheduler: who holds what, what is copied, what is refused. `test_machine` has the laws."""

import pytest

from purestep.pure.errors import DuplicateRequestError, InvalidRequestError, OutOfBlocksError, OutOfRowsError
from purestep.pure.scheduler import (
    abort,
    check_invariants,
    fork,
    go_back,
    hold,
    let_go,
    num_free,
    schedule,
    update,
)
from tests.laws import assert_pure, digest
from tests.pure.scheduler.toy import Driver, counts, driver

pytestmark = pytest.mark.usefixtures("unchecked_records")


def running(num_tokens: int, num_steps: int = 1, **changes: object) -> Driver:
    """One request with such a prompt, after so many steps."""
    made = driver(("a", num_tokens), **({"enable_prefix_caching": False} | changes))
    for _ in range(num_steps):
        made.step()
    return made


def copies(made: Driver) -> list[tuple[int, int]]:
    """What the next step copies."""
    return [pair for pairs in made.step().block_copies for pair in pairs]


class TestHold:
    def test_it_is_pure_and_a_moment_is_a_holder(self) -> None:
        made = running(10)
        shareable = assert_pure(hold, made.queue, "m")
        check_invariants(shareable.queue)
        assert [blocks.tolist() for blocks in shareable.queue.moments["m"]] == [[1, 2, 3]]
        assert shareable.kept == {"a": (2,)}
        gone = abort(shareable.queue, ["a"])
        assert num_free(gone) == 15 - 3
        released = assert_pure(let_go, gone, "m")
        check_invariants(released)
        assert num_free(released) == 15
        assert let_go(released, "m") is released

    def test_a_block_that_is_held_is_copied_before_it_is_written(self) -> None:
        made = running(10)
        made.remember()
        (pair,) = copies(made)
        assert pair[0] == 3 and pair[1] not in (1, 2, 3)
        assert copies(made) == []

    def test_full_blocks_are_shared_and_never_copied(self) -> None:
        made = running(7, num_steps=2)  # eight tokens are computed
        made.remember()
        assert copies(made) == []
        assert made.queue.running.residences[0].blocks[0][:2].tolist() == [1, 2]

    def test_nothing_is_copied_if_the_moment_is_gone_by_then(self) -> None:
        made = running(10)
        made.remember()
        made.let_go(made.moments[0])
        assert copies(made) == []
        assert made.queue.running.residences[0].blocks[0].tolist() == [1, 2, 3]

    def test_a_block_of_several_sharers_is_kept_by_the_last(self) -> None:
        made = running(10)
        for name in "bc":
            made.fork("a", name)
        assert len(copies(made)) == 2
        blocks = [residence.blocks[0].tolist() for residence in made.queue.running.residences]
        assert sorted(own[2] for own in blocks)[0] == 3
        assert all(own[:2] == [1, 2] for own in blocks)

    def test_a_request_that_sits_out_at_its_limit_is_given_nothing(self) -> None:
        """Its last token is on its way, so it will not run again; it gave up its open block all the same."""
        made = driver(("a", 5), max_tokens=2, async_scheduling=True)
        made.schedule()
        made.schedule()
        made.remember()
        assert counts(made.schedule()) == {}

    def test_rows_that_lost_their_open_blocks_press_like_any_others(self) -> None:
        """No block is left for the copies of both: the one served last is preempted, and computed again later."""
        made = driver(("a", 6), ("b", 6), num_blocks=(6,), enable_prefix_caching=False, max_tokens=3)
        made.step()
        made.remember()
        made.let_go(made.moments[0])
        made.remember()
        output = made.step()
        assert counts(output) == {"a": 1}
        made.drain()


class TestGoBack:
    def test_it_is_pure_and_takes_the_pools_of_now(self) -> None:
        made = running(10)
        made.remember()
        moment = made.moments[0]
        for _ in range(4):
            made.step()
        back = assert_pure(go_back, made.queue, moment.queue)
        check_invariants(back)
        assert back.running is moment.queue.running
        assert num_free(back) == 15 - 3

    def test_going_back_twice_gives_the_same_step_and_copies_anew(self) -> None:
        made = running(10)
        made.remember()
        moment, sources = made.moments[0], []
        for _ in range(3):
            sources.append([source for source, _ in copies(made)])
            made.step()
            made.go_back(moment)
        assert sources == [[3]] * 3

    def test_prefixes_that_were_cached_since_are_found(self) -> None:
        made = driver(("a", 4), max_tokens=2)
        made.remember()
        made.drain_but_moments()
        made.go_back(made.moments[0])
        output = made.step()
        assert output.scheduled_new_reqs[0].num_computed_tokens == 3


class TestFork:
    def test_all_forks_of_a_request_have_the_tokens_that_its_first_one_had_written_down(self) -> None:
        made = running(10, num_steps=3)
        made.fork("a", "b")
        made.fork("a", "c")
        parent, *forks = [state.tokens for state in made.queue.running.states]
        assert len(parent) == 13
        assert all(tokens is parent for tokens in forks)

    def test_it_is_pure(self) -> None:
        made = running(10)
        forked = assert_pure(fork, made.queue, "a", "b", arrival=9, stream=5)
        check_invariants(forked.queue)
        assert (forked.has_run, forked.goes_on, forked.kept) == (True, True, {"a": (2,)})
        twin = forked.queue.running.states[1].request
        assert (twin.req_id, twin.stream, twin.arrival) == ("b", 5, 9)
        same = fork(made.queue, "a", "b", arrival=9, stream=None).queue.running.states[1].request
        assert same.stream == made.queue.running.states[0].request.stream

    def test_it_shares_full_blocks_and_one_open_block_is_copied(self) -> None:
        made = running(10)
        free = num_free(made.queue)
        made.fork("a", "b")
        assert num_free(made.queue) == free
        assert len(copies(made)) == 1
        assert num_free(made.queue) == free - 1

    def test_a_parent_that_never_ran_is_shared_with_when_its_prompt_is_computed(self) -> None:
        made = driver(("a", 10), enable_prefix_caching=False)
        made.fork("a", "b")
        made.step()
        assert counts(made.step()) == {"a": 1, "b": 1}
        assert made.queue.running.residences[1].num_borrowed == (2,)
        made.drain()

    def test_a_preempted_parent_waits_in_line_with_its_fork(self) -> None:
        made = driver(("a", 10), ("b", 10), num_blocks=(7,), enable_prefix_caching=False, max_tokens=6)
        while not any(state.num_preemptions for _, state in made.queue.waiting.states.items()):
            made.step()
        made.fork("b", "c")
        given = made.given["c"]
        made.drain()
        assert given and made.finished["c"].token_ids[: len(given)] == given
        assert made.finished["b"].token_ids[: len(given)] == given

    @pytest.mark.parametrize(
        ("parent", "new", "error", "message"),
        [
            ("x", "b", InvalidRequestError, "fork of 'x': no such request waits or runs"),
            ("a", "a", DuplicateRequestError, "fork of 'a' as 'a': this id is in use"),
        ],
    )
    def test_ids_are_judged(self, parent: str, new: str, error: type[Exception], message: str) -> None:
        made = running(10)
        with pytest.raises(error, match=message):
            fork(made.queue, parent, new, arrival=9, stream=0)

    def test_it_needs_a_row(self) -> None:
        made = running(10, max_num_reqs=1)
        before = digest(made.queue)
        with pytest.raises(
            OutOfRowsError, match=r"1 requests run, and there are rows for 1 of max_num_reqs=1"
        ):
            fork(made.queue, "a", "b", arrival=9, stream=0)
        assert digest(made.queue) == before

    def test_it_needs_a_block_if_there_is_one_to_copy(self) -> None:
        made = driver(("a", 6), ("z", 3), num_blocks=(4,), enable_prefix_caching=False)
        made.step()
        before = digest(made.queue)
        with pytest.raises(OutOfBlocksError, match="all 3 blocks of KV group 0 are held"):
            fork(made.queue, "a", "b", arrival=9, stream=0)
        assert digest(made.queue) == before

    def test_it_needs_no_block_if_all_are_full(self) -> None:
        made = driver(("a", 8), ("z", 3), num_blocks=(4,), enable_prefix_caching=False)
        made.step()
        forked = fork(made.queue, "a", "b", arrival=9, stream=0)
        check_invariants(forked.queue)
        assert forked.kept == {} and num_free(forked.queue) == 0

    def test_a_block_is_free_in_the_step_that_copies_it_if_the_other_holder_is_preempted(self) -> None:
        """The step reads the block for the copy before another request writes it."""
        made = driver(("a", 1), ("b", 2), num_blocks=(4,), block_sizes=(2,), enable_prefix_caching=False)
        made.step()
        made.fork("a", "c")
        output = made.step()
        assert output.preempted_req_ids == {"c"}
        assert output.block_copies == (((1, 3),),)
        assert output.scheduled_cached_reqs.new_block_ids == {"a": ((3,),), "b": ((1,),)}
        made.drain()  # where each request finds its own history

    def test_a_fork_without_a_row_in_the_batch_comes_when_all_is_known(self) -> None:
        made = driver(("a", 5), max_tokens=6, async_scheduling=True)
        made.schedule()
        made.schedule()
        forked = fork(made.queue, "a", "b", arrival=9, stream=0, has_row=False)
        assert (forked.has_run, forked.goes_on) == (True, False)
        _, output = schedule(forked.queue)
        assert counts(output) == {"a": 1}

    def test_a_fork_without_a_row_waits_for_chunks_of_the_prompt_too(self) -> None:
        made = driver(("a", 10), async_scheduling=True, long_prefill_token_threshold=4)
        made.schedule()
        forked = fork(made.queue, "a", "b", arrival=9, stream=0, has_row=False)
        queue, output = schedule(forked.queue)
        assert counts(output) == {"a": 4}
        req_ids, result = made.on_the_way[0]
        queue, _ = update(queue, req_ids, result)
        assert counts(schedule(queue)[1]) == {"a": 2, "b": 4}
