"""The assertions that other tests rely on can fail."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from purestep.pure.arrays import Tape
from purestep.pure.persistent import Map
from purestep.pure.records.inputs import BatchDescriptor, ModelInputs
from purestep.pure.records.state import StepState
from tests.laws import assert_prefix_kept, assert_pure, digest, equal, with_canary
from tests.leaves import initial


def inputs() -> ModelInputs:
    return ModelInputs(input_ids=torch.arange(3), positions=torch.arange(3))


def test_equal_values_are_equal() -> None:
    def value() -> Any:
        return {
            "record": inputs(),
            "static": BatchDescriptor(num_tokens=3),
            "array": (np.arange(3, dtype=np.int32), [torch.tensor([math.nan, -0.0])]),
            "tape": Tape.of([1, 2]),
            "plain": (None, True, 1, 1.5, "a", b"b", {1, 2}, torch.float32),
        }

    assert equal(value(), value())
    assert equal(Tape.of([1, 2, 3]).truncate(2), Tape.of([1]).append(2))
    assert equal({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor([1], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)),
        (np.zeros(3, np.int32), np.zeros(3, np.int64)),
        (np.zeros(2), np.zeros(3)),
        (Tape.of([1]), Tape.of([2])),
        (Tape.of([1]), Tape.of([1]).array),
        ((1, 2), [1, 2]),
        ((1, (2,)), (1, 2)),
        (1, True),
        (0.0, -0.0),
        ({"a": 1}, {"b": 1}),
        (Map.make_empty(4).with_item("a", 1), Map.make_empty(4).with_item("a", 2)),
        (Map.make_empty(4), Map.make_empty(8)),
        (BatchDescriptor(num_tokens=3), BatchDescriptor(num_tokens=4)),
        (inputs(), ModelInputs(input_ids=None, positions=torch.arange(3))),
    ],
)
def test_different_values_are_not_equal(a: Any, b: Any) -> None:
    assert not equal(a, b)


def test_a_map_is_what_it_holds_however_it_came_about() -> None:
    made, items = Map.make_empty(4), [(i, str(i)) for i in range(9)]
    assert equal(made.with_items(items), made.with_items(items[::-1]))


def test_what_can_not_be_looked_into_is_refused() -> None:
    with pytest.raises(TypeError, match="generator"):
        digest(item for item in ())


def test_assert_pure_gives_the_result() -> None:
    assert assert_pure(lambda x, *, y: x + y, 1, y=2) == 3


def test_a_stage_that_writes_its_input_is_found() -> None:
    def writes(record: ModelInputs) -> torch.Tensor:
        return record.positions.add_(1)

    with pytest.raises(AssertionError, match=r"writes changed its arguments"):
        assert_pure(writes, inputs())
    with pytest.raises(AssertionError, match="changed its arguments"):
        assert_pure(lambda items: items.sort(), [2, 1])
    with pytest.raises(AssertionError, match="changed its arguments"):
        assert_pure(lambda *, column: column.fill(1), column=np.zeros(2))


def test_a_stage_that_remembers_is_found() -> None:
    calls: list[int] = []
    buffer = torch.zeros(2)

    def counts() -> int:
        calls.append(1)
        return len(calls)

    def reuses(x: int) -> torch.Tensor:
        return buffer.add_(x)

    with pytest.raises(AssertionError, match="gave another result"):
        assert_pure(counts)
    with pytest.raises(AssertionError, match="changed its first result"):
        assert_pure(reuses, 1)


def in_block(block: int, contents: dict[int, float]) -> StepState:
    """A state whose row 0 has computed one token, in this block of each KV group; what blocks hold."""
    state = with_canary(initial(), 0.0)
    for kv in state.kv:
        for held, value in contents.items():
            kv[held] = value
    for table in state.block_tables:
        table[0, 0] = block
    state.ledger.num_computed_tokens[0] = 1
    state.room[0] = 1
    return state


def test_the_prefix_law_goes_where_the_block_was_copied() -> None:
    before = in_block(1, {1: 5.0})
    assert_prefix_kept(before, before, [0])
    assert_prefix_kept(before, in_block(2, {1: 7.0, 2: 5.0}), [0])
    for changed in (in_block(1, {1: 7.0}), in_block(2, {1: 5.0}), in_block(2, {1: 5.0, 2: 7.0})):
        with pytest.raises(AssertionError, match="KV of row 0 changed below its length"):
            assert_prefix_kept(before, changed, [0])
