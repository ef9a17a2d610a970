"""Documents of the embedded text (`jaxscale.data`), from an installed CPython.

`python tests/support/python_docs.py` writes jaxscale/data/python_docs.npz. The test of
the text compares with them where the interpreter is the version they came from.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

SHORTEST = 200  # bytes; less is not a document
# Windows, tests, what distributions ship apart, and what is not CPython's own.
LEFT_OUT = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
LEFT_OUT |= {"tkinter", "turtledemo"}
# Modules with a notice of their own may have terms of their own.
NOTICE = re.compile(r"copyright|all rights reserved|permission", re.IGNORECASE)


def documents() -> list[bytes]:
  """Return each topic of pydoc and each module's docstrings, sorted by title."""
  texts = {title: text.strip("\n") for title, text in topics.items()}
  library = Path(sysconfig.get_path("stdlib"))
  for path in sorted(library.rglob("*.py")):
    parts = path.relative_to(library).parts
    if LEFT_OUT.intersection(parts):
      continue
    if text := docstrings(path.read_text(encoding="utf-8", errors="replace")):
      texts[".".join(parts).removesuffix(".py")] = text
  return without_repeats(texts)


def docstrings(source: str) -> str:
  """Return the docstrings of a module in order, or "" if they are not PSF's."""
  if NOTICE.search(source):
    return ""
  found = []

  def visit(node):
    if text := ast.get_docstring(node):
      found.append(text)
    for child in node.body:
      if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        visit(child)

  visit(ast.parse(source))
  return "\n\n".join(found)


def without_repeats(texts: dict[str, str]) -> list[bytes]:
  """Return the texts without paragraphs that a longer text repeats, as topics contain topics."""
  seen: set[str] = set()
  kept: dict[str, bytes] = {}
  for title in sorted(texts, key=lambda t: (-len(texts[t]), t)):
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", texts[title]):
      key = " ".join(paragraph.split())
      if key not in seen:
        paragraphs.append(paragraph.rstrip())
        seen.add(key)
    body = "\n\n".join(paragraphs)
    text = f"{title}\n\n{body}\n" if body else ""
    if len(encoded := text.encode()) >= SHORTEST:
      kept[title] = encoded
  return [kept[title] for title in sorted(kept)]


if __name__ == "__main__":
  found = documents()
  target = Path(__file__).parents[2] / "jaxscale" / "data" / "python_docs.npz"
  text = np.frombuffer(b"\0".join(found), np.uint8)
  np.savez_compressed(target, text=text)
  print(sys.version.split()[0], len(found), "documents", len(text), "bytes")
