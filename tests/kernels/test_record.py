"""Records are frozen values that torch looks into."""

import abc
import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purestep.kernels.record import record, replace, static
from purestep.pure.records.inputs import GroupMetadata
from tests import checks
from tests.laws import assert_pure, equal


@record
class Inner:
    weight: Tensor
    bias: Tensor | None = None


@record
class Outer:
    inner: Inner
    pieces: tuple[Tensor, ...]
    size: int = static(default=2)


@record(static=True)
class Shape:
    num_tokens: int
    uniform: bool = False


def outer() -> Outer:
    return Outer(Inner(torch.arange(3.0)), (torch.ones(3), torch.full((3,), 2.0)), size=3)


def grown(value: Outer, amount: Tensor) -> Outer:
    """A stage in small: a nested record in, one out."""
    inner = replace(value.inner, weight=value.inner.weight * amount, bias=amount + value.size)
    return replace(value, inner=inner, pieces=tuple(piece + amount for piece in value.pieces))


def total(value: Outer) -> Tensor:
    return value.inner.weight.sum() + torch.stack(value.pieces).sum()


def test_a_record_can_not_be_changed() -> None:
    replaced = replace(outer(), size=3)
    for value, field in (
        (outer(), "size"),
        (Shape(3), "num_tokens"),
        (outer(), "another"),
        (replaced, "size"),
        (outer(), "__class__"),
    ):
        with pytest.raises((attrs.exceptions.FrozenInstanceError, AttributeError)):
            setattr(value, field, 4)


def test_a_record_is_built_by_place_or_by_name_with_defaults() -> None:
    weight = torch.ones(2)

    assert equal(Inner(weight), Inner(weight=weight, bias=None))
    assert Outer(Inner(weight), ()).size == 2
    for wrong in ({}, {"weight": weight, "height": weight}):
        with pytest.raises(TypeError, match=r"Inner.__init__\(\)"):
            Inner(**wrong)


@pytest.mark.parametrize("is_checked", [True, False])
def test_replace_keeps_what_is_not_named_and_refuses_unknown_names(is_checked: bool) -> None:
    value = outer()

    with checks.checked() if is_checked else checks.unchecked():
        changed = assert_pure(replace, value, size=7)

        assert type(changed) is Outer
        assert changed.size == 7
        assert changed.inner is value.inner
        assert changed.pieces is value.pieces
        with pytest.raises(TypeError, match="siez"):
            replace(value, siez=7)


def test_records_of_data_are_compared_by_identity_and_static_ones_by_value() -> None:
    value = outer()

    assert value == value
    assert value != outer()
    assert Shape(3) == Shape(3, False) != Shape(4)
    assert {Shape(3): "found"}[Shape(3)] == "found"


def test_leaves_are_the_fields_that_are_not_static() -> None:
    leaves, structure = pytree.tree_flatten(outer())

    assert len(leaves) == 3  # weight, two pieces; bias is None, which is structure
    assert structure == pytree.tree_structure(outer())
    assert structure != pytree.tree_structure(replace(outer(), size=4))
    assert equal(outer(), pytree.tree_unflatten(leaves, structure))
    assert pytree.tree_leaves(Shape(3)) == []
    assert pytree.tree_structure(Shape(3)) != pytree.tree_structure(Shape(4))


def test_leaves_are_named_by_their_fields() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(outer())[0]]

    assert paths == [".inner.weight", ".pieces[0]", ".pieces[1]"]


def test_torch_may_put_anything_where_tensors_were() -> None:
    assert pytree.tree_map(lambda leaf: 0, outer()).inner.weight == 0


def test_records_flow_through_vmap_grad_and_make_fx() -> None:
    value, amounts = outer(), torch.tensor([1.0, 2.0, 5.0])
    expected = [grown(value, amount) for amount in amounts]

    batched = torch.vmap(grown, in_dims=(None, 0))(value, amounts)
    traced = make_fx(grown)(value, amounts[2])(value, amounts[2])
    gradient = torch.func.grad(lambda v: total(grown(v, amounts[2])))(value)

    for index, alone in enumerate(expected):
        assert equal(alone, pytree.tree_map(lambda leaf, i=index: leaf[i].clone(), batched))
    assert equal(expected[2], traced)
    assert gradient.inner.weight.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_records_are_built_inside_a_full_graph(backend: str) -> None:
    value, amount = outer(), torch.tensor(2.0)

    compiled = torch.compile(grown, fullgraph=True, backend=backend)

    assert equal(grown(value, amount), compiled(value, amount))


def test_records_are_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, value: Outer, amount: Tensor) -> Outer:
            return grown(value, amount)

    value, amount = outer(), torch.tensor(2.0)

    exported = torch.export.export(Module(), (value, amount), strict=False)

    assert equal(grown(value, amount), exported.module()(value, amount))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
@pytest.mark.parametrize("value", [outer(), Shape(3)])
def test_records_are_copied_and_pickled(value: Any, copied: Callable[[Any], Any]) -> None:
    assert equal(value, copied(value))


def test_converters_and_post_init_are_called() -> None:
    @record(static=True)
    class Sorted:
        items: tuple[int, ...] = attrs.field(converter=lambda items: tuple(sorted(items)))

        def __attrs_post_init__(self) -> None:
            if not self.items:
                raise ValueError("no items")

    assert Sorted([3, 1]).items == (1, 3)  # type: ignore[arg-type]
    assert replace(Sorted((1,)), items=[5, 4]).items == (4, 5)
    with pytest.raises(ValueError, match="no items"):
        Sorted(())
    with pytest.raises(ValueError, match="no items"):
        replace(Sorted((1,)), items=())


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (attrs.field(validator=attrs.validators.instance_of(int)), "has no validators"),
        (attrs.field(factory=list), "has no default factories"),
        (attrs.field(kw_only=True), "a plain argument"),
        (attrs.field(init=False), "a plain argument"),
    ],
)
def test_what_records_do_not_have_is_refused(field: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"Odd.x: .*{reason}"):
        record(type("Odd", (), {"__annotations__": {"x": int}, "x": field}))


def test_a_record_shows_small_arrays_whole_and_large_ones_by_shape() -> None:
    @record
    class Shown:
        few: Any
        many: Any
        column: Any
        parts: Any

    value = Shown(
        torch.tensor([[1, 2], [3, 4]]),
        torch.zeros(3, 5, dtype=torch.bfloat16),
        np.arange(9, dtype=np.int32),
        ({"a": torch.zeros(100)}, np.arange(3), tuple(range(20))),
    )

    assert repr(value) == (
        "Shown(few=tensor([[1, 2], [3, 4]]), many=bfloat16[3, 5], column=int32[9], "
        "parts=({'a': float32[100]}, [0, 1, 2], (0, 1, 2, 3, 4, 5, 6, 7, ... 20 items)))"
    )
    assert repr(replace(value, few=torch.zeros(2, device="meta"))).startswith(
        "Shown(few=float32[2] on meta, "
    )
    assert repr(Shape(3)) == "Shape(num_tokens=3, uniform=False)"


def test_the_signature_is_readable() -> None:
    assert str(inspect.signature(Outer)).startswith("(inner: tests.kernels.test_record.Inner, pieces: tuple[")


def test_shapes_are_checked_across_the_fields_of_a_record_in_tests() -> None:
    table, slots = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)

    GroupMetadata(block_table=table, slot_mapping=slots)
    with pytest.raises(TypeCheckError):
        GroupMetadata(block_table=table, slot_mapping=slots.float())
    with pytest.raises(TypeCheckError):
        GroupMetadata(block_table=table[0], slot_mapping=slots)
    with pytest.raises(TypeCheckError):
        replace(GroupMetadata(block_table=table, slot_mapping=slots), block_table=table[0])
    with checks.unchecked():
        GroupMetadata(block_table=table[0], slot_mapping=slots)
    with pytest.raises(TypeCheckError):
        GroupMetadata(block_table=table[0], slot_mapping=slots)


def test_checks_are_off_where_a_test_asks_for_that(unchecked_records: None) -> None:
    GroupMetadata(block_table=torch.zeros(1), slot_mapping=torch.zeros(1))


class Wide(Shape):
    """A subclass that is no record of its own."""

    @property
    def double(self) -> int:
        return 2 * self.num_tokens


class Slim(Shape):
    __slots__ = ()


@record(static=True)
class Longer(Shape):
    own: int = 4  # named as what constructors are made of might be
    filled: int = 5


class Abstract(abc.ABC):
    @abc.abstractmethod
    def size(self) -> int: ...


@record(static=True)
class Concrete(Abstract):
    num: int

    def size(self) -> int:
        return self.num


@record(static=True)
class Unfinished(Abstract):
    num: int


@pytest.mark.parametrize("kind", [Wide, Slim, Longer, Concrete])
def test_records_may_be_derived(kind: type[Any]) -> None:
    """Plain classes, slotted ones, records of records, behind abstract ones too: each of its own kind, and frozen."""
    made = kind(3)
    changed = replace(made, **{kind.__match_args__[0]: 7})
    assert type(made) is type(changed) is kind and made == kind(3) != changed
    assert replace(changed, **{kind.__match_args__[0]: 3}) == made
    for value in (made, changed):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(value, kind.__match_args__[0], 1)
    with pytest.raises(TypeError, match="unknown"):
        replace(made, unknown=1)


def test_an_abstract_record_can_not_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Unfinished(3)
