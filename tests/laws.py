"""Laws as reusable assertions."""

import enum
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from purestep.pure.arrays import Tape

T = TypeVar("T")


def assert_pure(stage: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The purity law: a call leaves its inputs bit for bit as they were, and a second call gives the same.

    Returns the stage's result.
    """
    before = digest((args, kwargs))
    first = stage(*args, **kwargs)
    assert digest((args, kwargs)) == before, f"{_name(stage)} changed its arguments"
    result = digest(first)
    second = stage(*args, **kwargs)
    assert digest((args, kwargs)) == before, f"{_name(stage)} changed its arguments when called again"
    assert digest(first) == result, f"{_name(stage)} changed its first result when called again"
    assert digest(second) == result, f"{_name(stage)} gave another result when called again"
    return first


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same to the last bit: types, shapes, dtypes, NaN payloads and signs of zero.

    Looks into records, tuples, lists, dicts (order apart), sets, tensors, arrays and tapes.
    """
    return digest(a) == digest(b)


def digest(value: Any) -> bytes:
    """A hash of everything that `equal` compares.

    Raises:
        TypeError: a value whose content can not be seen: teach it here rather than compare it by address.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _parts(value: Any) -> list[bytes]:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".encode()
    if isinstance(value, torch.Tensor):
        return [
            kind,
            repr((value.dtype, tuple(value.shape), str(value.device))).encode(),
            _tensor_bytes(value),
        ]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            return [kind, str(value.shape).encode(), *_parts(value.tolist())]
        return [kind, repr((value.dtype.str, value.shape)).encode(), value.tobytes()]
    if isinstance(value, Tape):
        return [kind, value.array.tobytes()]
    if isinstance(value, tuple | list):
        return [kind, str(len(value)).encode(), *(digest(item) for item in value)]
    if isinstance(value, Mapping):
        pairs = sorted(digest(key) + digest(item) for key, item in value.items())
        return [kind, *pairs]
    if isinstance(value, set | frozenset):
        return [kind, *sorted(digest(item) for item in value)]
    if attrs.has(type(value)):
        return [kind, *(digest(getattr(value, field.name)) for field in attrs.fields(type(value)))]
    if isinstance(value, float):
        return [kind, np.float64(value).tobytes()]  # repr hides the sign and payload of NaN
    if isinstance(value, torch.nn.Module):
        return [kind, digest(dict(value.state_dict(keep_vars=False)))]
    if value is None or isinstance(value, _PLAIN):
        return [kind, repr(value).encode()]
    if callable(value):
        return [kind, repr(value).encode()]  # functions are compared by identity
    raise TypeError(f"digest() does not know how to look into a {type(value).__qualname__}")


_PLAIN = (
    bool,
    int,
    str,
    bytes,
    complex,
    range,
    slice,
    torch.dtype,
    torch.device,
    np.dtype,
    type(...),
    enum.Enum,
)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _name(stage: Callable[..., Any]) -> str:
    return getattr(stage, "__qualname__", repr(stage))
