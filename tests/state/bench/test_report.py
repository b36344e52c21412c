"""Rows as a table and as a picture."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from purestep.pure.errors import InvalidParameterError
from purestep.state.bench.plot import plot
from purestep.state.bench.report import label, notes, shown, table, watched
from purestep.state.bench.rows import Row

ROWS = [
    Row(bench="startup", shape="1B", unit="s", value=12.5, facts={"caches": "cold"}),
    Row(bench="decode", shape="1B", unit="ms", value=1.0, bound=0.5, batch=8),
    Row(bench="decode", shape="1B", unit="ms", value=0.8, bound=0.5, batch=8, level="step"),
    Row(bench="host", shape="1B", unit="us", value=55.0, batch=8, level="step"),
    Row(
        bench="prefill", shape="1B", unit="tok_s", value=300.0, bound=400.0, batch=16, facts={"length": 2048}
    ),
    Row(bench="decode", shape="1B", unit="ms", value=2.5, bound=0.5, batch=8, who="transformers"),
    Row(
        bench="prefill",
        shape="1B",
        unit="tok_s",
        value=200.0,
        bound=400.0,
        batch=16,
        who="transformers",
        facts={"length": 2048},
    ),
    Row(bench="decode", shape="1B", unit="ms", value=None, who="vllm", why="RuntimeError: no room"),
]


def text(rows: list[Row], width: int = 120) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(rows, title="1B"))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def line(rows: list[Row], label: str) -> str:
    (found,) = [line for line in text(rows) if line.strip().startswith(label + "  ")]
    return found


@pytest.mark.parametrize(
    ("row", "share"),
    [
        (Row(bench="decode", shape="", unit="ms", value=2.0, bound=0.5), 0.25),
        (Row(bench="prefill", shape="", unit="tok_s", value=2.0, bound=8.0), 0.25),
        (Row(bench="host", shape="", unit="us", value=2.0), None),
        (Row(bench="decode", shape="", unit="ms", value=-1.0, bound=0.5), None),
        (Row(bench="decode", shape="", unit="ms", value=None, bound=0.5), None),
    ],
)
def test_the_share_of_what_the_device_allows(row: Row, share: float | None) -> None:
    assert row.share == share


def test_a_line_has_the_number_its_floor_the_share_and_the_peers() -> None:
    assert " ".join(line(ROWS, "decode x 8").split()) == "decode x 8 1.000 ms 0.500 ms 50.0% 2.500 ms (2.50x)"
    assert line(ROWS, "decode x 8, bare step").split()[-1] == "62.5%"
    assert line(ROWS, "prefill 16 x 2048").split()[-3:] == ["200", "tok/s", "(1.50x)"]
    assert line(ROWS, "host x 8, run alone").split()[-2:] == ["55", "us"]
    assert line(ROWS, "startup, cold caches").split()[-2:] == ["12.50", "s"]


def test_peers_have_columns_if_they_were_measured() -> None:
    heads = [line for line in text(ROWS) if "floor" in line]

    assert len(heads) == 1 and "transformers" in heads[0] and "vllm" not in heads[0]
    assert any("vllm, decode: not measured, RuntimeError: no room" in note for note in notes(ROWS))


def test_eighty_columns_are_enough_for_two_peers() -> None:
    rows = [*ROWS, Row(bench="decode", shape="1B", unit="ms", value=4.0, batch=8, who="vllm")]

    shown = " ".join(text(rows, width=80))

    assert all(part in shown for part in ("2.500 ms", "(2.50x)", "4.000 ms", "(4.00x)", "bare step"))


def test_a_time_that_noise_made_negative_is_pointed_out() -> None:
    noisy = Row(bench="decode", shape="1B", unit="ms", value=-0.1, bound=0.5, batch=8)

    assert any("busy" in note for note in notes([noisy]))
    assert not any("busy" in note or "on a CPU" in note for note in notes(ROWS))


def test_host_times_of_a_cpu_are_pointed_out() -> None:
    row = Row(bench="host", shape="1B", unit="us", value=5.0, batch=8, facts={"includes_step": True})

    assert any("on a CPU" in note for note in notes([row]))


def test_without_a_time_of_ours_a_peer_is_not_compared() -> None:
    noisy = Row(bench="decode", shape="1B", unit="ms", value=-0.1, bound=0.5, batch=8)

    assert line([noisy, ROWS[5]], "decode x 8").split()[-2:] == ["2.500", "ms"]


@pytest.mark.parametrize("is_shown", [False, True])
def test_the_bar_lets_every_row_through_and_writes_to_standard_error(
    is_shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal

    assert list(watched(iter(ROWS), len(ROWS), is_shown=is_shown)) == ROWS

    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("measuring" in captured.err or "decode" in captured.err) is is_shown


def test_each_row_is_told_as_it_comes_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = watched(iter(ROWS), len(ROWS), is_shown=True)

    assert next(rows) == ROWS[0]
    told = capsys.readouterr().err
    assert label(ROWS[0]) in told and shown(ROWS[0], ROWS[0].value) in told


def test_what_could_not_be_measured_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(bench="decode", shape="1B", who="vllm", unit="ms", value=None, why="RuntimeError: no room")

    assert list(watched(iter([row]), 1, is_shown=True)) == [row]
    assert "vllm: decode not measured, RuntimeError: no room" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], []])
def test_a_picture_is_drawn(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    plot(rows, tmp_path / "out.png", title="1B")

    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_an_ending_that_is_no_format_is_a_named_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(InvalidParameterError, match="plot="):
        plot(ROWS, tmp_path / "out.xyz", title="1B")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {"matplotlib": None}
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)

    with pytest.raises(InvalidParameterError, match="pip install matplotlib"):
        plot(ROWS, Path("out.png"), title="1B")
