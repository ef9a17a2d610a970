"""The classes of docs/extending.md, as their readers have them in files."""

import re

from support.paths import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()


def blocks(label=""):
  """Return the code blocks that begin with "```python" and the label."""
  head = f"```python {label}".strip()
  return re.findall(rf"^{head}\n(.*?)^```", PAGE, re.S | re.M)


def write_mine(folder):
  """Write `mine.py`, the page's file, and return its path."""
  file = folder / "mine.py"
  file.write_text("\n".join(blocks()))
  return file


def blocks_of(page):
  """Return the first "```python" block of each section of a page, by the section's title."""
  text = (ROOT / page).read_text()
  return dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", text, re.S | re.M))
