"""Compiling the CPU's kernels: once, kept on disk, and what is said where it can not be done."""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from purestep.kernels.donating import donating
from purestep.state import native


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And found on disk after that; nothing else is left there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = native.compiled()
    assert ctypes.CDLL(str(made)).multiply
    with mock.patch.object(subprocess, "run", side_effect=subprocess.run) as run:
        assert native.compiled() == made
    assert [call.args[0][1:] for call in run.call_args_list] == [("--version",)]
    assert list((tmp_path / "purestep").iterdir()) == [made]


@pytest.mark.parametrize("num_bytes", [0, 1000, 60_000])
def test_a_damaged_library_is_made_anew(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading what a crash or a full disk has left of one would end the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with mock.patch.object(
        native, "_compile", lambda compiler, sources, target: target.write_bytes(b"x" * 70_000)
    ):
        made = native.compiled()
        made.write_bytes(b"x" * num_bytes)
        assert native.compiled() == made
    assert made.stat().st_size == 70_000


def test_a_compiler_may_come_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", f"{shutil.which('cc') or 'gcc'} -DANYTHING")
    assert native.compiled().exists()


def test_a_library_that_can_not_be_loaded_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "native.so").write_text("no library")
    native.cpu_kernels.cache_clear()
    try:
        with (
            mock.patch.object(native, "compiled", lambda: tmp_path / "native.so"),
            pytest.warns(UserWarning, match="torch's are used"),
        ):
            assert native.cpu_kernels() is donating
    finally:
        native.cpu_kernels.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "none of cc, gcc, clang was found"),
        ("/no/such/compiler", "can not be run"),
        ("false", "false does not compile them"),
    ],
)
def test_without_a_compiler_torchs_kernels_run_and_a_warning_says_so(
    compiler: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", compiler)
    native.cpu_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match=said):
            assert native.cpu_kernels() is donating
    finally:
        native.cpu_kernels.cache_clear()


def test_a_home_that_can_not_be_written_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library then lies in a temporary folder, for this process alone; so it does if nobody knows a home."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(native, "_compile", lambda compiler, sources, target: target.write_bytes(b""))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.compiled().exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert native.compiled().exists()


def test_a_library_in_a_folder_that_can_not_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = native.compiled()
    with mock.patch.object(tempfile, "TemporaryDirectory", side_effect=PermissionError):
        assert native.compiled() == made


def test_the_engine_takes_them_on_the_cpu() -> None:
    """Where there is a compiler, as there is wherever this is tested."""
    kernels = native.cpu_kernels()
    assert kernels is not donating
    assert kernels is native.cpu_kernels()
