"""`purestep bench` from the shell: a table, files, named errors before anything is measured."""

import json
from pathlib import Path

import pytest

from purestep.state.bench import command
from purestep.state.bench.floors import Rates
from purestep.state.bench.rows import Row
from purestep.state.cli import main


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates take seconds to measure, and have tests of their own."""
    monkeypatch.setattr("purestep.state.bench.measure.measure_rates", lambda *_: Rates(1e9, 1e11))


def bench(*arguments: str) -> int:
    return main(["bench", "--shape", "tiny", "--no-peers", "--quiet", *arguments])


def test_a_tiny_model_is_measured_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    options = ["--batches", "2", "1", "2", "--context", "8", "--what", "host", "prefill"]

    assert bench(*options, "--json", str(out), "--plot", str(picture)) == 0

    rows = json.loads(out.read_text())
    assert [(row["bench"], row["batch"], row["level"]) for row in rows] == [
        ("host", 1, "step"),
        ("host", 1, "engine"),
        ("host", 2, "step"),
        ("host", 2, "engine"),
        ("prefill", 2, "engine"),
    ]
    assert all({"shape", "versions", "date", "threads"} <= set(row) for row in rows)
    assert picture.exists()
    captured = capsys.readouterr()
    assert "host x 2, run alone" in captured.out and "prefill 2 x 64" in captured.out
    assert captured.err == ""


def test_what_is_known_is_written_even_if_a_later_measurement_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(wanted: object) -> object:
        yield Row(bench="host", shape="tiny", unit="us", value=1.0, batch=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", failing)
    out = tmp_path / "rows.json"

    assert bench("--json", str(out)) == 130

    assert [row["us"] for row in json.loads(out.read_text())] == [1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--what", "speed"], "what='speed'"),
        (["--batches", "0"], "batches="),
        (["--context", "5000", "--what", "decode"], "positions"),
        (["--context", "0"], "context=0"),
        (["--model", "somewhere"], "one of them"),
        (["--device", "cuda:99"], "device="),
        (["--json", "/no/such/folder/rows.json"], "folder does not exist"),
        (["--plot", "/no/such/folder/rows.png"], "folder does not exist"),
    ],
)
def test_options_that_can_not_be_are_named(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*options) == 1

    captured = capsys.readouterr()
    assert captured.err.startswith("purestep: ") and said in captured.err
    assert captured.out == ""


def test_an_unknown_shape_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "70B"]) == 1

    assert "tiny, 0.6B, 1B, 8B" in capsys.readouterr().err
