"""Rows as a table, and a bar while they are measured."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from purestep.state.bench.rows import Row

FORMATS = {"ms": "{:,.3f} ms", "tok_s": "{:,.0f} tok/s", "us": "{:,.0f} us", "s": "{:,.2f} s"}
OWN = "purestep"


def shown(row: Row, value: float | None) -> str:
    """A number with the row's unit."""
    return "" if value is None else FORMATS[row.unit].format(value)


def table(rows: Sequence[Row], *, title: str) -> Table:
    """A line for each of our rows: what, how much, what the device allows, and what each peer takes for the same."""
    peers = list(dict.fromkeys(row.who for row in rows if row.who != OWN and row.value is not None))
    theirs = {(row.who, *_key(row)): row for row in rows if row.who != OWN}
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("", no_wrap=True)
    for name in (OWN, "floor", "share", *peers):
        made.add_column(name, justify="right", min_width=max(len(name), 6))
    for row in rows:
        if row.who != OWN:
            continue
        others = [theirs.get((peer, *_key(row))) for peer in peers]
        share = "" if row.share is None else f"{row.share:.1%}"
        made.add_row(
            label(row),
            shown(row, row.value),
            shown(row, row.bound),
            share,
            *(_compared(row, other) for other in others),
        )
    return made


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table has to know besides."""
    found = [f"{row.who}, {row.bench}: not measured, {row.why}" for row in rows if row.why is not None]
    if any(row.value is not None and row.value <= 0 for row in rows):
        found.append(
            "times of no or less than no length: the machine was busy with other things; measure again"
        )
    if any(row.bound is not None and not row.is_rate for row in rows):
        found.append(
            "floor: weights, in the bits in which our kernels read them, and the batch's keys and values, read once at "
            "the rate measured here"
        )
    if any(row.bound is not None and row.is_rate for row in rows):
        found.append("prefill: the floor is the rate that matrix products allow, as measured here")
    if any(row.facts.get("includes_step") for row in rows):
        found.append("host: on a CPU that is the step itself as well; its own share shows on a GPU")
    if any(row.level == "step" for row in rows):
        found.append(
            "bare step: `run` in a loop; else the whole engine, scheduling and output processing included"
        )
    return found


def watched(rows: Iterator[Row], total: int, *, is_shown: bool) -> Iterator[Row]:
    """The rows, with a line for each as it comes, and on terminals a bar of how many are there, on standard error."""
    if not is_shown:
        yield from rows
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("measuring", total=total)
        for row in rows:
            what = row.bench if row.value is None else label(row)
            bar.update(task, advance=1, description=f"{row.who}: {what}")
            told = shown(row, row.value) if row.why is None else f"not measured, {row.why}"
            bar.console.print(
                f"{row.who}: {what} {told}".rstrip(), markup=False, highlight=False, soft_wrap=True
            )
            yield row


def _key(row: Row) -> tuple[object, ...]:
    return row.shape, row.bench, row.batch, row.level, row.facts.get("caches")


def label(row: Row) -> str:
    """What was measured, in few words."""
    if row.bench == "startup":
        return f"startup, {row.facts['caches']} caches"
    if row.bench == "prefill":
        return f"prefill {row.batch} x {row.facts['length']}"
    parts = {
        ("host", "step"): ", run alone",
        ("host", "engine"): ", a turn",
        ("decode", "step"): ", bare step",
    }
    unroll = row.facts.get("unroll", 1)
    at_once = f", {unroll} a launch" if unroll > 1 else ""
    return f"{row.bench} x {row.batch}{parts.get((row.bench, row.level), '')}{at_once}"


def _compared(row: Row, other: Row | None) -> str:
    """The peer's number, and how many times faster we are."""
    if other is None or other.value is None:
        return ""
    if row.value is None or min(row.value, other.value) <= 0:
        return shown(other, other.value)
    ratio = row.value / other.value if row.is_rate else other.value / row.value
    return f"{shown(other, other.value)} ({ratio:.2f}x)"
