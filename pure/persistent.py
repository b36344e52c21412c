"""Persistent containers: a version shares with the one before it all that did not change.

`Map` is a hash map in shards: an edit copies the shards that it touches and no more, about a microsecond each
with a hundred items in them. `Column` is the same for numbers by index. `Heap` is a weight-biased leftist heap: `push`
and `pop` touch a logarithmic number of nodes, 5 us among a hundred thousand. Source: Okasaki, Purely Functional Data
Structures (1998), section 3.1 and exercise 3.4.
"""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from purestep.pure.arrays import filled, frozen, with_items
from purestep.pure.record import record

K = TypeVar("K")
V = TypeVar("V")

PAGE = 4096  # items of a Column that are copied together


@record
class Map(Generic[K, V]):
    """Keys to values. The number of shards is a power of two and never changes: take the root of the size to come."""

    shards: tuple[dict[K, V], ...]
    num_items: int

    @staticmethod
    def make_empty(num_shards: int) -> "Map[Any, Any]":
        """Nothing, in at least so many shards."""
        return Map(({},) * (1 << max(num_shards - 1, 0).bit_length()), 0)

    def get(self, key: K) -> V | None:
        """The key's value, or None."""
        return self.shards[hash(key) & (len(self.shards) - 1)].get(key)

    def __contains__(self, key: K) -> bool:
        return key in self.shards[hash(key) & (len(self.shards) - 1)]

    def __len__(self) -> int:
        return self.num_items

    def items(self) -> Iterator[tuple[K, V]]:
        """Keys and values in no order that means anything."""
        for shard in self.shards:
            yield from shard.items()

    def with_item(self, key: K, value: V) -> "Map[K, V]":
        """`with_items` of a single one, in two thirds of its time."""
        shards = list(self.shards)
        index = hash(key) & (len(shards) - 1)
        old = shards[index]
        shards[index] = shard = {**old, key: value}
        return Map(tuple(shards), self.num_items + len(shard) - len(old))

    def with_items(self, items: Iterable[tuple[K, V]]) -> "Map[K, V]":
        """This map with these values at these keys; the same object if there are none."""
        touched: dict[int, dict[K, V]] = {}
        for key, value in items:
            index = hash(key) & (len(self.shards) - 1)
            if index not in touched:
                touched[index] = dict(self.shards[index])
            touched[index][key] = value
        return self._with_shards(touched)

    def without(self, keys: Iterable[K]) -> "Map[K, V]":
        """This map without these keys; the same object if it has none of them."""
        touched: dict[int, dict[K, V]] = {}
        for key in keys:
            if key in self:
                index = hash(key) & (len(self.shards) - 1)
                if index not in touched:
                    touched[index] = dict(self.shards[index])
                touched[index].pop(key, None)
        return self._with_shards(touched)

    def _with_shards(self, touched: dict[int, dict[K, V]]) -> "Map[K, V]":
        if not touched:
            return self
        shards, num_items = list(self.shards), self.num_items
        for index, shard in touched.items():
            num_items = num_items + len(shard) - len(shards[index])
            shards[index] = shard
        return Map(tuple(shards), num_items)


@record
class Column:
    """Whole numbers by index, in pages; an edit copies the pages that it touches, 16 kB each."""

    pages: tuple[NDArray[np.int32], ...]

    @staticmethod
    def make(num_items: int, value: int) -> "Column":
        """So many equal items."""
        starts = range(0, num_items, PAGE)
        return Column(tuple([filled(min(PAGE, num_items - start), value, np.int32) for start in starts]))

    def __len__(self) -> int:
        return PAGE * (len(self.pages) - 1) + len(self.pages[-1])

    def __getitem__(self, indices: NDArray[Any]) -> NDArray[np.int32]:
        """The items at these indices."""
        items = np.empty(len(indices), np.int32)
        for page, where, offsets in _by_page(indices):
            items[where] = self.pages[page][offsets]
        return items

    def with_items(self, indices: NDArray[Any], values: NDArray[Any]) -> "Column":
        """This column with these values at these indices, which name no item twice."""
        if not len(indices):
            return self
        pages = list(self.pages)
        for page, where, offsets in _by_page(indices):
            pages[page] = with_items(pages[page], offsets, values[where])
        return Column(tuple(pages))

    def plus(self, indices: NDArray[Any], amount: int) -> "Column":
        """This column with so much added at these indices, once for each mention."""
        if not len(indices):
            return self
        pages, more = list(self.pages), np.int32(amount)
        for page, _, offsets in _by_page(indices):
            changed = pages[page].copy()
            np.add.at(changed, offsets, more)
            pages[page] = frozen(changed)
        return Column(tuple(pages))

    @property
    def array(self) -> NDArray[np.int32]:
        """All items in one piece; a copy."""
        return np.concatenate(self.pages)


def _by_page(indices: NDArray[Any]) -> Iterator[tuple[int, Any, NDArray[np.intp]]]:
    """Pages named by indices; which of the indices name each, and where in it."""
    if not len(indices):
        return
    first = indices.item(indices.argmin()) // PAGE  # in half the time of `min`
    last = indices.item(indices.argmax()) // PAGE
    places = indices.astype(np.intp, copy=False)  # with other types numpy takes four times as long
    if first == last:
        yield first, slice(None), places - first * PAGE if first else places
        return
    pages, offsets = places // PAGE, places % PAGE
    for page in range(first, last + 1):
        where = np.flatnonzero(pages == page)
        if len(where):
            yield page, where, offsets[where]


# The smallest item, two heaps of larger ones, and the number of all items. The left one is the larger one, so the way
# down to the right is at most logarithmic. Plain tuples: a push makes a dozen of them.
Heap = tuple[Any, "Heap | None", "Heap | None", int]


def heap_of(items: Iterable[Any]) -> "Heap | None":
    """A heap of these items, made in linear time; None is the empty heap. Items are compared by `<`."""
    heaps: list[Heap] = [(item, None, None, 1) for item in items]
    while len(heaps) > 1:
        pairs = zip_longest(heaps[::2], heaps[1::2])
        heaps = [a if b is None else _merge(a, b) for a, b in pairs]
    return heaps[0] if heaps else None


def num_in(heap: "Heap | None") -> int:
    """How many items it has."""
    return 0 if heap is None else heap[3]


def push(heap: "Heap | None", item: Any) -> Heap:
    """The heap with one more item."""
    return _merge(heap, (item, None, None, 1))


def pop(heap: Heap) -> "tuple[Any, Heap | None]":
    """The smallest item, and the heap without it."""
    item, left, right, _ = heap
    return item, None if left is None else _merge(right, left)


def _merge(a: "Heap | None", b: Heap) -> Heap:
    if a is None:
        return b
    if b[0] < a[0]:
        a, b = b, a
    item, left, right, _ = a
    right = _merge(right, b)
    if left is None:
        return item, right, None, right[3] + 1
    if left[3] < right[3]:
        left, right = right, left
    return item, left, right, left[3] + right[3] + 1
