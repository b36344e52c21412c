"""The table of differences names tests that there are, and leaves no cell empty."""

import re

import pytest

from tests.syntax import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "tests/differences.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| what |", "| --- "))
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_line_names_a_section_and_a_test(row: list[str]) -> None:
    what, upstream, here, section, test = row
    assert what and upstream and here and upstream != here
    assert re.fullmatch(r"\d+[A-F]?(\.\d+)*", section)
    named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
    assert named, test
    assert f"def {named[2]}(" in (ROOT / named[1]).read_text()


def test_the_table_is_found_from_the_readme() -> None:
    assert len(ROWS) > 30
    assert "(tests/differences.md)" in (ROOT / "README.md").read_text()
