"""Progress of a call to `generate`, and of capturing graphs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Report(Protocol):
    """Called after every step, with the tokens of all steps so far."""

    def __call__(self, *, finished: int, tokens: int) -> None: ...


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Report]:
    """A bar of finished prompts with tokens per second, on standard error; a no-op if it is not to be shown."""
    if not shown:
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    # Results may be printed while the bar is shown; rich would send them where the bar goes.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("prompts", total=total, rate=0.0)

        def report(*, finished: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=finished, rate=tokens / elapsed if elapsed else 0.0)

        yield report


def watched(items: Sequence[T], what: str, *, shown: bool) -> Iterable[T]:
    """The items, with a bar of how many have been taken, on standard error."""
    if not shown:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, console=Console(stderr=True), transient=True)


def _silent(*, finished: int, tokens: int) -> None:
    """Nobody watches."""
