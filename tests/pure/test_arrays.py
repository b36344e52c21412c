"""Frozen columns and tapes: what was handed out once never changes."""

import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst

from purestep.pure.arrays import (
    Tape,
    append_each,
    appended,
    empty_column,
    filled,
    frozen,
    start_loc,
    with_copy,
    with_entry,
    with_items,
)
from tests.laws import assert_pure, equal
from tests.profiles import examples

int32s = st.integers(-(2**31), 2**31 - 1)
columns = npst.arrays(st.sampled_from([np.int32, np.int64, bool]), st.integers(1, 20))


@given(columns, st.data())
def test_with_items_gives_the_column_with_the_items_set(column: Any, data: st.DataObject) -> None:
    positions = st.integers(0, len(column) - 1)
    indices = np.array(data.draw(st.lists(positions, unique=True)), np.int64)
    values = data.draw(npst.arrays(column.dtype, len(indices)))
    expected = column.tolist()
    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
        expected[index] = value

    result = assert_pure(with_items, frozen(column), indices, values)

    assert expected == result.tolist()
    assert result.dtype == column.dtype
    assert not result.flags.writeable


@given(columns, st.data())
def test_with_items_gives_the_same_object_exactly_when_nothing_changes(
    column: Any, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, len(column) - 1), unique=True))
    values = data.draw(npst.arrays(column.dtype, len(indices)))

    result = with_items(frozen(column), np.array(indices, np.int64), values)

    assert (result is column) == (result.tolist() == column.tolist())


@given(columns, st.data())
def test_a_single_item_is_copied_as_several_are_set(column: Any, data: st.DataObject) -> None:
    index, source = (data.draw(st.integers(0, len(column) - 1)) for _ in range(2))

    result = assert_pure(with_copy, frozen(column), index, source)

    expected = with_items(column, [index], column[[source]])
    assert (result is column) == (expected is column)
    assert equal(expected, result)
    assert not result.flags.writeable


@given(st.lists(st.integers(), min_size=1), st.data())
def test_an_entry_of_a_tuple_is_exchanged(items: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(items) - 1))

    result = assert_pure(with_entry, tuple(items), index, None)

    assert list(result) == [None if place == index else item for place, item in enumerate(items)]


@given(columns, st.data())
def test_an_appended_item_lies_behind_the_others(column: Any, data: st.DataObject) -> None:
    value = data.draw(npst.arrays(column.dtype, 1))[0]

    result = assert_pure(appended, frozen(column), value)

    assert [*column.tolist(), value.item()] == result.tolist()
    assert result.dtype == column.dtype
    assert not result.flags.writeable


def test_with_items_takes_a_mask_and_one_value_for_all() -> None:
    column = frozen(np.array([1, 2, 3], np.int32))

    assert [1, 9, 9] == with_items(column, np.array([False, True, True]), 9).tolist()
    assert with_items(column, slice(1, 2), 2) is column


def test_columns_are_frozen() -> None:
    for column in (frozen(np.arange(3)), filled(3, 7, np.int32), empty_column(3, bool)):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    assert [7, 7, 7] == filled(3, 7, np.int32).tolist()
    assert [False, False] == empty_column(2, bool).tolist()


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_start_loc_sums_up_counts(counts: list[int]) -> None:
    result = assert_pure(start_loc, np.array(counts, np.int32))

    assert [sum(counts[:index]) for index in range(len(counts) + 1)] == result.tolist()
    assert result.dtype == np.int32
    assert not result.flags.writeable


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("of"), st.lists(int32s, max_size=20)),
        st.tuples(st.just("append"), int32s),
        st.tuples(st.just("extend"), st.lists(int32s, max_size=40)),
        st.tuples(st.just("truncate"), st.integers(0, 60)),
        st.tuples(st.just("append_each"), st.lists(st.tuples(st.integers(0, 99), int32s), max_size=6)),
    ).flatmap(lambda op: st.tuples(st.just(op), st.integers(0, 99))),
    max_size=30,
)


def _apply(tapes: list[Tape], models: list[list[int]], kind: str, argument: Any, place: int) -> None:
    """Add to both lists what one operation, on the view at `place`, makes of them."""
    tape, model = tapes[place], models[place]
    if kind == "of":
        tapes.append(Tape.of(argument))
        models.append(list(argument))
    elif kind == "append":
        tapes.append(tape.append(argument))
        models.append([*model, argument])
    elif kind == "extend":
        tapes.append(tape.extend(argument))
        models.append([*model, *argument])
    elif kind == "truncate":
        length = min(argument, len(model))
        tapes.append(tape.truncate(length))
        models.append(model[:length])
    else:
        indices = [index % len(tapes) for index, _ in argument]
        longer = [list(m) for m in models]
        for index, (_, item) in zip(indices, argument, strict=True):
            longer[index].append(item)
        tapes += append_each(tuple(tapes), indices, [item for _, item in argument])
        models += longer


@examples(2)  # sharing goes wrong only in rare interleavings
@given(OPERATIONS)
def test_every_view_stays_right_whatever_is_done_to_the_others(operations: Any) -> None:
    tapes, models = [Tape.of()], [[]]
    arrays = []
    for (kind, argument), place in operations:
        _apply(tapes, models, kind, argument, place % len(tapes))
        del tapes[40:], models[40:]  # append_each doubles their number
        arrays += [(tape.array, list(model)) for tape, model in zip(tapes, models, strict=True)][-3:]

    assert models == [tape.tolist() for tape in tapes]
    assert all(array.tolist() == model for array, model in arrays)


@given(OPERATIONS)
def test_extends_is_true_only_of_prefixes(operations: Any) -> None:
    tapes, models = [Tape.of()], [[]]
    for (kind, argument), place in operations:
        _apply(tapes, models, kind, argument, place % len(tapes))
        del tapes[20:], models[20:]

    for tape, model in zip(tapes, models, strict=True):
        for other, prefix in zip(tapes, models, strict=True):
            assert not tape.extends(other) or model[: len(prefix)] == prefix
            assert (tape == other) == (model == prefix)
            assert tape != other or hash(tape) == hash(other)


@given(st.lists(st.lists(int32s, max_size=40), max_size=8))
def test_extends_holds_along_a_line_of_descent(growths: list[list[int]]) -> None:
    line = [Tape.of()]
    for items in growths:
        line.append(line[-1].extend(items))

    for age, tape in enumerate(line):
        assert all(tape.extends(ancestor) for ancestor in line[: age + 1])
        assert all(len(tape) >= len(later) or not tape.extends(later) for later in line[age + 1 :])


@given(st.lists(int32s, max_size=30), st.data())
def test_items_are_read_as_a_list_is(items: list[int], data: st.DataObject) -> None:
    tape = Tape.of(items)
    key = data.draw(st.slices(len(items)))

    assert len(items) == len(tape)
    assert items == list(tape)
    assert items[key] == tape[key].tolist()
    assert all(items[i] == tape[i] and type(tape[i]) is int for i in range(-len(items), len(items)))
    assert all(type(item) is int for item in tape)


@given(st.lists(int32s, max_size=30))
def test_a_tape_takes_arrays_of_any_integer_type(items: list[int]) -> None:
    expected = Tape.of(items)

    for dtype in (np.int32, np.int64, ">i4", object):
        array = np.array(items, dtype)
        given_items = array.tolist() if dtype is object else array
        assert expected == Tape.of(given_items) == Tape.of().extend(given_items)
    assert expected == Tape.of(np.array(items, np.int32).repeat(2)[::2])  # strided


def test_appending_to_a_truncated_or_forked_tape_copies() -> None:
    whole = Tape.of([1, 2, 3])
    first, second = whole.append(4), whole.append(5)
    cut = whole.truncate(2).append(9)

    assert [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9]] == [
        t.tolist() for t in (whole, first, second, cut)
    ]
    assert first.extends(whole)
    assert not second.extends(whole)
    assert not cut.extends(whole)


def test_nothing_added_and_nothing_cut_give_the_same_object() -> None:
    tape = Tape.of([1, 2])
    tapes = (tape,)

    assert tape.extend([]) is tape
    assert tape.truncate(2) is tape
    assert append_each(tapes, [], []) is tapes
    assert append_each(tapes, np.zeros(0, np.int64), np.zeros(0, np.int32)) is tapes


def test_appending_moves_the_buffer_a_logarithmic_number_of_times() -> None:
    tape, addresses = Tape.of(), set()
    for item in range(10_000):
        tape = tape.append(item)
        addresses.add(tape.array.__array_interface__["data"][0])

    assert list(range(10_000)) == tape.tolist()
    assert len(addresses) <= 12  # 16 items doubled ten times hold 16,384


def test_what_a_tape_hands_out_is_read_only() -> None:
    tape = Tape.of([1, 2, 3])

    for array in (tape.array, tape[0:2]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda tape: pickle.loads(pickle.dumps(tape))])
def test_copies_and_pickles_are_equal(copied: Any) -> None:
    tape = Tape.of(range(100)).truncate(3)

    assert tape == copied(tape)
    assert equal(tape, copied(tape))
    assert len(pickle.dumps(tape)) < len(pickle.dumps(Tape.of(range(100))))


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([2**31], OverflowError),
        ([1.5], TypeError),
        (np.array([1.5]), ValueError),
        (np.array([2**31]), ValueError),
        (np.array([-(2**31) - 1]), ValueError),
        (np.zeros((2, 2), np.int32), ValueError),
    ],
)
def test_what_is_no_row_of_int32_is_refused_and_changes_nothing(items: Any, error: type[Exception]) -> None:
    tape = Tape.of([1])

    with pytest.raises(error):
        tape.extend(items)
    with pytest.raises(error):
        Tape.of(items)
    assert [1, 2] == tape.append(2).tolist()


def test_a_bad_item_leaves_all_tapes_valid() -> None:
    tapes = (Tape.of([1]), Tape.of([2]))

    with pytest.raises(ValueError, match="format"):
        append_each(tapes, [0, 1], [5, 2**31])
    with pytest.raises(ValueError, match="zip"):
        append_each(tapes, [0, 1], [5])
    with pytest.raises(TypeError):
        tapes[0].append(1.5)  # type: ignore[arg-type]

    assert [[1, 6], [2, 7]] == [tape.tolist() for tape in append_each(tapes, [0, 1], [6, 7])]


def test_places_outside_a_tape_are_refused() -> None:
    tape = Tape.of([1, 2]).append(3).truncate(2)

    for index in (2, -3):
        with pytest.raises(IndexError, match="a tape of 2 items"):
            tape[index]
    for length in (3, -1):
        with pytest.raises(ValueError, match="ask for 0 to 2"):
            tape.truncate(length)


def test_a_tape_shows_its_beginning_and_its_length() -> None:
    assert "Tape([], 0 items)" == repr(Tape.of())
    assert "Tape([0, 1, 2, 3, 4, 5, 6, 7, ...], 100 items)" == repr(Tape.of(range(100)))
