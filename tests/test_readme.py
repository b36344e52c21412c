"""The README's Python runs as it stands."""

import doctest

from tests.grammars import needs_xgrammar
from tests.smollm2 import needs_smollm2
from tests.syntax import ROOT


def test_the_examples_in_the_readme_run(unchecked_records: None) -> None:
    needs_smollm2()
    needs_xgrammar()
    failures, count = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert (failures, count > 20) == (0, True)
