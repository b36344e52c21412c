"""Stop strings: where a text must end."""

from collections.abc import Iterable


def find_stop(text: str, stops: Iterable[str], from_index: int = 0) -> tuple[int, str] | None:
    """Where the first stop string begins that `text` holds at or behind `from_index`, and which one; else None.

    First is the one that is complete first, among those the longest: the one that a search after each character would
    have found, so it does not depend on how much text a token brings. The stop strings are not empty.
    """
    found = [
        (index + len(stop), index, stop) for stop in stops if (index := text.find(stop, from_index)) >= 0
    ]
    if not found:
        return None
    _, index, stop = min(found)
    return index, stop
