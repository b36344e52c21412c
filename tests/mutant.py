"""What a failure of the field is brought back with."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import attrs


@attrs.frozen
class Mutant:
    """A patch, and the test that must fail on it."""

    failure: str
    what: str
    test: Callable[[], None]
    module: ModuleType
    names: Mapping[str, Any]  # what is put there instead
    error: type[Exception] = AssertionError  # how the test fails
