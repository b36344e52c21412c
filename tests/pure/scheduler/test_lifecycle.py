from collections.abc import Callable
from typing import Any

import pytest

from purestep.pure.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    InvalidRequestError,
    OutOfBlocksError,
    PromptTooLongError,
)
from purestep.pure.persistent import num_in, pop
from purestep.pure.record import replace
from purestep.pure.scheduler import (
    abort,
    add,
    check_invariants,
    finish,
    fork,
    go_back,
    hold,
    make_queue,
    num_free,
    preempt_all,
    set_version,
)
from purestep.pure.scheduler.memory import SLACK
from tests.laws import digest
from tests.pure.scheduler.toy import Driver, config, request

pytestmark = pytest.mark.usefixtures("unchecked_records")


class TestMakeQueue:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"num_blocks": (0,)}, OutOfBlocksError, "cache of 0 KV blocks"),
            ({"num_blocks": (1,)}, OutOfBlocksError, "cache of 1 KV blocks"),
            ({"num_blocks": ()}, InvalidParameterError, "0 numbers of blocks and 1 block sizes"),
            ({"num_blocks": (4, 4)}, InvalidParameterError, "2 numbers of blocks and 1 block sizes"),
            ({"block_sizes": (0,)}, InvalidParameterError, "block_sizes"),
            ({"block_sizes": (4, 4)}, InvalidParameterError, "1 numbers of blocks and 2 block sizes"),
            (
                {"num_blocks": (9, 9), "block_sizes": (4, -4)},
                InvalidParameterError,
                r"block_sizes\[1\].*got -4",
            ),
            ({"num_blocks": (9, 0), "block_sizes": (4, 4)}, OutOfBlocksError, "cache of 0 KV blocks"),
            ({"num_blocks": 8}, InvalidParameterError, "num_blocks=8: give a tuple of whole numbers"),
            ({"num_blocks": (8.5,)}, InvalidParameterError, r"num_blocks=\(8.5,\): give a tuple"),
            ({"block_sizes": "4"}, InvalidParameterError, "block_sizes='4': give a tuple"),
            ({"max_num_reqs": 0}, InvalidParameterError, "max_num_reqs must be .* at least 1, got 0"),
            ({"max_num_batched_tokens": 0}, InvalidParameterError, "max_num_batched_tokens"),
            ({"max_num_batched_tokens": 2.5}, InvalidParameterError, "whole number .* got 2.5"),
            ({"max_model_len": 1}, InvalidParameterError, "max_model_len .* at least 2, got 1"),
            ({"block_horizon": 0}, InvalidParameterError, "block_horizon"),
            ({"long_prefill_token_threshold": 0}, InvalidParameterError, "long_prefill_token_threshold"),
            ({"long_prefill_token_threshold": -3}, InvalidParameterError, "threshold .* got -3"),
        ],
    )
    def test_limits_that_let_nothing_run_are_refused(
        self, changes: dict[str, object], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            make_queue(config(**changes))


class TestAdd:
    @pytest.mark.parametrize(
        ("prompt", "fields", "error", "message"),
        [
            ([], {}, InvalidRequestError, "empty prompt"),
            ([1] * 64, {}, PromptTooLongError, "prompt of 64 tokens; with max_model_len=64 at most 63"),
            ([1] * 61, {}, PromptTooLongError, "prompt of 61 tokens; the whole KV cache has room for 60"),
            ([1, 9], {}, InvalidRequestError, "token id 9 .* vocabulary is 0 to 8"),
            ([1, -1], {}, InvalidRequestError, "token id -1 "),
            ([1], {"fork_of": "there"}, InvalidRequestError, "fork of 'there', whose prompt is another one"),
            ([1.5], {}, InvalidRequestError, "'new' has a prompt that is no tuple of whole numbers"),
            (["a"], {}, InvalidRequestError, "'new' has a prompt that is no tuple of whole numbers"),
            (
                [1],
                {"priority": float("nan")},
                InvalidRequestError,
                "'new': priority=nan: it is a whole number",
            ),
            ([1], {"arrival": 0.5}, InvalidRequestError, "'new': arrival=0.5: it is a whole number"),
            ([1], {"stream": None}, InvalidRequestError, "'new': stream=None: it is a whole number"),
            (
                [1],
                {"stream": 2**70},
                InvalidRequestError,
                r"stream=\d+: it is .* from -2\*\*63 to 2\*\*63 - 1",
            ),
            ([1], {"eos_token_ids": 5}, InvalidRequestError, "eos_token_ids=5: give a tuple of token ids"),
            ([1], {"eos_token_ids": ("5",)}, InvalidRequestError, "eos_token_ids=.*: give a tuple"),
            ([1], {"eos_token_ids": (2**40,)}, InvalidRequestError, "eos_token_ids=.*which are int32"),
            ([1], {"salt": 3}, InvalidRequestError, "salt=3: it is text, or None"),
            ([1], {"fork_of": ["there"]}, InvalidRequestError, r"a fork of \['there'\].*ids are text"),
            ([1], {"temperature": -1.0}, InvalidParameterError, "'new': temperature"),
            (
                [1],
                {"stop_token_ids": (9,)},
                InvalidParameterError,
                r"'new': .* stop_token_ids must be in \[0, 9\)",
            ),
            ([1], {"max_tokens": 0}, InvalidParameterError, "'new': max_tokens"),
            (
                [1],
                {"max_tokens": None, "min_tokens": 65},
                InvalidParameterError,
                "'new': min_tokens .* <= 64",
            ),
        ],
    )
    def test_a_bad_request_is_refused_and_leaves_the_queue_as_it_was(
        self, prompt: list[int], fields: dict[str, object], error: type[Exception], message: str
    ) -> None:
        queue = add(make_queue(config()), request("there", [1, 2]))
        before = digest(queue)

        with pytest.raises(error, match=message):
            add(queue, request("new", prompt, **fields), vocab_size=9)
        assert digest(queue) == before

    @pytest.mark.parametrize("wrong", [{"req_id": 3}, {"req_id": ["new"]}, {"sampling_params": None}])
    def test_a_request_of_the_wrong_kind_is_refused(self, wrong: dict[str, Any]) -> None:
        queue = make_queue(config())
        with pytest.raises(InvalidRequestError, match="ids are text, and parameters SamplingParams"):
            add(queue, replace(request("new", [1]), **wrong))

    def test_what_is_no_request_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="give a Request"):
            add(make_queue(config()), "new")  # type: ignore[arg-type]

    def test_rules_that_leave_no_token_before_min_tokens_are_refused(self) -> None:
        """min_tokens holds the end back, and nothing else is allowed: only the request knows the model's end."""
        fields = {"allowed_token_ids": (4,), "min_tokens": 1, "ignore_eos": True}
        queue = make_queue(config())

        with pytest.raises(InvalidParameterError, match="'a': allowed_token_ids"):
            add(queue, request("a", [1], eos_token_ids=(4, 3), **fields))
        assert len(add(queue, request("a", [1], eos_token_ids=(3,), **fields)).waiting) == 1

    def test_an_id_in_use_is_refused_waiting_or_running(self) -> None:
        made = Driver(config())
        made.add(request("a", max_tokens=5))
        for _ in range(2):
            with pytest.raises(DuplicateRequestError, match="request id 'a' is in use"):
                add(made.queue, request("a"))
            made.step()

    def test_prompts_up_to_both_limits_run(self) -> None:
        made = Driver(config(max_num_batched_tokens=64))
        made.add(request("a", [1] * 60, max_tokens=9))
        made.drain()
        assert len(made.finished["a"].token_ids) == 1

        made = Driver(config(max_model_len=16))
        made.add(request("a", [1] * 15, max_tokens=9))
        made.drain()
        assert len(made.finished["a"].token_ids) == 1

    def test_an_id_may_be_used_again_in_the_step_that_tells_of_its_end(self) -> None:
        made = Driver(config())
        made.add(request("a", [1, 2, 3], max_tokens=1))
        made.step()
        made.add(request("a", [4, 5], max_tokens=2))
        output = made.step()

        assert output.finished_req_ids == {"a"} == {new.req_id for new in output.scheduled_new_reqs}
        made.drain()


class TestLeaving:
    def test_aborted_requests_give_their_blocks_back(self) -> None:
        made = Driver(config(max_num_reqs=1))
        for req_id in "ab":
            made.add(request(req_id, max_tokens=9))
        made.step()
        made.abort("b", "a", "unknown")

        assert num_free(made.queue) == 15 and not len(made.queue.live)
        assert made.schedule().finished_req_ids == {"a"}  # b never ran, so nobody knows it

    def test_nothing_to_abort_changes_nothing(self) -> None:
        queue = add(make_queue(config()), request("a"))
        before = digest(queue)
        made = Driver(config())
        made.queue = queue
        made.abort("unknown")

        assert digest(made.queue) == before

    def test_a_request_is_finished_from_outside(self) -> None:
        made = Driver(config())
        made.add(request("a", max_tokens=9))
        made.step()
        made.queue = finish(made.queue, "a", "stop", "###")
        check_invariants(made.queue)

        assert made.queue.news.finished_req_ids == {"a"}
        with pytest.raises(InvalidRequestError, match=r"finish\('a', 'stop'\): no such request"):
            finish(made.queue, "a", "stop", "###")

    @pytest.mark.parametrize(
        ("leave", "message"),
        [
            (lambda queue: abort(queue, "a"), r"abort\('a'\): give a list of ids"),
            (lambda queue: abort(queue, 3), r"abort\(3\): give a list of ids"),
            (lambda queue: abort(queue, ["a", 3]), "3 is no id: ids are text"),
            (lambda queue: abort(queue, [["a"]]), r"\['a'\] is no id"),
            (lambda queue: finish(queue, ["a"], "stop"), r"\['a'\] is no id"),
            (lambda queue: finish(queue, "a", "tired"), "the reason is one of stop, length, abort, error"),
            (lambda queue: finish(queue, "a", None), "the reason is one of"),
            (lambda queue: finish(queue, "a", "stop", 1.5), "a token id, text or None"),
            (lambda queue: fork(queue, ["a"], "b", arrival=1, stream=None), r"\['a'\] is no id"),
            (lambda queue: fork(queue, "a", 3, arrival=1, stream=None), "3 is no id"),
            (
                lambda queue: fork(queue, "a", "b", arrival="1", stream=None),
                "arrival='1': it is a whole number",
            ),
            (lambda queue: fork(queue, "a", "b", arrival=1, stream=2**63), "stream=.* to 2"),
            (lambda queue: set_version(queue, "2"), "version='2': it is a whole number"),
            (lambda queue: set_version(queue, None), "version=None: it is a whole number"),
            (lambda queue: go_back(queue, None), "go_back to NoneType: give a queue"),
            (lambda queue: go_back(queue, make_queue(config(max_num_reqs=2))), "the same config"),
            (lambda queue: hold(hold(queue, "m").queue, "m"), r"hold\('m'\): a moment of this name"),
        ],
    )
    def test_what_is_of_the_wrong_kind_is_refused_and_the_queue_is_as_it_was(
        self, leave: Callable[[Any], object], message: str
    ) -> None:
        made = Driver(config())
        made.add(request("a", max_tokens=9))
        made.step()
        before = digest(made.queue)

        with pytest.raises(InvalidRequestError, match=message):
            leave(made.queue)
        assert digest(made.queue) == before

    def test_a_preempted_request_is_told_as_finished_not_as_preempted(self) -> None:
        made = Driver(config())
        made.add(request("a", max_tokens=9))
        made.step()
        made.set_version(1)
        made.abort("a")
        output = made.schedule()

        assert output.finished_req_ids == {"a"} and not output.preempted_req_ids


class TestLine:
    @pytest.mark.parametrize("forks", [False, True])
    def test_requests_that_come_and_are_aborted_leave_nothing_behind(self, forks: bool) -> None:
        """Behind one that stays first in line, however many: the line does not grow, and it is kept in order."""
        queue = add(make_queue(config()), request("first", arrival=-1))
        stays = []
        for i in range(3000):
            parent = "first" if forks and i % 2 else None
            queue = add(queue, request(f"{i}", arrival=-i, priority=i % 3, fork_of=parent))
            if i % 100:
                queue = abort(queue, [f"{i}"])
            else:
                stays.append((i % 3, -i, f"{i}"))
            if i % 250 == 0:
                check_invariants(queue)
        assert num_in(queue.waiting.line) <= 2 * len(queue.waiting) + SLACK
        assert sum(map(len, queue.waiting.forks.values())) <= len(queue.waiting)

        order, heap = [], queue.waiting.line
        while heap is not None:
            (*_, ticket), heap = pop(heap)
            state = queue.waiting.states.get(ticket)
            order += [] if state is None else [state.request.req_id]
        assert order == [req_id for *_, req_id in sorted([*stays, (0, -1, "first")])]


class TestFork:
    def forked(self, num_prompt: int, **changes: object) -> Driver:
        made = Driver(config(**changes))
        made.add(request("a", range(num_prompt), max_tokens=6, arrival=0))
        for i in range(2):
            made.add(request(f"a{i}", range(num_prompt), max_tokens=6, arrival=i + 1, fork_of="a"))
        return made

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize(("num_prompt", "num_shared"), [(1, 0), (4, 0), (5, 1), (6, 1), (8, 1), (9, 2)])
    def test_a_fork_computes_the_last_prompt_token_and_shares_the_blocks_before_its_own(
        self, num_prompt: int, num_shared: int, caching: bool
    ) -> None:
        made = self.forked(num_prompt, enable_prefix_caching=caching)
        first, second = made.step(), made.step()
        assert first.req_ids == ("a",)
        parent = made.device.tables["a"][0]

        copies = second.block_copies[0] if second.block_copies else ()
        for new in second.scheduled_new_reqs:
            assert new.num_computed_tokens == num_prompt - 1
            assert list(new.block_ids[0][:num_shared]) == parent[:num_shared]
            own = new.block_ids[0][num_shared]
            assert own not in parent
            assert ((parent[num_shared], own) in copies) == ((num_prompt - 1) % 4 > 0)
        assert second.num_scheduled_tokens.tolist() == [1, 1, 1]
        made.drain()
        assert made.finished["a1"].num_cached_tokens == num_prompt - 1

    def test_a_fork_waits_for_the_whole_prompt(self) -> None:
        made = self.forked(9, max_num_batched_tokens=4)

        assert [made.step().req_ids for _ in range(4)] == [("a",)] * 3 + [("a", "a0", "a1")]
        made.drain()

    def test_a_fork_of_nobody_is_a_request_like_others(self) -> None:
        made = Driver(config())
        made.add(request("a", range(7), max_tokens=3, fork_of="gone"))
        made.drain()

        assert len(made.finished["a"].token_ids) == 3

    def test_a_fork_of_an_aborted_request_is_served_from_the_cache(self) -> None:
        made = self.forked(9, max_num_reqs=1)
        made.step()
        made.abort("a")
        made.drain()

        assert made.finished["a0"].num_cached_tokens == 8

    def test_a_fork_of_an_id_used_again_does_not_share_with_the_stranger(self) -> None:
        made = self.forked(9)
        made.abort("a")
        made.add(request("a", [6, 5, 4], max_tokens=3, arrival=9))
        made.drain()

        assert {"a", "a0", "a1"} == set(made.finished)

    def test_forks_may_be_aborted_while_they_wait(self) -> None:
        made = self.forked(9)
        made.abort("a0")
        made.drain()

        assert {"a", "a1"} == set(made.finished)


class TestVersion:
    def test_cached_blocks_of_other_parameters_do_not_hit(self) -> None:
        """The same prompt after new weights: nothing is taken from the cache; back with the old ones, it is again."""
        made = Driver(config(num_blocks=(64,)))
        hits = []
        for i, version in enumerate([0, 0, 1, 1, 0]):
            made.set_version(version)
            made.add(request(f"{i}", range(7), max_tokens=1))
            made.drain()
            hits.append(made.finished[f"{i}"].num_cached_tokens)

        assert hits == [0, 4, 0, 4, 4]

    def test_running_requests_are_computed_anew(self) -> None:
        made = Driver(config())
        made.add(request("a", range(7), max_tokens=6))
        made.step()
        made.step()
        made.set_version(1)
        output = made.schedule()
        made.settle()

        assert output.preempted_req_ids == {"a"} == output.scheduled_cached_reqs.resumed_req_ids
        assert output.scheduled_cached_reqs.num_computed_tokens.tolist() == [0]
        assert output.num_scheduled_tokens_by_id == {"a": 9}
        made.drain()

    def test_kept_kv_stays_usable_and_mixtures_are_not_offered(self) -> None:
        made = Driver(config(num_blocks=(64,)))
        made.add(request("before", range(7), max_tokens=1))
        made.drain()
        made.add(request("mixed", [1] * 5, max_tokens=12))
        made.step()
        made.set_version(1, keep_kv=True)
        assert made.schedule().req_ids == ("mixed",)
        made.settle()
        made.drain()
        answer = made.finished["mixed"].token_ids
        made.add(request("after", range(7), max_tokens=1))
        made.add(request("next turn", (*[1] * 5, *answer), max_tokens=1))
        made.drain()

        assert made.finished["after"].num_cached_tokens == 4
        assert made.finished["next turn"].num_cached_tokens == 4  # of the prompt, offered before

    def test_a_mixture_is_never_taken_for_a_version(self) -> None:
        """0, then 1 keeping KV, then 0 again: what 1 computed is cached under the root of 0 and must not hit."""
        made = Driver(config(num_blocks=(64,)))
        made.set_version(1, keep_kv=True)
        made.add(request("a", range(7), max_tokens=1))
        made.drain()
        made.set_version(0)
        made.add(request("b", range(7), max_tokens=1))
        made.drain()

        assert made.finished["b"].num_cached_tokens == 0

    def test_the_present_version_changes_nothing(self) -> None:
        made = Driver(config())
        before = made.queue
        made.set_version(0)

        assert made.queue is before

    def test_lost_kv_is_computed_anew(self) -> None:
        """After `preempt_all` nothing is cached, steps in flight are forgotten, and known tokens are kept."""
        made = Driver(config(async_scheduling=True))
        for i, req_id in enumerate("ab"):
            made.add(request(req_id, [i] * 9, max_tokens=5, arrival=i))
        made.schedule()
        made.settle()
        made.device.cells.clear()
        made.queue = preempt_all(made.queue)
        check_invariants(made.queue)
        assert num_free(made.queue) == 15
        output = made.schedule()
        assert output.num_scheduled_tokens_by_id == {"a": 10, "b": 10}
        made.drain()

        assert set(made.finished) == {"a", "b"}
