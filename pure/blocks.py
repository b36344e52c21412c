"""KV blocks: allocation, reference counts and the prefix cache, as functions from pool to pool.

A block is written only by its sole holder, and a cached block by nobody: who would write one that others hold takes a
fresh block and has the old one copied. A block in the cache outlives its holders: it is idle then, and the least
recently used one is evicted when nothing is free. Block 0 is the null block and is never handed out. A pool that does
not change is the same object.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import Tape, empty_column, frozen
from purestep.pure.errors import OutOfBlocksError
from purestep.pure.persistent import Column, Map
from purestep.pure.record import replace
from purestep.pure.records.block_pool import BlockPool

Ids = NDArray[np.int32]

_NO_IDS = empty_column(0, np.int32)
_SLACK = 64  # entries of a queue that are not worth cleaning up


def make_pool(num_blocks: int) -> BlockPool:
    """A pool of this many blocks, the null block among them, all free.

    Raises: OutOfBlocksError for a pool that could not give a single block.
    """
    if num_blocks < 2:
        raise OutOfBlocksError(
            f"a cache of {num_blocks} KV blocks has none to give, because block 0 is the null block: "
            f"give the cache more memory, at least 2 blocks"
        )
    num_shards = int(num_blocks**0.5)
    return BlockPool(
        refcounts=Column.make(num_blocks, 0),
        free=Tape.of(np.arange(1, num_blocks, dtype=np.int32)),
        free_head=0,
        idle=Tape.of(),
        idle_head=0,
        idle_at=Column.make(num_blocks, -1),
        num_idle=0,
        block_of=Map.make_empty(num_shards),
        key_of=Map.make_empty(num_shards),
    )


def allocate(pool: BlockPool, num_blocks: int) -> tuple[BlockPool, Ids]:
    """Blocks held once each by the caller: free ones first, then the least recently used idle ones, evicted.

    Raises: OutOfBlocksError when fewer are available.
    """
    if num_blocks == 0:
        return pool, _NO_IDS
    if num_blocks > pool.num_available:
        raise OutOfBlocksError(
            f"{num_blocks} KV blocks asked for, {pool.num_available} of {len(pool.refcounts) - 1} available: "
            f"free some first"
        )
    num_free = min(num_blocks, pool.num_free)
    ids = pool.free[pool.free_head : pool.free_head + num_free]
    if num_blocks > num_free:
        pool, evicted = _evict(pool, num_blocks - num_free)
        ids = frozen(np.concatenate([ids, evicted]))
    refcounts = pool.refcounts.with_items(ids, np.ones(num_blocks, np.int32))
    return replace(pool, refcounts=refcounts, free_head=pool.free_head + num_free), ids


def retain(pool: BlockPool, ids: Sequence[int] | Ids) -> BlockPool:
    """The pool with one more holder for each mention of these blocks, which are held or idle."""
    ids = np.asarray(ids, np.int32)
    if not len(ids):
        return pool
    idle = ids[pool.refcounts[ids] == 0]
    pool = share(pool, ids)
    if not len(idle):
        return pool
    idle = np.unique(idle)
    assert (pool.idle_at[idle] >= 0).all(), "a free block was retained"
    return replace(
        pool,
        idle_at=pool.idle_at.with_items(idle, _never(idle)),
        num_idle=pool.num_idle - len(idle),
    )


def share(pool: BlockPool, ids: Ids) -> BlockPool:
    """`retain` of blocks of which the caller knows that somebody holds them."""
    return replace(pool, refcounts=pool.refcounts.plus(ids, 1)) if len(ids) else pool


def release(pool: BlockPool, ids: Sequence[int] | Ids) -> BlockPool:
    """The pool with one holder less for each mention of a block.

    Blocks that lose their last holder become idle if they are cached, else free, in the order of `ids`: those named
    first are the first to be evicted.
    """
    ids = np.asarray(ids, np.int32)
    if not len(ids):
        return pool
    refcounts = pool.refcounts.plus(ids, -1)
    left = refcounts[ids]
    assert left.min() >= 0, "a block was released more often than held"
    gone = list(dict.fromkeys(ids[left == 0].tolist()))
    free = [block for block in gone if block not in pool.key_of]
    pool = _tidy_free(pool)
    pool = replace(pool, refcounts=refcounts, free=pool.free.extend(free))
    return _make_idle(pool, [block for block in gone if block in pool.key_of])


def find(pool: BlockPool, keys: Iterable[bytes]) -> list[int]:
    """The cached blocks of the longest known beginning of a chain of keys."""
    blocks = []
    for key in keys:
        block = pool.block_of.get(key)
        if block is None:
            break
        blocks.append(block)
    return blocks


def offer(pool: BlockPool, keys: Sequence[bytes], ids: Sequence[int] | Ids) -> BlockPool:
    """The pool with these held blocks, full and never written again, in the prefix cache under these keys.

    The first block under a key stays; another one with the same content is free as soon as its holders are gone.
    """
    news: dict[bytes, int] = {}
    key_of: dict[int, bytes] = {}
    for key, block in zip(keys, np.asarray(ids).tolist(), strict=True):
        is_known = key in news or block in key_of or key in pool.block_of or block in pool.key_of
        if not is_known:
            news[key], key_of[block] = block, key
    if not news:
        return pool
    assert pool.refcounts[np.array(list(key_of))].min() > 0, "a free block was offered"
    return replace(
        pool,
        block_of=pool.block_of.with_items(news.items()),
        key_of=pool.key_of.with_items(key_of.items()),
    )


def withdraw(pool: BlockPool, ids: Sequence[int] | Ids) -> BlockPool:
    """The pool with these held blocks no longer in the prefix cache."""
    pairs = [(block, pool.key_of.get(block)) for block in np.asarray(ids).tolist()]
    cached = [(block, key) for block, key in pairs if key is not None]
    if not cached:
        return pool
    assert pool.refcounts[np.array([block for block, _ in cached])].min() > 0, "an idle block was withdrawn"
    return replace(
        pool,
        block_of=pool.block_of.without(key for _, key in cached),
        key_of=pool.key_of.without(block for block, _ in cached),
    )


def forget(pool: BlockPool) -> BlockPool:
    """The pool with an empty prefix cache: idle blocks are free, held ones stay held."""
    entries = pool.idle[pool.idle_head :]
    live = entries[pool.idle_at[entries] == np.arange(pool.idle_head, len(pool.idle))]
    num_blocks, num_shards = len(pool.refcounts), len(pool.block_of.shards)
    return BlockPool(
        refcounts=pool.refcounts,
        free=Tape.of(np.concatenate([pool.free[pool.free_head :], live])),
        free_head=0,
        idle=Tape.of(),
        idle_head=0,
        idle_at=Column.make(num_blocks, -1),
        num_idle=0,
        block_of=Map.make_empty(num_shards),
        key_of=Map.make_empty(num_shards),
    )


def root_key(*parts: Any) -> bytes:
    """The beginning of a chain: whatever makes KV differ beside the tokens. Equal in every process."""
    return hashlib.sha256(repr(parts).encode()).digest()


def chain_keys(parent: bytes, token_ids: NDArray[np.int32], block_size: int) -> tuple[bytes, ...]:
    """The keys of the full blocks of these tokens, each a digest of its parent's key and its own tokens.

    1 us a block.
    """
    data, width, keys = token_ids.astype("<i4").tobytes(), 4 * block_size, []
    for end in range(width, len(data) + 1, width):
        parent = hashlib.sha256(parent + data[end - width : end]).digest()
        keys.append(parent)
    return tuple(keys)


def _evict(pool: BlockPool, num_blocks: int) -> tuple[BlockPool, Ids]:
    """The least recently used idle blocks, their keys forgotten."""
    size = 2 * num_blocks + _SLACK
    while True:
        window = pool.idle[pool.idle_head : pool.idle_head + size]
        places = np.arange(pool.idle_head, pool.idle_head + len(window))
        live = np.flatnonzero(pool.idle_at[window] == places)
        if len(live) >= num_blocks:
            break
        size *= 2
    taken = live[:num_blocks]
    ids = window[taken]
    evicted = ids.tolist()
    pool = replace(
        pool,
        idle_head=pool.idle_head + int(taken[-1]) + 1,
        idle_at=pool.idle_at.with_items(ids, _never(ids)),
        num_idle=pool.num_idle - num_blocks,
        block_of=pool.block_of.without(_keys(pool, evicted)),
        key_of=pool.key_of.without(evicted),
    )
    return pool, ids


def _never(ids: Ids) -> Ids:
    return np.full(len(ids), -1, np.int32)


def _keys(pool: BlockPool, ids: Iterable[int]) -> list[bytes]:
    return [key for key in map(pool.key_of.get, ids) if key is not None]


def _make_idle(pool: BlockPool, ids: list[int]) -> BlockPool:
    if not ids:
        return pool
    pool = _tidy_idle(pool)
    end = len(pool.idle)
    return replace(
        pool,
        idle=pool.idle.extend(ids),
        idle_at=pool.idle_at.with_items(np.array(ids), np.arange(end, end + len(ids))),
        num_idle=pool.num_idle + len(ids),
    )


def _tidy_free(pool: BlockPool) -> BlockPool:
    """Without what lies before the head, once that is most of the tape."""
    if len(pool.free) <= 2 * pool.num_free + _SLACK:
        return pool
    return replace(pool, free=Tape.of(pool.free[pool.free_head :]), free_head=0)


def _tidy_idle(pool: BlockPool) -> BlockPool:
    """Without stale entries, once they are most of the tape."""
    if len(pool.idle) <= 2 * pool.num_idle + _SLACK:
        return pool
    entries = pool.idle.array
    live = entries[pool.idle_at[entries] == np.arange(len(entries))]
    idle_at = pool.idle_at.with_items(live, np.arange(len(live)))
    return replace(pool, idle=Tape.of(live), idle_head=0, idle_at=idle_at)
