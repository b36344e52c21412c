"""`purestep bench`: from options to rows, and from rows to a table, a file, a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
from rich.console import Console

from purestep.pure.errors import InvalidParameterError
from purestep.state.bench.measure import WHAT, Wanted, best_batches, measure, usual_batches, usual_method
from purestep.state.bench.peers import installed
from purestep.state.bench.plot import check_matplotlib, plot
from purestep.state.bench.report import notes, table, watched
from purestep.state.bench.rows import Row, about
from purestep.state.bench.shapes import Subject


def bench(
    *,
    model: str | None,
    shape: str | None,
    device: str,
    dtype: str | None,
    what: Sequence[str] | None,
    batches: Sequence[int] | None,
    context: int | None,
    unroll: int | None,
    peers: bool,
    json_out: Path | None,
    plot_out: Path | None,
    progress: bool,
) -> None:
    """Measure, and print a table; None stands for what suits the model and the device.

    Raises:
        InvalidParameterError: an option that can not be; nothing has been measured then.
        ModelLoadError: the model can not be loaded.
        BenchmarkError: a measurement could not be made.
    """
    for out in (json_out, plot_out):
        if out is not None and not out.resolve().parent.is_dir():
            raise InvalidParameterError(f"{out}: its folder does not exist; make it first")
    if plot_out is not None:
        check_matplotlib()
    subject = Subject(model=model, shape=shape, device=device, dtype=dtype or usual_dtype(device))
    method = usual_method(subject)
    wanted = Wanted(
        subject=subject,
        method=method if context is None else attrs.evolve(method, context=context),
        what=WHAT if what is None else tuple(what),
        batches=usual_batches(subject) if batches is None else best_batches(batches),
        peers=installed() if peers else (),
        unroll=unroll,
    )
    rows, own = list[Row](), about(device)
    try:
        for row in watched(measure(wanted), wanted.num_rows, is_shown=progress):
            rows.append(row)
    finally:  # what ends it early does not take what is known
        if json_out is not None:
            json_out.write_text(json.dumps([row.as_json() | own for row in rows], indent=1) + "\n")
    title = f"{wanted.name}, {subject.dtype}, {own['versions']['device']}, torch {own['versions']['torch']}"
    if "threads" in own:
        title += f", {own['threads']} threads"
    if plot_out is not None:
        plot(rows, plot_out, title=title)
    console = Console()
    console.print(table(rows, title=title))
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)


def usual_dtype(device: str) -> str:
    """bfloat16 on a GPU, else float32."""
    return "bfloat16" if device.startswith("cuda") else "float32"
