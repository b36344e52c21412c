"""Arrays that records may hold: frozen numpy columns, and `Tape` for ragged lists that only grow.

Columns are frozen by their owner, copied on write and shared when unchanged: the same object comes back, so
`new is old` answers "did it change". A `Tape` is immutable too, though many share one buffer: a view reads
only its own items, and only the view that reaches the buffer's end writes behind them. This is the one file
of `pure/` that may write into arrays. Cost: 0.3 us to append to one tape, 0.2 us a tape in `append_each`,
0.8 us to extend by a few items, 2.5 us for `with_items` of a few items in a column of 1024.
"""

import operator
from array import array as int_array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

# A field of a record that is on the host or on the device as a whole: numpy there, a tensor here.
if TYPE_CHECKING:
    Array = Any
else:
    Array = np.ndarray | torch.Tensor

T = TypeVar("T")

MIN_CAPACITY = 16


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, no longer writeable. Call it on an array that nobody else writes."""
    # By position: half the time of `write=False`, a tenth of that of `array.flags`.
    array.setflags(False)  # type: ignore[call-arg]
    return array


def filled(num_items: int, value: Any, dtype: DTypeLike) -> NDArray[Any]:
    """A frozen column of `num_items` equal items."""
    return frozen(np.full(num_items, value, dtype))


def empty_column(num_items: int, dtype: DTypeLike) -> NDArray[Any]:
    """A frozen column of `num_items` zeros (false, for bool)."""
    return frozen(np.zeros(num_items, dtype))


def start_loc(counts: NDArray[Any]) -> NDArray[np.int32]:
    """Where each of n runs of `counts` items starts when they lie end to end, and where the last ends: int32 [n+1]."""
    result = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=result[1:])
    return frozen(result)


def with_items(column: NDArray[Any], indices: Any, values: Any) -> NDArray[Any]:
    """The column with `values` at `indices`: the same object if they are there already, else a frozen copy.

    `indices` is whatever numpy takes between brackets, and names no item twice. Items are compared by value
    (NaN is always a change).
    """
    if not np.count_nonzero(column[indices] != values):
        return column
    changed = column.copy()
    changed[indices] = values
    return frozen(changed)


def with_copy(column: NDArray[Any], index: int, source: int) -> NDArray[Any]:
    """`with_items` of a single item, which is there at `source` too; in a fourth of its time."""
    item = column.item(source)
    if column.item(index) == item:
        return column
    changed = column.copy()
    changed[index] = item
    return frozen(changed)


def taken(column: NDArray[Any], indices: NDArray[Any], last: Any) -> NDArray[Any]:
    """The items at these indices, but for the last of them, which is this one: frozen."""
    items = column[indices]
    items[-1] = last
    return frozen(items)


def with_entry(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The tuple with one item exchanged."""
    return (*items[:index], item, *items[index + 1 :])


def appended(column: NDArray[Any], value: Any) -> NDArray[Any]:
    """A frozen copy of the column with one item more."""
    longer = np.empty(len(column) + 1, column.dtype)
    longer[:-1] = column
    longer[-1] = value
    return frozen(longer)


class _Store:
    """A growing int32 buffer that tapes share; the tape with `used` items, the newest, may write behind."""

    __slots__ = ("capacity", "readable", "used", "writable")

    def __init__(self, items: "int_array[int] | NDArray[Any]", capacity: int) -> None:
        self.used = len(items)
        self._move(items, capacity)

    def grow(self, needed: int) -> None:
        """Room for `needed` items. Views taken before keep the old memory, which nobody writes any more."""
        self._move(self.readable[: self.used], max(needed, 2 * self.capacity))

    def _move(self, items: "int_array[int] | NDArray[Any]", capacity: int) -> None:
        buffer = np.zeros(capacity, np.int32)
        buffer[: len(items)] = items
        self.capacity = capacity
        self.writable = memoryview(buffer)  # type: ignore[arg-type]  # sets an int faster than numpy does
        self.readable = frozen(buffer.view())


class Tape:
    """An immutable list of int32: the first `len(self)` items of a buffer shared with its past and future.

    `append` and `extend` return a new tape. They write the shared buffer in place if this tape is its newest
    view, else copy what this tape uses; old tapes stay valid for ever. Appending is O(1), amortised. Make one
    with `Tape.of`.
    """

    __slots__ = ("_num_items", "_store")

    _store: _Store
    _num_items: int

    @classmethod
    def of(cls, items: Sequence[int] | NDArray[Any] = ()) -> "Tape":
        """A tape of these items, in a buffer of its own.

        Raises:
            ValueError, TypeError, OverflowError: items that are not one row of int32 values.
        """
        checked = _checked(items)
        return _view(_Store(checked, max(MIN_CAPACITY, len(checked))), len(checked))

    @property
    def array(self) -> NDArray[np.int32]:
        """The items as a read-only numpy view."""
        return self._store.readable[: self._num_items]

    def append(self, item: int) -> "Tape":
        """This tape and one more item.

        Raises:
            ValueError, TypeError: an item that is no int32 value.
        """
        store, end = self._store, self._num_items
        if end != store.used:
            store = _Store(self.array, end + MIN_CAPACITY)
        elif end == store.capacity:
            store.grow(end + 1)
        store.writable[end] = item
        store.used = end + 1
        return _view(store, end + 1)

    def extend(self, items: Sequence[int] | NDArray[Any]) -> "Tape":
        """This tape and more items; the same object when there are none.

        Raises:
            ValueError, TypeError, OverflowError: items that are not one row of int32 values.
        """
        checked = _checked(items)
        if not len(checked):
            return self
        store, end = self._store, self._num_items
        stop = end + len(checked)
        if end != store.used:
            store = _Store(self.array, stop + MIN_CAPACITY)
        elif stop > store.capacity:
            store.grow(stop)
        store.writable[end:stop] = checked  # type: ignore[assignment]
        store.used = stop
        return _view(store, stop)

    def truncate(self, num_items: int) -> "Tape":
        """A view of the first `num_items` items; the same object when that is all. Appending to it copies.

        Raises:
            ValueError: more items asked for than there are, or fewer than none.
        """
        if num_items == self._num_items:
            return self
        if not 0 <= num_items < self._num_items:
            raise ValueError(
                f"truncate({num_items}) of a tape of {self._num_items} items: ask for 0 to {self._num_items}"
            )
        return _view(self._store, num_items)

    def extends(self, other: "Tape") -> bool:
        """Whether this tape continues `other` in the same buffer: then `other`'s items are a prefix. O(1).

        False tells nothing about the items: after a fork equal items lie in two buffers.
        """
        return self._store is other._store and self._num_items >= other._num_items

    def tolist(self) -> list[int]:
        """The items as Python ints."""
        return self._store.writable[: self._num_items].tolist()

    def __len__(self) -> int:
        return self._num_items

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> NDArray[np.int32]: ...

    def __getitem__(self, key: int | slice) -> int | NDArray[np.int32]:
        if isinstance(key, slice):
            return self.array[key]
        position = operator.index(key)
        if position < 0:
            position += self._num_items
        if not 0 <= position < self._num_items:
            raise IndexError(f"item {key} of a tape of {self._num_items} items")
        return self._store.writable[position]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tape):
            return NotImplemented
        if self._num_items != other._num_items:
            return False
        return self._store is other._store or bool((self.array == other.array).all())

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Tape.of, (self.array,)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:8])) + (", ..." if len(self) > 8 else "")
        return f"Tape([{shown}], {len(self)} items)"


def append_each(
    tapes: tuple[Tape, ...], indices: Sequence[int] | NDArray[Any], values: Sequence[int] | NDArray[Any]
) -> tuple[Tape, ...]:
    """The tapes, those at `indices` with one more item each; the same object when there are no indices.

    The loop is `Tape.append` written out: a step calls it for every row.

    Raises:
        ValueError: not as many values as indices, or a value that is no int32.
    """
    indices = indices.tolist() if isinstance(indices, np.ndarray) else indices
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not len(indices) and not len(values):
        return tapes
    new, result = _new, list(tapes)
    for index, value in zip(indices, values, strict=True):
        tape = result[index]
        store, end = tape._store, tape._num_items
        if end == store.used and end < store.capacity:
            store.writable[end] = value
            result[index] = longer = new(Tape)
            longer._store = store
            longer._num_items = store.used = end + 1
        else:
            result[index] = tape.append(value)
    return tuple(result)


_new = object.__new__  # a slotted class without __init__ is made and set faster than one with it


def _view(store: _Store, num_items: int) -> Tape:
    tape = _new(Tape)
    tape._store = store
    tape._num_items = num_items
    return tape


def _checked(items: Sequence[int] | NDArray[Any]) -> "int_array[int] | NDArray[Any]":
    """The items as an array of int32."""
    if not isinstance(items, np.ndarray):
        return int_array("i", items)  # refuses what is no int32 by itself, and is fast on a few items
    if items.ndim != 1 or items.dtype.kind not in "iu":
        raise ValueError(f"a tape takes one row of ints, not {items.dtype} of shape {items.shape}")
    if items.dtype == np.int32:
        return items
    low, high = int(items.min(initial=0)), int(items.max(initial=0))
    if low < -(2**31) or high >= 2**31:
        raise ValueError(f"a tape holds int32 values; these go from {low} to {high}")
    return items.astype(np.int32)
