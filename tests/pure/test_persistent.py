import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure import persistent
from purestep.pure.persistent import Column, Heap, Map, heap_of, num_in, pop, push

KEYS = st.integers(0, 20)


@given(st.lists(st.tuples(st.booleans(), st.lists(KEYS, max_size=5))), st.sampled_from([1, 2, 8, 64]))
def test_a_map_is_a_dict_and_every_version_stays_good(
    edits: list[tuple[bool, list[int]]], num_shards: int
) -> None:
    """Map law: after any edits, each version ever made has what a dict had at that time."""
    versions: list[tuple[Map[int, str], dict[int, str]]] = [(Map.make_empty(num_shards), {})]
    for step, (removes, keys) in enumerate(edits):
        old, model = versions[-1]
        items = dict.fromkeys(keys, f"{step}")
        if removes:
            versions.append((old.without(keys), {k: v for k, v in model.items() if k not in items}))
        else:
            versions.append((old.with_items(items.items()), model | items))
            versions += [(old.with_item(key, "one"), model | {key: "one"}) for key in keys[:1]]

    for version, model in versions:
        assert dict(version.items()) == model
        assert len(version) == len(model)
        assert all(
            version.get(key) == model.get(key) and (key in version) == (key in model) for key in range(21)
        )


def test_a_map_without_edits_is_the_same_object() -> None:
    some = Map[int, int].make_empty(4).with_items([(1, 1)])

    assert some.with_items([]) is some
    assert some.without([2]) is some


def test_an_edit_copies_one_shard() -> None:
    some = Map[int, int].make_empty(4).with_items((i, i) for i in range(100))

    for edited in (some.with_items([(1, 0)]), some.with_item(1, 0)):
        assert sum(a is not b for a, b in zip(some.shards, edited.shards, strict=True)) == 1


@given(st.lists(st.integers()), st.lists(st.one_of(st.none(), st.integers())))
def test_a_heap_gives_the_smallest_first_and_every_version_stays_good(
    first: list[int], pushes: list[int | None]
) -> None:
    """Heap law: each version pops its items in order, whatever was pushed to or popped from it later."""
    versions: list[tuple[Heap | None, list[int]]] = [(heap_of(first), sorted(first))]
    for item in pushes:
        heap, model = versions[-1]
        if item is not None:
            versions.append((push(heap, item), sorted([*model, item])))
        elif heap is not None:
            smallest, rest = pop(heap)
            assert smallest == model[0]
            versions.append((rest, model[1:]))

    for heap, model in versions:
        popped = []
        while heap is not None:
            assert num_in(heap) == len(model) - len(popped)
            smallest, heap = pop(heap)
            popped.append(smallest)
        assert popped == model
        assert num_in(heap) == 0


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_heap_of_many_is_not_deep_to_the_right(order: int, at_once: bool) -> None:
    items = range(20_000)[::order]
    heap = heap_of(items) if at_once else None
    for item in () if at_once else items:
        heap = push(heap, item)

    depth = 0
    while heap is not None:
        depth, heap = depth + 1, heap[2]
    assert depth <= 15


EDITS = st.lists(st.dictionaries(st.integers(0, 99), st.integers(-5, 5), max_size=9))


@given(EDITS, st.sampled_from([1, 7, 64, 4096]))
def test_a_column_is_an_array_and_every_version_stays_good(edits: list[dict[int, int]], page: int) -> None:
    """Column law: the same as an array that is copied before each edit, whatever the size of a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent, "PAGE", page)
        versions = [(Column.make(100, 3), np.full(100, 3))]
        for edit in edits:
            column, model = versions[-1]
            indices, values = np.array(list(edit), np.int64), np.array(list(edit.values()), np.int64)
            changed = model.copy()
            changed[indices] = values
            versions.append((column.with_items(indices, values), changed))

        for column, model in versions:
            assert len(column) == 100
            assert np.array_equal(column.array, model)
            some = np.array([99, 0, 50, 50])
            assert np.array_equal(column[some], model[some])


@given(st.lists(st.tuples(st.lists(st.integers(0, 99)), st.integers(-2, 2))), st.sampled_from([1, 7, 4096]))
def test_numbers_added_to_a_column_are_added_once_for_each_mention(
    edits: list[tuple[list[int], int]], page: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent, "PAGE", page)
        column, model = Column.make(100, 0), [0] * 100
        for indices, amount in edits:
            before = column
            column = column.plus(np.array(indices, np.int64), amount)
            assert before.array.tolist() == model
            for index in indices:
                model[index] += amount
            assert column.array.tolist() == model
            assert (column is before) == (not indices)


def test_an_edit_copies_one_page() -> None:
    column = Column.make(3 * persistent.PAGE + 1, 0)
    edited = column.with_items(np.array([persistent.PAGE]), np.array([1]))

    assert len(column) == 3 * persistent.PAGE + 1
    assert [a is b for a, b in zip(column.pages, edited.pages, strict=True)] == [True, False, True, True]
    assert column.with_items(np.array([], np.int64), np.array([], np.int64)) is column
