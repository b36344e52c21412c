"""The GGUF reader against the gguf package's writer and reader."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.gguf_file import open_gguf
from tests.profiles import examples

VALUES: dict[str, Any] = {
    "UINT8": 200,
    "INT8": -3,
    "UINT16": 60_000,
    "INT16": -300,
    "UINT32": 4_000_000_000,
    "INT32": -70_000,
    "FLOAT32": 1e-5,
    "BOOL": True,
    "STRING": "größer",
    "UINT64": 2**63,
    "INT64": -(2**40),
    "FLOAT64": 0.1,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A file with every kind of value and some quantised tensors."""
    path = tmp_path_factory.mktemp("gguf") / "every.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in VALUES.items():
        writer.add_key_value(f"a.{kind}", value, gguf.GGUFValueType[kind])
    writer.add_array("list.words", ["one", "", "zwölf"])
    writer.add_array("list.numbers", [1, -2, 3])
    writer.add_array("list.floats", [0.5, 0.25])
    random = np.random.default_rng(0)
    tensors = {
        "matrix": random.normal(size=(6, 64)).astype(np.float32),
        "vector": np.arange(5, dtype=np.float32),
    }
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for kind in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "F16", "BF16"):
        quantization = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(tensors["matrix"], quantization)
        writer.add_tensor(kind, raw, raw_dtype=quantization)
        tensors[kind] = gguf.quants.dequantize(raw, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_metadata_of_every_kind(written: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    """Each value comes back as it was written; a float32 as the decimal that was meant."""
    metadata = open_gguf(written[0]).metadata
    assert {kind: metadata[f"a.{kind}"] for kind in VALUES} == VALUES
    lists = [metadata[f"list.{kind}"] for kind in ("words", "numbers", "floats")]
    assert lists == [["one", "", "zwölf"], [1, -2, 3], [0.5, 0.25]]


def test_tensors_of_every_quantisation(written: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    """Each tensor is what the gguf package dequantises, in float32, writable, in torch's order of dimensions."""
    path, tensors = written
    file = open_gguf(path)
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        got = file.read(name)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        assert np.array_equal(got.numpy(), expected)
        got.add_(1)  # in storage of its own


@examples(2)
@given(data=st.data())
def test_a_truncated_file_is_refused(
    written: tuple[Path, dict[str, np.ndarray[Any, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    """Cut anywhere, the file is refused by name: in its metadata with the place, in its data with the tensor."""
    content = written[0].read_bytes()
    last = max(t.start + t.num_bytes for t in open_gguf(written[0]).tensors.values())
    length = data.draw(st.one_of(st.integers(0, 2000), st.integers(0, last - 1)))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(content[:length])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf: (truncated|not a GGUF file)"):
        open_gguf(path)


@examples(2)
@given(damage=st.lists(st.tuples(st.integers(4, 1800), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused(
    written: tuple[Path, dict[str, np.ndarray[Any, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
    damage: list[tuple[int, int]],
) -> None:
    """Whatever bytes are wrong, nothing but a named error comes out."""
    content = bytearray(written[0].read_bytes())
    for place, byte in damage:
        content[place] = byte
    path = tmp_path_factory.getbasetemp() / "bad.gguf"
    path.write_bytes(content)
    try:
        file = open_gguf(path)
        for name in file.tensors:
            file.read(name)
    except ModelLoadError as error:
        assert "bad.gguf" in str(error)


def test_the_cut_tensor_is_named(
    written: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path
) -> None:
    """The message has the tensor, where it ends and where the file does."""
    content, tensors = written[0].read_bytes(), open_gguf(written[0]).tensors
    end = tensors["Q8_0"].start + tensors["Q8_0"].num_bytes
    (tmp_path / "cut.gguf").write_bytes(content[: end - 1])
    with pytest.raises(ModelLoadError, match=f"tensor Q8_0 ends at byte {end}, the file at byte {end - 1}"):
        open_gguf(tmp_path / "cut.gguf")


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file without the magic bytes, and a version that is not known."""
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_gguf(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelLoadError, match="GGUF version 9"):
        open_gguf(tmp_path / "b.gguf")


HEAD = b"GGUF" + struct.pack("<I", 3)
NAMED = struct.pack("<Q", 1) + b"a"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<QQ", 0, 2**60) + bytes(10**5), "damaged: '' is in it twice"),
        (struct.pack("<QQ", 2**60, 0) + bytes(10**5), "damaged: '' is in it twice"),
        (
            struct.pack("<QQ", 0, 1) + NAMED + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10**5,
            "breaks off",
        ),
        (struct.pack("<QQ", 1, 0) + NAMED + struct.pack("<I", 2**31) + bytes(10**5), "breaks off"),
        (struct.pack("<QQ", 0, 1) + NAMED + struct.pack("<IIQ", 9, 6, 2**62) + bytes(10**5), "breaks off"),
    ],
    ids=["keys", "tensors", "arrays of arrays", "dimensions", "an array"],
)
def test_absurd_counts_are_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    """However many keys, tensors, dimensions or levels are announced, no more is read than can be meant."""
    (tmp_path / "a.gguf").write_bytes(HEAD + content)
    with pytest.raises(ModelLoadError, match=rf"a\.gguf: .*{message}.*; fetch it again"):
        open_gguf(tmp_path / "a.gguf")
