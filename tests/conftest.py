"""Options, fixtures and switches of the whole test suite."""

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import checks, profiles
from tests.last_lines import LAST_LINES

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("traces", "oracle", "e2e", "models")  # recorded data, each with a README of its own

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before anything imports triton, as transformers may: it is read at import
    )
profiles.import_package()
torch.set_num_threads(1)  # barriers between threads cost more than they save on tensors this small


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("purestep", "recorded data")
    for name in FOLDERS:
        group.addoption(
            f"--{name}",
            metavar="DIR",
            type=Path,
            default=ROOT.parent / "shared" / name,
            help=f"folder with the recorded {name} (default: %(default)s)",
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin first, so that in the end no worker waits for another; and what needs a GPU is skipped."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A worker keeps no memory of the device that it does not use, since others share it."""
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_collection_finish() -> None:
    """What is there by now stays, so nobody need look for garbage in it: that takes half a second per capture.

    Torch imports its compiler, a third of all that, with the first thing that needs it: so it is imported here.
    """
    importlib.import_module("torch._dynamo")
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """What test modules want to say last goes below pytest's own last line."""
    yield
    gc.unfreeze()
    for line in session.config.stash.get(LAST_LINES, []):
        session.config.get_terminal_writer().line(line)


def data_folder(config: pytest.Config, name: str) -> Path:
    """The folder of recorded data; without it the test is skipped, in CI it fails."""
    folder: Path = config.getoption(name)
    if not folder.is_dir():
        message = f"no recorded {name} at {folder}: give the folder with --{name} DIR"
        if profiles.IN_CI:
            pytest.fail(message + " (CI=true, so its absence fails)", pytrace=False)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def traces_dir(pytestconfig: pytest.Config) -> Path:
    return data_folder(pytestconfig, "traces")


@pytest.fixture(scope="session")
def oracle_dir(pytestconfig: pytest.Config) -> Path:
    return data_folder(pytestconfig, "oracle")


@pytest.fixture(scope="session")
def e2e_dir(pytestconfig: pytest.Config) -> Path:
    return data_folder(pytestconfig, "e2e")


@pytest.fixture(scope="session")
def models_dir(pytestconfig: pytest.Config) -> Path:
    return data_folder(pytestconfig, "models")


@pytest.fixture(autouse=True)
def _check_records(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check every record that is built against its annotations, unless the test uses `unchecked_records`."""
    with checks.unchecked() if "unchecked_records" in request.fixturenames else checks.checked():
        yield


@pytest.fixture(scope="session")  # so that tests with @given may ask for it
def unchecked_records() -> None:
    """Build records without checks in this test: for tests that call torch.compile, which can not trace the checker."""
