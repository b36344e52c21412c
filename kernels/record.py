"""The one way to make a record: frozen attrs classes that are torch pytrees.

attrs' own frozen `__init__` can not be traced by torch.compile (it calls a cached slot wrapper), so `record`
generates one. Traced, its body is plain `object.__setattr__` calls. Run, these would be most of what a host does
between two steps: there a record is filled as an instance of an open class with the same slots, which takes plain
assignments, and is given its own class at last. It lives beside `Kernels`, the lowest record, and is re-exported as
`purestep.pure.record`. Cost: about 0.25 us to build a record of five fields, or to replace one, 0.3 us with fourteen;
17 ns to read a field.
"""

import types
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

import attrs
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.compiler import is_dynamo_compiling

T = TypeVar("T")

SHOWN_ITEMS = 8  # a repr shows the values of arrays up to this size


def static(**kwargs: Any) -> Any:
    """A field that is structure, not data: hashable, compared by value, never a pytree leaf."""
    return attrs.field(metadata={"static": True}, **kwargs)


@overload
@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static))
def record(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static))
def record(*, static: bool = False) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(attrs.field, static))
def record(cls: type[T] | None = None, /, *, static: bool = False) -> Any:
    """Make a frozen, slotted attrs class and register it as a torch pytree.

    Fields are subtrees; those declared by `static()`, and those that are None, are part of the structure.
    `record(static=True)` is for plain values (a batch descriptor, sampling parameters): no leaves; compared and
    hashed by value.

    Raises:
        TypeError: a field with something of attrs that records do not have (validators, factories, kw_only).
    """

    def make(target: type[Any]) -> type[Any]:
        made = attrs.define(
            target,
            frozen=True,
            slots=True,
            weakref_slot=False,  # else no class with the same slots has the same layout
            eq=static,
            unsafe_hash=static,
            init=False,
            repr=static,
        )
        fields = attrs.fields(made)
        _refuse_extras(made, fields)
        filled = types.new_class(
            made.__name__,
            getattr(made, "__orig_bases__", made.__bases__),
            exec_body=lambda body: body.update(__slots__=made.__slots__, __setattr__=object.__setattr__),
        )
        if getattr(
            filled, "__abstractmethods__", None
        ):  # what is abstract in `made` is refused by its `__new__`
            filled.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        made.__init__ = _generated_init(made, filled, fields)
        made._replaced = _generated_replaced(made, filled, fields)
        if not static and "__repr__" not in target.__dict__:
            made.__repr__ = _repr  # type: ignore[assignment]
        _register(made, fields, static)
        return made

    return make if cls is None else make(cls)


def replace(instance: T, /, **changes: Any) -> T:
    """The same record with some fields replaced; unknown names are refused."""
    source: Any = instance
    replaced: T = source._replaced(changes)
    return replaced


def _refuse_extras(cls: type[Any], fields: Any) -> None:
    """What the generated `__init__` would ignore is an error, not a surprise."""
    for field in fields:
        where = f"{cls.__qualname__}.{field.name}"
        if field.validator is not None:
            raise TypeError(f"{where}: a record has no validators; check in __attrs_post_init__")
        if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
            raise TypeError(f"{where}: a record has no default factories; give an immutable default")
        if field.kw_only or not field.init:
            raise TypeError(f"{where}: every field of a record is a plain argument, in order")


def _generated_init(cls: type[Any], filled: type[Any], fields: Any) -> Any:
    """`__init__` as source text: Dynamo traces `object.__setattr__(self, 'x', x)` and nothing cleverer."""
    namespace: dict[str, Any] = {
        "_compiling_": is_dynamo_compiling,
        "_become_": object.__dict__["__class__"].__set__,
        "_filled_": filled,
        "_own_": cls,
    }
    parameters, converted = [], []
    for field in fields:
        name = field.name
        if field.default is not attrs.NOTHING:
            namespace[f"_default_{name}"] = field.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        if field.converter is not None:
            namespace[f"_convert_{name}"] = field.converter
            converted.append(f"    {name} = _convert_{name}({name})")
    names = [field.name for field in fields]
    body = [
        *converted,
        "    if _compiling_() or self.__class__ is not _own_:",  # a subclass may be laid out otherwise
        *(f"        object.__setattr__(self, '{name}', {name})" for name in names),
        "    else:",
        "        _become_(self, _filled_)",
        *(f"        self.{name} = {name}" for name in names),
        "        self.__class__ = _own_",
    ]
    if not names:
        body = []
    if hasattr(cls, "__attrs_post_init__"):
        body.append("    self.__attrs_post_init__()")
    source = f"def __init__(self, {', '.join(parameters)}):\n" + ("\n".join(body) or "    pass") + "\n"
    exec(source, namespace)
    init = namespace["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__module__ = cls.__module__
    # For the checker of the tests. What a converter takes is wider than what its field holds.
    types = {field.name: Any if field.converter else field.type for field in fields}
    init.__annotations__ = types | {"return": None}
    return init


def _generated_replaced(cls: type[Any], filled: type[Any], fields: Any) -> Any:
    """The method behind `replace`, as source text; where a constructor does more than to put down what it is given, or
    is traced, by that."""
    names = [field.name for field in fields]
    namespace: dict[str, Any] = {
        "_compiling_": is_dynamo_compiling,
        "_new_": object.__new__,
        "_filled_": filled,
        "_own_": cls,
    }
    body = [
        f"    return type(self)(**({{{', '.join(f'{name!r}: self.{name}' for name in names)}}} | changes))"
    ]
    is_plain = not hasattr(cls, "__attrs_post_init__") and all(field.converter is None for field in fields)
    if is_plain and not filled.__dictoffset__:  # a class with a dict would take unknown fields
        body = [
            "    if _compiling_() or self.__class__ is not _own_:",
            f"    {body[0]}",
            "    made = _new_(_filled_)",
            *(f"    made.{name} = self.{name}" for name in names),
            "    try:",
            "        for name, value in changes.items():",
            "            setattr(made, name, value)",
            "    except AttributeError:",
            f"    {body[0]}",  # which refuses unknown fields
            "    made.__class__ = _own_",
            "    return made",
        ]
    exec("def _replaced(self, changes):\n" + "\n".join(body) + "\n", namespace)
    replaced = namespace["_replaced"]
    replaced.__qualname__ = f"{cls.__qualname__}._replaced"
    replaced.__module__ = cls.__module__
    return replaced


def _register(cls: type[Any], fields: Any, all_static: bool) -> None:
    leaves = tuple(f.name for f in fields if not (all_static or f.metadata.get("static")))
    structure = tuple(f.name for f in fields if all_static or f.metadata.get("static"))

    def context_of(instance: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        # A field that is None is structure, as in JAX: vmap and grad refuse leaves that are no tensors.
        present = tuple(n for n in leaves if getattr(instance, n) is not None)
        return present, tuple(getattr(instance, n) for n in structure)

    def flatten(instance: Any) -> tuple[list[Any], Any]:
        context = context_of(instance)
        return [getattr(instance, n) for n in context[0]], context

    def flatten_with_keys(instance: Any) -> tuple[list[Any], Any]:
        context = context_of(instance)
        return [(pytree.GetAttrKey(n), getattr(instance, n)) for n in context[0]], context

    def unflatten(children: Any, context: Any) -> Any:
        # Not through __init__: vmap and tree_map put ints and placeholders where tensors were.
        present, values = context
        instance = object.__new__(cls)
        for name in leaves:
            object.__setattr__(instance, name, None)
        for name, value in zip(present, children, strict=True):
            object.__setattr__(instance, name, value)
        for name, value in zip(structure, values, strict=True):
            object.__setattr__(instance, name, value)
        return instance

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def _repr(self: Any) -> str:
    shown = (f"{field.name}={_shown(getattr(self, field.name))}" for field in attrs.fields(type(self)))
    return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: Any) -> str:
    """A field on one line: few items as they are, more as dtype and shape. Reads no device memory."""
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu"
        if on_host and value.numel() <= SHOWN_ITEMS:
            return " ".join(repr(value).split())
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" + (
            "" if on_host else f" on {value.device}"
        )
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.size <= SHOWN_ITEMS else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        shown = [f"{key!r}: {_shown(item)}" for key, item in list(value.items())[:SHOWN_ITEMS]]
        return (
            "{" + ", ".join(shown) + (f", ... {len(value)} items" if len(value) > SHOWN_ITEMS else "") + "}"
        )
    if type(value) in (tuple, list):
        shown = [_shown(item) for item in value[:SHOWN_ITEMS]]
        return (
            "(" + ", ".join(shown) + (f", ... {len(value)} items" if len(value) > SHOWN_ITEMS else "") + ")"
        )
    return repr(value)
