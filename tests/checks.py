"""Shape and type checks of records, in tests only.

`record` leaves annotations on the `__init__` that it generates. Here they are read by jaxtyping and beartype:
dtypes, and dimensions across the fields of one record. The library knows nothing of this: constructors are
swapped on the classes that exist, and swapped back. So nobody else pays, and torch.compile, which can not
trace the checker, is given the plain ones.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch.utils._pytree as pytree
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

_plain: dict[type[Any], Any] = {}
_checked: dict[type[Any], Any] = {}
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
    were_checked = [cls for cls in _plain if cls.__init__ is _checked[cls]]
    _restore()
    try:
        yield
    finally:
        for cls in were_checked:
            check(cls)


def check(cls: type[Any]) -> None:
    """Check one record class from now on."""
    if cls not in _plain:
        _plain[cls] = cls.__init__
        _checked[cls] = jaxtyped(typechecker=_typechecker)(cls.__init__)
    cls.__init__ = _checked[cls]  # type: ignore[misc]


def _restore() -> None:
    for cls, init in _plain.items():
        cls.__init__ = init
