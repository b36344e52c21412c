"""What a type checker must accept. Read by mypy and pyright, never run."""

from typing import assert_type

import numpy as np
import torch
from torch import Tensor

from purestep.pure.arrays import Tape, append_each
from purestep.pure.record import record, replace, static
from purestep.pure.records.inputs import BatchDescriptor


@record
class Point:
    x: Tensor
    y: Tensor | None = None
    size: int = static(default=2)


@record(static=True)
class Shape:
    num_tokens: int
    uniform: bool = False


point = Point(torch.ones(2), size=3)
assert_type(point, Point)
assert_type(point.x, Tensor)
assert_type(point.size, int)
assert_type(replace(point, x=point.x + 1), Point)
assert_type(Shape(3) == Shape(4, uniform=True), bool)
assert_type(BatchDescriptor(num_tokens=3).num_reqs, int | None)

tape = Tape.of([1, 2]).append(3).extend(np.arange(3))
assert_type(tape, Tape)
assert_type(tape[0], int)
assert_type(append_each((tape,), [0], [4]), tuple[Tape, ...])
for item in tape:
    assert_type(item, int)
