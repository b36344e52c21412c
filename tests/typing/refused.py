"""What a type checker must refuse: mypy passes this file only while each marked line has an error of that code."""

import torch
from torch import Tensor

from purestep.pure.arrays import Tape
from purestep.pure.record import record, static
from purestep.pure.records.inputs import BatchDescriptor


@record
class Point:
    x: Tensor
    size: int = static(default=2)


point = Point(torch.ones(2))
point.size = 3  # type: ignore[misc]
Point()  # type: ignore[call-arg]
Point(torch.ones(2), siez=3)  # type: ignore[call-arg]
Point(torch.ones(2), size="3")  # type: ignore[arg-type]
print(point.z)  # type: ignore[attr-defined]
BatchDescriptor(num_tokens="3")  # type: ignore[arg-type]
Tape.of([1]).append("2")  # type: ignore[arg-type]
Tape.of(["a"])  # type: ignore[list-item]
