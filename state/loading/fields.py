"""Values out of a model's files, which may hold anything: each is asked for by its kind, or refused by name."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

import attrs

from purestep.pure.errors import ModelLoadError, short

T = TypeVar("T")
D = TypeVar("D")

MOST = 2**31 - 1  # token ids, positions and sizes are int32 on the device
MOST_LAYERS = 10_000  # far above any model; what is made for every layer stays small
_NEEDED: Any = object()


@attrs.frozen
class Kind(Generic[T]):
    """A kind of value: what messages call it, and `parse`, which gives None for what is of another kind."""

    wanted: str
    parse: Callable[[Any], T | None]


@attrs.frozen
class Fields:
    """What a file says, key by key. `place` stands before a key in messages: the file, and where in it."""

    values: Mapping[str, Any]
    place: str

    @overload
    def get(self, key: str, kind: Kind[T]) -> T: ...

    @overload
    def get(self, key: str, kind: Kind[T], default: D) -> T | D: ...

    def get(self, key: str, kind: Kind[T], default: Any = _NEEDED) -> Any:
        """The value of `key`, or `default` if it is absent or null.

        Raises:
            ModelLoadError: absent without a default, or of another kind.
        """
        found = self.values.get(key)
        if found is None:
            if default is _NEEDED:
                raise ModelLoadError(
                    f"{self.place}{key} is missing: {kind.wanted} is needed; add it, or fetch the model again"
                )
            return default
        value = kind.parse(found)
        if value is None:
            raise self.refusal(key, f"{kind.wanted} is needed; correct it, or fetch the model again")
        return value

    def section(self, key: str) -> "Fields":
        """The fields of the object under `key`, none if it is absent.

        Raises:
            ModelLoadError: something else than an object.
        """
        kind = Kind("an object", lambda value: value if isinstance(value, Mapping) else None)
        return Fields(self.get(key, kind, {}), f"{self.place}{key}.")

    def refusal(self, key: str, reason: str) -> ModelLoadError:
        """The error that names a value and what is wrong with it."""
        return ModelLoadError(f"{self.place}{key} = {short(self.values.get(key))} is not supported: {reason}")


def integer(*, least: int = 1, most: int = MOST) -> Kind[int]:
    """A whole number in [least, most]."""
    return Kind(
        f"a whole number from {least} to {most}",
        lambda value: value if type(value) is int and least <= value <= most else None,
    )


def real(*, above: float = -math.inf) -> Kind[float]:
    """A finite number, whole ones included."""
    return Kind(
        "a number" if above == -math.inf else f"a number above {above:g}",
        lambda value: float(value) if type(value) in (int, float) and above < value < math.inf else None,
    )


def _all_of(kind: type[T], value: Any) -> tuple[T, ...] | None:
    return tuple(value) if isinstance(value, list | tuple) and set(map(type, value)) <= {kind} else None


def _integers(value: Any) -> tuple[int, ...] | None:
    found = _all_of(int, [value] if type(value) is int else value)
    return found if found is not None and all(0 <= i <= MOST for i in found) else None


def _names(value: Any) -> dict[str, str] | None:
    return dict(value) if isinstance(value, Mapping) and _all_of(str, [*value.values()]) is not None else None


FLAG = Kind("true or false", lambda value: value if isinstance(value, bool) else None)
TEXT = Kind("a text", lambda value: value if isinstance(value, str) else None)
TEXTS = Kind[tuple[str, ...]]("a list of texts", lambda value: _all_of(str, value))
INTEGERS = Kind(f"a whole number from 0 to {MOST}, or a list of them,", _integers)
NAMES = Kind("an object of texts", _names)
