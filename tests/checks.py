"""Shape and type checks of records, in tests only.

`record` leaves annotations on the `__init__` that it generates. Here they are read by jaxtyping and beartype:
dtypes, and dimensions across the fields of one record. The library knows nothing of this: constructors, and the
methods behind `replace` that do without, are swapped on the classes that exist, and swapped back. So nobody
else pays, and torch.compile, which can not trace the checker, is given the plain ones.

A check costs more than most steps of the tests' models, and its outcome depends on types, dtypes and shapes alone. So
arguments of kinds that have passed it once are not checked again.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch.utils._pytree as pytree
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped
from torch import Tensor

MOST_KINDS = 20_000  # that are kept of one record
MOST_PLACES = 8  # of a tuple whose items may each have an annotation of their own

_plain: dict[type[Any], dict[str, Any]] = {}
_checked: dict[type[Any], dict[str, Any]] = {}
_typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float


def records() -> list[type[Any]]:
    """Every record class of purestep that has been defined so far."""
    return [c for c in pytree.SUPPORTED_NODES if attrs.has(c) and c.__module__.startswith("purestep.")]


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Records are checked as they are built, until the block ends."""
    for cls in records():
        check(cls)
    try:
        yield
    finally:
        _restore()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Records are built without checks, also inside `checked`."""
    were_checked = [cls for cls in _plain if cls.__init__ is _checked[cls]["__init__"]]
    _restore()
    try:
        yield
    finally:
        for cls in were_checked:
            check(cls)


def check(cls: type[Any]) -> None:
    """Check one record class from now on."""
    if cls not in _plain:
        _plain[cls] = {name: cls.__dict__[name] for name in ("__init__", "_replaced")}
        init = _checked_once(cls.__init__)
        _checked[cls] = {"__init__": init, "_replaced": _rebuilt}
    _put(cls, _checked[cls])


def _rebuilt(instance: Any, changes: dict[str, Any]) -> Any:
    """`replace` by way of the constructor."""
    fields = {name: getattr(instance, name) for name in instance.__match_args__}
    return type(instance)(**(fields | changes))


def _checked_once(plain: Callable[..., None]) -> Callable[..., None]:
    """The constructor, with a check of arguments of every kind when it comes for the first time."""
    passed = set[Hashable]()

    @functools.cache
    def whole() -> Callable[..., None]:  # made when it is wanted: most records are not in most processes
        checked: Callable[..., None] = jaxtyped(typechecker=_typechecker)(plain)
        return checked

    @functools.wraps(plain)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            kind = (*map(kind_of, arguments), *named, *map(kind_of, named.values()))
            is_known = kind in passed
        except TypeError:  # a shape that is being traced can not be hashed
            return whole()(self, *arguments, **named)
        if is_known:
            return plain(self, *arguments, **named)
        whole()(self, *arguments, **named)
        if len(passed) == MOST_KINDS:
            passed.clear()
        passed.add(kind)

    return init


def kind_of(value: Any) -> Hashable:
    """What an annotation can tell of a value: types, dtypes, shapes, and text, which may be one of a few words.

    Of mappings the first item counts, as for beartype.
    """
    kind = type(value)
    if isinstance(value, Tensor | np.ndarray):
        return kind, value.dtype, tuple(value.shape)
    if isinstance(value, str):
        return value
    if isinstance(value, tuple | list):
        if len(value) <= MOST_PLACES:
            return (kind, *map(kind_of, value))
        return kind, frozenset(map(kind_of, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(type, value))
    if isinstance(value, Mapping):
        return kind, *map(kind_of, next(iter(value.items()), ()))
    return kind


def _restore() -> None:
    for cls, methods in _plain.items():
        _put(cls, methods)


def _put(cls: type[Any], methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        setattr(cls, name, method)
