"""One writer: `update_states` takes a step exactly if every block that it may write has one holder, by plain lists."""

from random import Random

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import SchedulerOutputError
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.scheduler_output import NewRequestData, SchedulerOutput
from purestep.pure.update import update_states
from tests.laws import digest
from tests.profiles import examples
from tests.pure.test_update import LIMITS
from tests.schedules import DRAFTED, Schedule, drive, seeds
from tests.schedules import LIMITS as ALL_LIMITS
from tests.tiny import cached_requests, decode, new_request, scheduled, settled

SIZES = (2, 1)
SMALL = BatchLimits(max_num_reqs=4, max_model_len=12, vocab_size=8, block_sizes=SIZES, num_blocks=(12, 24))


@attrs.define
class Held:
    """A request, its lists of blocks per KV group, and the tokens that it computes in the coming step."""

    prompt: int
    known: int
    blocks: list[list[int]]
    start: int = 0
    count: int = 0


def is_legal(requests: dict[str, Held]) -> bool:
    """Each block is only read, or written at one place, and that is its only one or it is full afterwards."""
    for group, size in enumerate(SIZES):
        mentions: dict[int, list[tuple[str, bool, bool]]] = {}
        for name, held in requests.items():
            for place, block in enumerate(held.blocks[group]):
                is_written = place >= held.start // size
                is_full = place < (held.start + held.count) // size
                mentions.setdefault(block, []).append((name, is_written, is_full))
        for block, found in mentions.items():
            writers = [(name, is_full) for name, is_written, is_full in found if is_written]
            if not writers:
                continue
            ((writer, is_full), *others) = writers
            is_alone = len(found) == 1
            is_shared_well = is_full and [name for name, _, _ in found].count(writer) == 1
            if block == 0 or others or not (is_alone or is_shared_well):
                return False
    return True


class Careless:
    """A scheduler that mostly gives blocks which nobody has, and sometimes any."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.requests, self.num_named = rng, dict[str, Held](), 0

    def draw(self, group: int, count: int) -> list[int]:
        used = {block for held in self.requests.values() for block in held.blocks[group]}
        drawn: list[int] = []
        for _ in range(count):
            free = [b for b in range(1, SMALL.num_blocks[group]) if b not in used and b not in drawn]
            some = self.rng.choice(sorted(used) or [0])
            drawn.append(some if not free or self.rng.random() < 0.04 else self.rng.choice(free))
        return drawn

    def step(self, batch: InputBatch) -> SchedulerOutput:
        """The next step of everybody; `requests` says what it does."""
        rng = self.rng
        gone = [name for name, held in self.requests.items() if held.known > 11 or rng.random() < 0.1]
        for name in gone:
            del self.requests[name]
        old = {name: [list(ids) for ids in held.blocks] for name, held in self.requests.items()}
        for held in self.requests.values():
            if rng.random() < 0.1:
                held.start = rng.randint(0, held.start)
        new = [self.arrive() for _ in range(rng.randrange(3)) if len(self.requests) < SMALL.max_num_reqs]
        for held in self.requests.values():
            held.count = rng.choice([rng.randint(1, held.known - held.start), held.known - held.start])
            for group, size in enumerate(SIZES):
                lacking = -(-(held.start + held.count) // size) - len(held.blocks[group])
                held.blocks[group] += self.draw(group, max(lacking, 0) + (rng.random() < 0.1))
        running = [name for name in self.requests if name in old]
        grown = {
            name: tuple(tuple(ids[len(had) :]) for ids, had in zip(self.requests[name].blocks, old[name]))  # noqa: B905
            for name in running
        }
        starts = np.array([self.requests[name].start for name in running], np.int32)
        cached = cached_requests(batch, *running, new_block_ids={n: b for n, b in grown.items() if any(b)})
        return scheduled(
            *(self.data(name) for name in new),
            cached=replace(cached, num_computed_tokens=starts),
            counts={name: held.count for name, held in self.requests.items()},
            finished=tuple(gone),
        )

    def arrive(self) -> str:
        """A request; it may find blocks of another one, which the cache says are computed."""
        name, prompt = f"r{self.num_named}", self.rng.randint(1, 6)
        self.num_named += 1
        hit, donor = 0, self.rng.choice(list(self.requests.values()) or [None])  # type: ignore[list-item]
        if donor is not None and self.rng.random() < 0.6:
            hit = min(donor.known, prompt - 1)
            hit = self.rng.choice([hit, hit // 2 * 2])
        shared = [[] if donor is None else donor.blocks[g][: hit // size] for g, size in enumerate(SIZES)]
        self.requests[name] = Held(prompt, prompt, [list(ids) for ids in shared], hit)
        return name

    def data(self, name: str) -> NewRequestData:
        held = self.requests[name]
        blocks = tuple(map(tuple, held.blocks))
        return new_request(name, (1,) * held.prompt, blocks, num_computed_tokens=held.start)

    def settle(self) -> None:
        """Everybody whose history is complete gets a token."""
        for held in self.requests.values():
            held.start += held.count
            held.known += held.start == held.known


@given(seeds)
def test_a_step_is_taken_exactly_if_each_block_that_it_may_write_has_one_holder(rng: Random) -> None:
    """Over arrivals with shared prefixes, growth, roll-backs and ends; a refused step changes nothing."""
    careless, batch = Careless(rng), InputBatch.make_empty(SMALL)
    for _ in range(8):
        output = careless.step(batch)
        if not is_legal(careless.requests):
            before = digest(batch)
            with pytest.raises(SchedulerOutputError, match="a block that a step may write has one holder"):
                update_states(batch, output)
            assert digest(batch) == before
            return
        batch = settled(update_states(batch, output))
        careless.settle()


@examples(0.5)
@given(seeds, st.integers(0, 2))
def test_holders_are_counted_as_the_lists_say(rng: Random, lag: int) -> None:
    """Whatever happened before, with rows given up, taken again, rolled back and parked."""
    for moment in drive(Schedule(rng, rng.choice((ALL_LIMITS, DRAFTED))), 20, max_unsettled=lag):
        batch = moment.after
        for group, column in enumerate(batch.holders.counts):
            held = [tape.tolist() for tape in batch.rows.block_ids[group] if tape is not None]
            counts = np.bincount([b for ids in held for b in ids], minlength=batch.limits.num_blocks[group])
            assert column.array[1:].tolist() == counts[1:].tolist()


def test_counting_goes_on_from_whatever_batch_was_counted_last() -> None:
    """Nothing is counted anew while no row is admitted or given blocks."""
    batch = settled(update_states(InputBatch.make_empty(LIMITS), first()))
    assert decode(batch, "a", "b").holders is batch.holders


def first(*blocks: tuple[int, ...]) -> SchedulerOutput:
    """Requests a and b with prompts of 3 tokens; blocks hold 4."""
    ids = blocks or ((1,), (2,))
    new = [new_request(name, (1, 2, 3), (own,)) for name, own in zip("ab", ids, strict=True)]
    return scheduled(*new, counts={"a": 3, "b": 3})


REFUSED = {
    "the same block for two new requests": ((1,), (1,)),
    "a block ahead of need that another one writes": ((1, 2), (2,)),
    "a block ahead of need for both": ((1, 3), (2, 3)),
    "a block twice": ((1, 1), (2,)),
    "the null block": ((0,), (2,)),
    "the null block ahead of need": ((1, 0), (2,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_new_requests_may_not_be_given(name: str) -> None:
    with pytest.raises(SchedulerOutputError, match="a block that a step may write has one holder"):
        update_states(InputBatch.make_empty(LIMITS), first(*REFUSED[name]))


def test_the_error_names_the_block_and_its_holders() -> None:
    with pytest.raises(
        SchedulerOutputError, match=r"'a' may write block 1 of KV group 0, and requests 'b' hold"
    ):
        update_states(InputBatch.make_empty(LIMITS), first((1,), (1,)))


def with_c(batch: InputBatch, num_computed: int, blocks: tuple[int, ...], **changes: object) -> InputBatch:
    """a and b decode, and c comes with a prompt of 9 tokens, some of which are said to be computed."""
    new = new_request("c", (1, 2, 3, 5, 5, 1, 1, 1, 1), (blocks,), num_computed_tokens=num_computed)
    cached = cached_requests(batch, "a", "b", new_block_ids={"b": ((8,),)})
    output = scheduled(new, cached=cached, counts={"a": 1, "b": 1, "c": 9 - num_computed})
    return update_states(batch, replace(output, **changes))


def test_a_full_block_may_be_shared_and_an_open_one_not() -> None:
    """a has 4 tokens, the last of which it computes now: its block is full after the step, as upstream shares it."""
    batch = settled(update_states(InputBatch.make_empty(LIMITS), first()))
    assert with_c(batch, 4, (1, 5, 6)).rows.block_ids[0][2].tolist() == [1, 5, 6]  # type: ignore[union-attr]
    with pytest.raises(
        SchedulerOutputError, match="'a' may write block 3 of KV group 0, and requests 'c' hold"
    ):
        with_c(settled(update_states(InputBatch.make_empty(LIMITS), first((1, 3), (2,)))), 8, (5, 3, 6))


def test_a_fork_gets_a_block_of_its_own_by_a_copy() -> None:
    """3 of 4 tokens of a's block are copied; a copy into a block that another row holds is refused."""
    batch = settled(update_states(InputBatch.make_empty(LIMITS), first()))
    assert with_c(batch, 3, (5, 6, 7), block_copies=(((1, 5),),)).block_copies == (((1, 5),),)
    with pytest.raises(SchedulerOutputError, match=r"'[ac]' may write block 1"):
        with_c(batch, 3, (1, 6, 7))
    with pytest.raises(SchedulerOutputError, match="block 1 of KV group 0 is to be copied into"):
        with_c(batch, 4, (1, 6, 7), block_copies=(((2, 1),),))
    with pytest.raises(SchedulerOutputError, match="block 5 of KV group 0 is to be copied into"):
        with_c(batch, 3, (5, 6, 7), block_copies=(((1, 5), (2, 5)),))


def test_a_block_given_away_while_its_request_sat_out_is_found_when_it_comes_back() -> None:
    """A parked request is taken to hold nothing, since one that was preempted does not."""
    batch = settled(update_states(InputBatch.make_empty(LIMITS), first()))
    taken = cached_requests(batch, "b", new_block_ids={"b": ((1,),)})
    batch = settled(update_states(batch, scheduled(cached=taken, counts={"b": 1})))
    back = replace(cached_requests(batch, "b"), req_ids=("b", "a"))
    back = replace(
        back, num_computed_tokens=np.array([4, 3], np.int32), num_output_tokens=np.array([2, 1], np.int32)
    )
    with pytest.raises(SchedulerOutputError, match=r"may write block 1 of KV group 0"):
        update_states(batch, scheduled(cached=back, counts={"b": 1, "a": 1}))


def test_a_block_given_away_while_its_request_waits_in_its_row_is_found_at_once() -> None:
    """The last step of a is unsettled, so a keeps its row when the next one leaves it out: it goes on in block 1."""
    batch = update_states(InputBatch.make_empty(LIMITS), first())
    taken = cached_requests(batch, "b", new_block_ids={"b": ((1,),)})
    taken = replace(taken, num_computed_tokens=batch.columns.num_computed_tokens_bound[[batch.row_of["b"]]])
    with pytest.raises(SchedulerOutputError, match=r"'[ab]' may write block 1 of KV group 0"):
        update_states(batch, scheduled(cached=taken, counts={"b": 1}))
