from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from purestep.pure.blocks import (
    allocate,
    chain_keys,
    find,
    make_pool,
    offer,
    release,
    retain,
    root_key,
    share,
    withdraw,
)
from purestep.pure.errors import OutOfBlocksError
from purestep.pure.records.block_pool import BlockPool
from tests.laws import digest, equal


def key(n: int) -> bytes:
    return n.to_bytes(4, "little")


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model of dicts and lists; every pool that ever was stays as it was."""

    @initialize(num_blocks=st.integers(2, 12))
    def begin(self, num_blocks: int) -> None:
        self.pool: BlockPool = make_pool(num_blocks)
        self.num_blocks = num_blocks
        self.holders: Counter[int] = Counter()
        self.free = list(range(1, num_blocks))  # first in, first out
        self.idle: list[int] = []  # least recently used first
        self.keys: dict[int, int] = {}  # block -> key
        self.next_key = 0
        self.history = [(self.pool, digest(self.pool))]

    def take(self, data: st.DataObject) -> list[int]:
        held = sorted(self.holders)
        return data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []

    @rule(n=st.integers(0, 6))
    def allocates(self, n: int) -> None:
        if n > len(self.free) + len(self.idle):
            with pytest.raises(OutOfBlocksError, match=f"{n} KV blocks asked for"):
                allocate(self.pool, n)
            return
        self.pool, ids = allocate(self.pool, n)
        from_free = min(n, len(self.free))
        expected = self.free[:from_free] + self.idle[: n - from_free]
        for block in self.idle[: n - from_free]:
            del self.keys[block]
        self.free, self.idle = self.free[from_free:], self.idle[n - from_free :]
        assert ids.tolist() == expected
        self.holders.update(expected)

    @rule(data=st.data())
    def releases(self, data: st.DataObject) -> None:
        ids = data.draw(st.permutations(list(self.holders.elements())).map(lambda p: p[: len(p) // 2 + 1]))
        self.pool = release(self.pool, ids)
        self.holders.subtract(ids)
        for block in dict.fromkeys(ids):
            if not self.holders[block]:
                (self.idle if block in self.keys else self.free).append(block)
        self.holders = +self.holders

    @rule(data=st.data())
    def retains(self, data: st.DataObject) -> None:
        ids = self.take(data) + (
            data.draw(st.lists(st.sampled_from(self.idle), unique=True)) if self.idle else []
        )
        self.pool = retain(self.pool, ids)
        self.holders.update(ids)
        self.idle = [block for block in self.idle if block not in ids]

    @rule(data=st.data())
    def shares(self, data: st.DataObject) -> None:
        ids = self.take(data)
        shared = share(self.pool, np.array(ids, np.int32))
        assert equal(shared, retain(self.pool, ids))
        self.pool = shared
        self.holders.update(ids)

    @rule(data=st.data())
    def offers(self, data: st.DataObject) -> None:
        ids = self.take(data)
        names = data.draw(st.lists(st.integers(0, 15), min_size=len(ids), max_size=len(ids), unique=True))
        self.pool = offer(self.pool, [key(n) for n in names], ids)
        for name, block in zip(names, ids, strict=True):
            if name not in self.keys.values() and block not in self.keys:
                self.keys[block] = name

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def withdraws(self, data: st.DataObject) -> None:
        ids = self.take(data)
        self.pool = withdraw(self.pool, ids)
        self.keys = {block: name for block, name in self.keys.items() if block not in ids}

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert pool.num_free == len(self.free)
        assert pool.num_available == len(self.free) + len(self.idle)
        assert Counter({b: int(n) for b, n in enumerate(pool.refcounts.array.tolist()) if n}) == self.holders
        assert {b: int.from_bytes(k, "little") for b, k in pool.key_of.items()} == self.keys
        for block, name in self.keys.items():
            assert find(pool, [key(name)]) == [block]
        self.history.append((pool, digest(pool)))

    def teardown(self) -> None:
        for pool, as_it_was in getattr(self, "history", []):
            assert digest(pool) == as_it_was


def test_a_pool_is_free_held_and_idle_blocks(unchecked_records: None) -> None:
    """Pool law: it hands out the block freed first, then the one idle longest; nothing is lost or given twice."""
    run_state_machine_as_test(PoolMachine)


def test_queues_stay_short_and_in_order_over_a_long_life() -> None:
    """However often blocks come and go, the tapes hold little more than what waits in them."""
    pool = make_pool(40)
    for turn in range(300):
        pool, ids = allocate(pool, 10)
        pool = offer(pool, [key(10 * turn + i) for i in range(10)], ids) if turn % 3 else pool
        hit = find(pool, [key(10 * max(turn - 2, 0))])
        pool = release(retain(pool, hit), [*ids.tolist(), *hit])

    assert len(pool.free) < 200 and len(pool.idle) < 200
    assert pool.num_available == 39


def test_the_null_block_is_never_handed_out() -> None:
    pool, ids = allocate(make_pool(5), 4)

    assert sorted(ids.tolist()) == [1, 2, 3, 4]
    assert pool.num_available == 0


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(OutOfBlocksError, match=f"cache of {num_blocks} KV blocks has none to give"):
        make_pool(num_blocks)


def test_nothing_done_is_the_same_pool() -> None:
    pool, ids = allocate(make_pool(5), 2)

    assert allocate(pool, 0)[0] is pool
    assert retain(pool, []) is pool
    assert release(pool, []) is pool
    assert offer(pool, [], []) is pool
    assert withdraw(pool, ids) is pool


@pytest.mark.parametrize("misuse", [retain, release, lambda pool, ids: offer(pool, [b"k"], ids)])
def test_blocks_that_nobody_holds_are_not_taken_for_held(misuse: object) -> None:
    with pytest.raises(AssertionError):
        misuse(make_pool(5), [1])  # type: ignore[operator]


def test_a_second_block_under_a_key_is_free_when_its_holder_goes() -> None:
    pool, ids = allocate(make_pool(5), 2)
    pool = offer(offer(pool, [b"k"], ids[:1]), [b"k"], ids[1:])
    pool = release(pool, ids)

    assert (pool.num_free, pool.num_idle) == (3, 1)
    assert find(pool, [b"k"]) == ids[:1].tolist()


def test_a_chain_is_found_as_far_as_it_is_whole() -> None:
    pool, ids = allocate(make_pool(6), 3)
    pool = offer(pool, [b"a", b"c"], ids[[0, 2]])

    assert find(pool, [b"a", b"b", b"c"]) == [ids[0]]
    assert find(pool, [b"b"]) == []


def test_a_key_says_everything_before_its_block() -> None:
    """Key law: equal exactly when the root and all tokens up to the block's end are."""
    root, tokens = root_key("v1"), np.arange(11, dtype=np.int32)
    keys = chain_keys(root, tokens, 4)
    changed = tokens.copy()
    changed[0] = 9

    assert len(keys) == len(set(keys)) == 2
    assert keys == chain_keys(root, tokens[:8], 4)
    assert keys[1:] == chain_keys(keys[0], tokens[4:], 4)
    assert not set(keys) & set(chain_keys(root, changed, 4))
    assert not set(keys) & set(chain_keys(root_key("v2"), tokens, 4))
    assert not set(keys) & set(chain_keys(root, tokens, 2))


def test_a_key_is_the_same_in_every_process() -> None:
    keys = chain_keys(root_key((1, 0), "adapter", None), np.arange(8, dtype=np.int32), 4)

    assert keys[-1].hex() == "e8ce10d370c5862bca3ee3587bd639af0a7dc9ea4cf768fd64059aef3c441169"
