"""Shape and type checks of records, in tests only.

`record` leaves annotations on the `__init__` that it generates. Here they are read by jaxtyping and beartype:
dtypes, and dimensions across the fields of one record. The library knows nothing of this: constructors, and the
methods behind `replace` that do without, are swapped on the classes that exist, and swapped back. So nobody
else pays, and torch.compile, which can not trace the checker, is given the plain ones.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch.utils._pytree as pytree
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

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
        init = jaxtyped(typechecker=_typechecker)(cls.__init__)
        _checked[cls] = {"__init__": init, "_replaced": _rebuilt}
    _put(cls, _checked[cls])


def _rebuilt(instance: Any, changes: dict[str, Any]) -> Any:
    """`replace` by way of the constructor."""
    fields = {name: getattr(instance, name) for name in instance.__match_args__}
    return type(instance)(**(fields | changes))


def _restore() -> None:
    for cls, methods in _plain.items():
        _put(cls, methods)


def _put(cls: type[Any], methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        setattr(cls, name, method)
