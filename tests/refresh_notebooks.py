"""Run the notebooks and store what they show, so that it can be read where nothing runs.

    python -P tests/refresh_notebooks.py

It needs the extra `notebooks`. Nothing of the machine is kept: no times, no versions.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    NotebookClient(notebook, record_timing=False).execute()
    notebook.metadata = metadata
    nbformat.write(notebook, path)
