"""Execute the notebooks: `python docs/notebooks.py [--check] [NAME ...]`, without names all.

The sources are colabs/*.py. Each notebook is executed in an empty folder, and is written to
colabs/*.ipynb with its outputs, which code hosts and the site show. With `--check` nothing is
written: differences between the committed outputs and those of the current code are printed,
and the exit code is 1 if there are any.
"""

import argparse
import base64
import io
import itertools
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

COLABS = Path(__file__).parents[1] / "colabs"
_COLOURS = 64  # Enough for our plots: a picture takes a third of the space, or less.
_NUMBER = r"\d[\d,.]*(?:e[-+]\d+)?"
# What depends on the measured times, and on whether the statistics of the data are kept already.
_VARYING = re.compile(
  r"^Amdahl.*\n|(?<=: )goodput .*| in \d+ s$|\d+ s to compile|^computing mean and std .*\n", re.M
)
_TIMED = re.compile(r"examples/s|\bms\b|seconds|goodput|memory")


def execute(name: str) -> Any:
  """Return the notebook of `colabs/NAME.py` with its outputs."""
  notebook = jupytext.read(COLABS / f"{name}.py")
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sockets:
    # TCP would be open to other users of this machine, and a kernel warns of it.
    config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
    options = {"timeout": 1800, "startup_timeout": 600, "record_timing": False}
    options |= {"coalesce_streams": True, "resources": {"metadata": {"path": folder}}}
    NotebookClient(notebook, config=config, **options).execute()
  machine = (f"{folder}/", ""), (f"{sys.prefix}/bin/", "")
  for cell in notebook.cells:
    if cell.cell_type == "code":
      cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
      for output in cell.outputs:
        shown = output if "text" in output else output.get("data", {})
        for kind in shown.keys() & {"text", "text/plain", "text/html"}:
          shown[kind] = _public(shown[kind], machine)
        if picture := shown.get("image/png"):
          shown["image/png"] = _smaller(picture)
  nbformat.validate(notebook)
  return notebook


def _public(text: str, machine: tuple[tuple[str, str], ...]) -> str:
  """Remove paths and the name of this machine, and inline SVG, which code hosts remove."""
  text = re.sub(r"<svg.*</svg>", "", text, flags=re.S)
  for old, new in machine:
    text = text.replace(old, new)
  text = re.sub(r"/tmp/tmp\w+", "/tmp/run", text)
  return re.sub(rf"\b{re.escape(platform.node())}(?=\)|;)", "host", text)


def _smaller(picture: str) -> str:
  """Return a PNG in Base64 with a palette."""
  image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
  file = io.BytesIO()
  image.quantize(_COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
  return base64.b64encode(file.getvalue()).decode()


def differences(old: Any, new: Any) -> Iterator[str]:
  """Yield the differences between the outputs of two executions of a notebook.

  Words and kinds of output must be equal. Numbers and sizes of pictures may differ by 10%, and
  percentages by 10: processors round differently, and of 180 validation examples that a network
  of 100 training examples classifies, 5% changed. Numbers in outputs with measured times are not
  compared.
  """
  for index, (a, b) in enumerate(itertools.zip_longest(old.cells, new.cells)):
    if a is None or b is None or a.source != b.source:
      yield f"cell {index}: the source differs"
      continue
    before, after = (list(map(_content, cell.get("outputs", ()))) for cell in (a, b))
    if [kinds for kinds, _ in before] != [kinds for kinds, _ in after]:
      yield f"cell {index}: {before} and {after}"
      continue
    for (_, x), (_, y) in zip(before, after, strict=True):
      for line, other in itertools.zip_longest(x.splitlines(), y.splitlines(), fillvalue=""):
        if not _agree(line, other, has_times=bool(_TIMED.search(x))):
          yield f"cell {index}: {line!r} and {other!r}"


def _content(output: Any) -> tuple[list[str], str]:
  """Return the kinds of an output, and its text, with the size of a picture."""
  data = output.get("data", {})
  text = _VARYING.sub("", output.get("text") or data.get("text/plain", ""))
  if "image/png" in data:
    width, height = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).size
    text += f"\npicture of {width} x {height}"
  return [output.output_type, *sorted(data)], text


def _agree(line: str, other: str, has_times: bool) -> bool:
  """Return whether two lines have the same words, and numbers that are about equal."""
  words, wanted = (re.findall(r"[^\W\d]{2,}", _words(x)) for x in (line, other))
  if words != wanted:
    return False
  if has_times:
    return True
  pairs = [re.findall(rf"({_NUMBER})(%?)", x) for x in (line, other)]
  values = [[(float(n.strip(",.").replace(",", "")), unit) for n, unit in p] for p in pairs]
  return len(values[0]) == len(values[1]) and all(
    unit == unit_2 and math.isclose(n, m, rel_tol=0 if unit else 0.1, abs_tol=10 if unit else 0)
    for (n, unit), (m, unit_2) in zip(*values, strict=True)
  )


def _words(line: str) -> str:
  """Return a line without numbers; a job that has not begun counts as a running one."""
  return re.sub(_NUMBER, " ", line.replace("PENDING", "RUNNING"))


def main() -> int:
  """Execute the notebooks given on the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true", help="compare, and write nothing")
  parser.add_argument("names", nargs="*", metavar="NAME")
  args = parser.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.pop("MPLBACKEND", None)  # Another backend would draw no picture into a notebook.
  is_equal = True
  for name in args.names or sorted(p.stem for p in COLABS.glob("*.py")):
    notebook, file = execute(name), COLABS / f"{name}.ipynb"
    print(name)
    if args.check:
      for line in differences(nbformat.read(file, as_version=4), notebook):
        print(f"  {line}")
        is_equal = False
    else:
      file.write_text(jupytext.writes(notebook, fmt="ipynb") + "\n")
  return 0 if is_equal else 1


if __name__ == "__main__":
  sys.exit(main())
