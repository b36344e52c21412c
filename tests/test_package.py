"""What is built and installed is the three folders under one name."""

import importlib
import importlib.metadata
import importlib.util
import pickle
import pkgutil
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import attrs
import pytest

import purestep.pure
from tests import checks
from tests.profiles import IN_CI
from tests.syntax import FOLDERS, ROOT, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(what: str, source: Path, target: Path) -> Path:
    """Build one distribution of the source tree with its own back end."""
    code = f"import sys; from hatchling.build import build_{what}; print(build_{what}(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", code, str(target)]
    finished = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return target / finished.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"purestep/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h") or path.name == "py.typed"
    }

    packed = {name for name in contents(wheel) if ".dist-info/" not in name}

    assert packed == expected
    assert {f"purestep/{folder}/py.typed" for folder in FOLDERS} <= packed


def test_the_wheel_names_license_and_command(wheel: Path) -> None:
    files = contents(wheel)
    (info,) = {name.split("/")[0] for name in files if ".dist-info/" in name}

    assert b"License-Expression: Apache-2.0" in files[f"{info}/METADATA"]
    assert files[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"purestep = purestep.state.cli:main" in files[f"{info}/entry_points.txt"]


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        # Python 3.11.4 and newer have filters, and 3.12 asks for one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    top = names[0].split("/")[0]

    again = build("wheel", tmp_path / top, tmp_path)

    assert contents(again) == contents(wheel)
    assert f"{top}/constraints.txt" in names


def test_the_sdist_holds_nothing_that_only_a_clone_can_use(sdist: Path) -> None:
    """Tests run through the links of .ci, and these would be packed as second copies of what they lead to."""
    with tarfile.open(sdist) as archive:
        inside = {name.split("/")[1] for name in archive.getnames()}

    assert not inside & {".ci", "tests"}
    assert {*FOLDERS, "notebooks", "pyproject.toml", "README.md", "LICENSE"} <= inside


def test_an_editable_install_is_a_path_to_the_links(tmp_path: Path) -> None:
    files = contents(build("editable", ROOT, tmp_path))
    paths = [body.decode().strip() for name, body in files.items() if name.endswith(".pth")]

    assert [Path(path) for path in paths] == [ROOT / ".ci/src"]
    assert not any(name.endswith(".py") for name in files)


def test_the_links_lead_to_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / ".ci/src/purestep" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
    assert not (ROOT / ".ci/src/purestep/__init__.py").exists()  # purestep is a namespace
    assert (ROOT / ".ci/test/tests").resolve() == ROOT / "tests"


def test_every_dependency_is_among_the_known_good_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    known = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + [item for extra in ("test", "dev", "hub") for item in extras[extra]]

    missing = {item.split(">=")[0].split("[")[0] for item in wanted} - known

    assert missing == set()
    assert all("==" in line and "+" not in line for line in lines if line and not line.startswith("#"))


def test_contributing_names_tests_that_exist() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "CONTRIBUTING.md").read_text())

    assert named
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_contributing_names_every_record_of_more_than_eight_fields() -> None:
    for module in pkgutil.walk_packages(purestep.pure.__path__, "purestep.pure."):
        importlib.import_module(module.name)
    large = {record.__name__ for record in checks.records() if len(attrs.fields(record)) > 8}

    assert {name for name in large if name not in (ROOT / "CONTRIBUTING.md").read_text()} == set()
    assert "Kernels" in large


def test_every_module_is_imported_before_tests() -> None:
    """What is drawn depends on it (see `tests.profiles`); without Triton its kernels can not be."""
    names = {name.removesuffix(".__init__") for name in sources(*FOLDERS)}
    absent = {
        name
        for name in names - sys.modules.keys()
        if importlib.util.find_spec("triton") or "triton" not in name
    }

    assert absent == set()


def test_classes_are_found_again_by_another_process() -> None:
    from purestep.pure.records.inputs import BatchDescriptor

    packed = pickle.dumps(BatchDescriptor(num_tokens=3))
    code = "import pickle, sys; sys.stdout.write(repr(pickle.load(sys.stdin.buffer)))"
    path = {"PYTHONPATH": str(Path(importlib.import_module("purestep.pure").__path__[0]).parent.parent)}
    finished = subprocess.run([sys.executable, "-P", "-c", code], input=packed, env=path, capture_output=True)

    assert finished.stdout.decode().startswith("BatchDescriptor(num_tokens=3"), finished.stderr


def test_the_installed_version_is_the_projects() -> None:
    try:
        installed = importlib.metadata.version("purestep")
    except importlib.metadata.PackageNotFoundError:
        message = "purestep is not installed here: its tests run from the source tree"
        if IN_CI:
            pytest.fail(message + " (CI=true, so its absence fails)", pytrace=False)
        pytest.skip(message)
    assert installed == PROJECT["version"]
