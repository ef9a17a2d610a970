"""Execute the notebooks: `python docs/notebooks.py [NAME ...]`, without names all.

The sources are colabs/*.py. Each notebook is executed in an empty folder, and is written to
colabs/*.ipynb with its outputs, so that a code host shows them. Paths of this
machine are shortened, and stderr is left out.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

COLABS = Path(__file__).parents[1] / "colabs"


def execute(name: str) -> None:
  """Write `colabs/NAME.ipynb` from `colabs/NAME.py`, with outputs."""
  notebook = jupytext.read(COLABS / f"{name}.py")
  with tempfile.TemporaryDirectory() as folder:
    resources = {"metadata": {"path": folder}}
    options = {"timeout": 1800, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources=resources, **options).execute()
  for cell in notebook.cells:
    if cell.cell_type == "code":
      cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
  text = jupytext.writes(notebook, fmt="ipynb")
  text = text.replace(f"{folder}/", "").replace(f"{sys.prefix}/bin/", "")
  text = re.sub(r"/tmp/tmp\w+", "/tmp/run", text)
  nbformat.validate(nbformat.reads(text, as_version=4))
  (COLABS / f"{name}.ipynb").write_text(text + "\n")


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  for notebook_name in sys.argv[1:] or sorted(p.stem for p in COLABS.glob("*.py")):
    execute(notebook_name)
    print(notebook_name)
