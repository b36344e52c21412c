"""What a test module wants to say at the very end of the run, below pytest's own summary; `conftest` prints it."""

import pytest

LAST_LINES = pytest.StashKey[list[str]]()


def say_last(config: pytest.Config, line: str) -> None:
    """Print a line when everything is over."""
    config.stash.setdefault(LAST_LINES, []).append(line)
