"""Rows as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from purestep.pure.errors import InvalidParameterError
from purestep.state.bench.rows import Row

Series = tuple[str, str]  # who, level
UNITS = {"ms": "ms a step", "tok_s": "prompt tokens a second", "us": "us a step", "s": "seconds"}


def check_matplotlib() -> None:
    """Nothing, if there is matplotlib.

    Raises:
        InvalidParameterError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidParameterError(
            "a plot is drawn with matplotlib, which is not installed: pip install matplotlib, or leave --plot out"
        ) from None


def plot(rows: Sequence[Row], out: Path, *, title: str) -> None:
    """One chart for each kind of measurement: bars for each engine, side by side for each batch; ticks for floors.

    Raises:
        InvalidParameterError: matplotlib is not installed, or the file's ending names no format that it writes.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.value is not None]
    benches = list(dict.fromkeys(row.bench for row in measured))
    everybody = list(dict.fromkeys(map(_series, measured)))
    colours = {series: f"C{number}" for number, series in enumerate(everybody)}
    figure = Figure(figsize=(5 * max(len(benches), 1), 4), layout="constrained")
    for axes, bench in zip(figure.subplots(1, max(len(benches), 1), squeeze=False)[0], benches, strict=False):
        _draw(axes, [row for row in measured if row.bench == bench], colours)
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(out, dpi=150)
    except ValueError as error:  # an ending that names no format
        raise InvalidParameterError(f"plot={str(out)!r}: {error}") from None


def _draw(axes: Any, rows: Sequence[Row], colours: Mapping[Series, str]) -> None:
    """Bars of one kind of measurement."""
    groups = list(dict.fromkeys(_group(row) for row in rows))
    series = list(dict.fromkeys(map(_series, rows)))
    width = 0.8 / len(series)
    for number, (who, level) in enumerate(series):
        own = [row for row in rows if _series(row) == (who, level)]
        places = [groups.index(_group(row)) + (number + 0.5) * width - 0.4 for row in own]
        label = who if level == "engine" else f"{who}, bare {level}"
        axes.bar(places, [row.value for row in own], width, label=label, color=colours[who, level])
    bounds = {groups.index(_group(row)): row.bound for row in rows if row.bound is not None}
    for number, (place, bound) in enumerate(bounds.items()):
        kind = "ceiling" if rows[0].is_rate else "floor"
        axes.hlines(bound, place - 0.45, place + 0.45, "black", "dashed", label=None if number else kind)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(rows[0].bench)
    axes.set_ylabel(UNITS[rows[0].unit])
    axes.legend(fontsize=7)


def _series(row: Row) -> Series:
    return row.who, row.level


def _group(row: Row) -> str:
    """What bars stand beside each other."""
    return str(row.facts.get("caches", "")) if row.batch is None else f"batch {row.batch}"
