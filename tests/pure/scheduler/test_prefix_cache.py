import pytest

from purestep.pure.records.scheduler_output import SchedulerOutput
from tests.pure.scheduler.toy import Driver, config, counts, request

pytestmark = pytest.mark.usefixtures("unchecked_records")


def cached(first: int, second: int, **changes: object) -> tuple[Driver, SchedulerOutput]:
    """Two requests one after the other, with so many tokens of one text."""
    made = Driver(config(**changes))
    made.add(request("a", list(range(first)), max_tokens=1))
    made.drain()
    made.add(request("b", list(range(second)), max_tokens=3))
    output = made.step()
    made.drain()
    return made, output


@pytest.mark.parametrize(
    ("first", "second", "hit"), [(8, 9, 8), (8, 11, 8), (7, 12, 4), (3, 12, 0), (12, 6, 4), (13, 13, 12)]
)
def test_full_blocks_of_the_same_beginning_are_not_computed_again(first: int, second: int, hit: int) -> None:
    made, output = cached(first, second)

    assert output.scheduled_new_reqs[0].num_computed_tokens == hit
    assert counts(output) == {"b": second - hit}
    assert output.block_copies == ()
    assert made.finished["b"].num_cached_tokens == hit


def test_a_prompt_that_is_cached_whole_computes_its_last_token_in_a_block_of_its_own() -> None:
    """8 of 8 cached: 7 computed, 1 scheduled, and the cached block is copied, not written."""
    _, output = cached(8, 8)
    new = output.scheduled_new_reqs[0]
    ((source, target),) = output.block_copies[0]

    assert new.num_computed_tokens == 7 and counts(output) == {"b": 1}
    assert new.block_ids[0][-1] == target != source


def test_a_whole_hit_gives_up_its_last_block_rather_than_wait_for_ever() -> None:
    """The cache is one prompt long: there is no block to copy to but the one to copy from."""
    _, output = cached(8, 8, num_blocks=(3,))

    assert output.scheduled_new_reqs[0].num_computed_tokens == 4
    assert output.block_copies == ()


def test_groups_hit_only_what_all_of_them_have() -> None:
    _, output = cached(12, 14, block_sizes=(2, 8), num_blocks=(16, 8))

    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    assert output.block_copies == ()


def test_a_hit_may_end_inside_a_large_block() -> None:
    """The last small block of one group is forgotten: the other group's block is copied, and written on."""
    made = Driver(config(block_sizes=(2, 8), num_blocks=(8, 8)))
    for req_id, prompt in [("a", range(8)), ("b", [6] * 7)]:
        made.add(request(req_id, prompt, max_tokens=1))
        made.drain()
    made.add(request("c", (*range(8), 1), max_tokens=3))
    output = made.step()
    made.drain()

    assert output.scheduled_new_reqs[0].num_computed_tokens == 6
    assert [len(pairs) for pairs in output.block_copies] == [0, 1]


def test_outputs_are_cached_too_once_their_request_is_done() -> None:
    """The next turn of a conversation finds the last one's answer."""
    made = Driver(config())
    made.add(request("a", [1, 2, 3], max_tokens=7))
    made.drain()
    turn = (1, 2, 3, *made.finished["a"].token_ids)
    made.add(request("b", (*turn, 5), max_tokens=1))
    made.drain()

    assert made.finished["b"].num_cached_tokens == 8


def test_the_least_recently_used_is_forgotten_first() -> None:
    made = Driver(config(num_blocks=(7,)))
    for req_id, token in [("a", 1), ("b", 2), ("a again", 1)]:
        made.add(request(req_id, [token] * 9, max_tokens=1))
        made.drain()
    made.add(request("large", [3] * 14, max_tokens=1))
    made.drain()
    for req_id, token in [("a once more", 1), ("b again", 2)]:
        made.add(request(req_id, [token] * 9, max_tokens=1))
        made.drain()

    assert made.finished["a again"].num_cached_tokens == 8
    assert made.finished["a once more"].num_cached_tokens == 8
    assert made.finished["b again"].num_cached_tokens == 0


def test_prompt_logprobs_need_every_token_computed() -> None:
    made = Driver(config())
    for req_id in "ab":
        made.add(request(req_id, range(7), max_tokens=1, prompt_logprobs=1))
        made.drain()

    assert made.finished["b"].num_cached_tokens == 0


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_another_salt_or_adapter_shares_nothing(field: str) -> None:
    made = Driver(config())
    for req_id, value in [("a", "x"), ("b", "y"), ("c", None), ("d", "y")]:
        made.add(request(req_id, [1] * 9, max_tokens=1, **{field: value}))
        made.drain()

    assert [made.finished[r].num_cached_tokens for r in "abcd"] == [0, 0, 0, 8]
