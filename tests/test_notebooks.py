"""Every notebook runs from top to bottom, and shows what is stored in it."""

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.syntax import ROOT

NOTEBOOKS = (
    "01_one_step",
    "02_continuous_batching",
    "03_in_a_training_loop",
    "04_time_travel",
    "05_sampling",
    "06_speculation",
)


REFRESH = "refresh it: python -P tests/refresh_notebooks.py"


def run_notebook(text: str, name: str) -> tuple[dict[str, Any], list[str | None]]:
    """Run the code cells in one namespace; it, and what each cell ends with, shown as in a notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__", "display": repr}
    shown: list[str | None] = []
    for number, cell in enumerate(code_cells(text), start=1):
        where = f"{name}.ipynb, code cell {number}"
        tree = ast.parse("".join(cell["source"]), where)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, where, "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), namespace)
        shown.append(None if value is None else repr(value))
    return namespace, shown


def code_cells(text: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str | None:
    """The value that is stored as a cell's last."""
    values = [o["data"]["text/plain"] for o in cell["outputs"] if o["output_type"] == "execute_result"]
    return "".join(values[0]) if values else None


def unspaced(text: str | None) -> str | None:
    """Jupyter breaks long values into lines."""
    return None if text is None else "".join(text.split())


def test_the_notebooks_are_the_ones_that_are_tested() -> None:
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == list(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)  # a notebook may be opened from anywhere
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))

    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    _, shown = run_notebook(text, name)
    plt.close("all")

    assert [unspaced(value) for value in shown] == [unspaced(stored(cell)) for cell in code_cells(text)], (
        REFRESH
    )


@pytest.mark.parametrize(("name", "figures"), list(zip(NOTEBOOKS, (0, 1, 1, 1, 0, 1), strict=True)))
def test_stored_outputs_are_small_and_say_nothing_of_a_machine(name: str, figures: int) -> None:
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    outputs = [output for cell in code_cells(text) for output in cell["outputs"]]

    assert {output["output_type"] for output in outputs} <= {"execute_result", "display_data"}, REFRESH
    images = [base64.b64decode(o["data"].pop("image/png")) for o in outputs if "image/png" in o["data"]]
    assert [len(image) < 50_000 for image in images] == [True] * figures
    assert not re.search(r"/(home|root|tmp|Users|work)/| at 0x|\d (s|ms|us)\b", json.dumps(outputs))
    assert {"kernelspec", "language_info"} == json.loads(text)["metadata"].keys()
    assert all(cell["metadata"] == {} for cell in code_cells(text))  # Jupyter puts times there


def test_a_cell_sees_the_cells_before_it_and_its_last_value_is_shown() -> None:

    def notebook(*cells: str) -> str:
        return json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]})

    assert run_notebook(notebook("x = 1", "", "y = x + 1\ny"), "ok")[1] == [None, None, "2"]
    with pytest.raises(ZeroDivisionError):
        run_notebook(notebook("x = 0", "1 / x"), "bad")
    with pytest.raises(ValueError, match="shown"):
        run_notebook(
            notebook("class Loud:\n    def __repr__(self): raise ValueError('shown')\n", "Loud()"), "bad"
        )
