"""Every notebook runs from top to bottom."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.syntax import ROOT

NOTEBOOKS = ("01_one_step", "02_continuous_batching", "03_in_a_training_loop")


def run_notebook(text: str, name: str) -> dict[str, Any]:
    """Run the code cells in one namespace, which is returned. What a cell ends with is shown, as in a notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__", "display": repr}
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        where = f"{name}.ipynb, code cell {number}"
        tree = ast.parse("".join(cell["source"]), where)
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, where, "exec"), namespace)
        if isinstance(shown, ast.Expr):
            repr(eval(compile(ast.Expression(shown.value), where, "eval"), namespace))
    return namespace


def test_the_notebooks_are_the_ones_that_are_tested() -> None:
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == list(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)  # a notebook may be opened from anywhere
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))

    assert run_notebook((ROOT / "notebooks" / f"{name}.ipynb").read_text(), name)
    plt.close("all")


def test_a_cell_sees_the_cells_before_it_and_its_last_value_is_shown() -> None:

    def notebook(*cells: str) -> str:
        return json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]})

    assert run_notebook(notebook("x = 1", "", "y = x + 1\ny"), "ok")["y"] == 2
    with pytest.raises(ZeroDivisionError):
        run_notebook(notebook("x = 0", "1 / x"), "bad")
    with pytest.raises(ValueError, match="shown"):
        run_notebook(
            notebook("class Loud:\n    def __repr__(self): raise ValueError('shown')\n", "Loud()"), "bad"
        )
