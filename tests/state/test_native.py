"""Compiling the CPU's kernels: once, kept on disk, and what is said where it can not be done."""

import ctypes
import subprocess
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


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "none of cc, gcc, clang was found"),
        ("/no/such/compiler", "can not be run"),
        ("false", "false does not compile the CPU's kernels"),
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
    """The library then lies in a temporary folder, for this process alone."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.compiled().exists()


def test_the_engine_takes_them_on_the_cpu() -> None:
    """Where there is a compiler, as there is wherever this is tested."""
    kernels = native.cpu_kernels()
    assert kernels is not donating
    assert kernels is native.cpu_kernels()
