"""Reading a GGUF file: its metadata, and where its tensors lie.

The `gguf` package's reader makes a numpy view of every string of the vocabulary, which takes seconds; this
one takes a tenth of one. Dequantisation is the package's. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.fields import Fields, integer

T = TypeVar("T")

SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")  # struct codes by value type
STRING, ARRAY = 8, 9
MOST_DIMS = 4  # of a tensor, says the format
MAGIC = b"GGUF"


@attrs.frozen
class GGUFTensor:
    """Where a tensor lies. `shape` is in torch's order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int  # bytes from the beginning of the file
    num_bytes: int


@attrs.frozen
class GGUFFile:
    """An open GGUF file: metadata by key, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def read(self, name: str) -> Tensor:
        """The tensor, dequantised to float32.

        Raises:
            ModelLoadError: a type that can not be dequantised.
        """
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        tensor = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.start)
        kind = GGMLQuantizationType(tensor.type)
        try:
            with np.errstate(all="ignore"):  # numbers out of range are what the file says
                values = quants.dequantize(raw.reshape(*tensor.shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is stored as {kind.name}, which can not be dequantised; "
                "take another quantisation of the model"
            ) from error
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def open_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's metadata and tensor list; the tensors' bytes are mapped, not read.

    Raises:
        ModelLoadError: the file is no GGUF file, ends before its metadata or one of its tensors does, or says
            something twice.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24 or file.read(4) != MAGIC:
            raise ModelLoadError(f"{path}: not a GGUF file: it does not begin with the four bytes 'GGUF'")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data, 4)
    try:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = _by_name(
            path, ((cursor.string(), cursor.value(cursor.scalar("I"))) for _ in range(num_keys))
        )
        infos = _by_name(path, (_tensor_info(cursor) for _ in range(num_tensors)))
    except (
        struct.error,
        UnicodeDecodeError,
        IndexError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise ModelLoadError(
            f"{path}: truncated or damaged: metadata breaks off at byte {cursor.at} of {len(data)}; fetch it again"
        ) from error
    alignment = Fields(metadata, f"{path}: metadata ").get("general.alignment", integer(), 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _located(path, name, *info, start, len(data)) for name, info in infos.items()}
    return GGUFFile(path=path, metadata=metadata, tensors=tensors, data=data)


class _Cursor:
    """A place in the file, moving forward."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        # A float32 as the decimal that was meant: 1e-5, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) < length:
            raise IndexError
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind] or "")
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in (STRING, ARRAY):
            return [self.value(kind) for _ in range(length)]
        code = SCALARS[kind] or ""
        values = struct.unpack_from(f"<{length}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{length}{code}")
        return list(values)


def _by_name(path: Path, pairs: Iterator[tuple[str, T]]) -> dict[str, T]:
    """The pairs, each name once: where zeros are read as names, the first two are the same already."""
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise ModelLoadError(f"{path}: damaged: {name!r} is in it twice; fetch it again")
        found[name] = value
    return found


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    """Name; shape, type, and offset in the data part."""
    name, num_dims = cursor.string(), cursor.scalar("I")
    if num_dims > MOST_DIMS:
        raise IndexError
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))
    return name, (shape[::-1], cursor.scalar("I"), cursor.scalar("Q"))


def _located(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, size: int
) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError as error:
        raise ModelLoadError(f"{path}: tensor {name} has the unknown type {kind}") from error
    num_elements = int(np.prod(shape, dtype=object))
    if not shape or shape[-1] % block or num_elements == 0:
        raise ModelLoadError(f"{path}: tensor {name} of shape {shape} can not be made of blocks of {block}")
    num_bytes = num_elements // block * block_bytes
    if start + offset + num_bytes > size:
        raise ModelLoadError(
            f"{path}: truncated: tensor {name} ends at byte {start + offset + num_bytes}, "
            f"the file at byte {size}; fetch it again"
        )
    return GGUFTensor(name=name, shape=shape, type=kind, start=start + offset, num_bytes=num_bytes)
