"""Configs that come with jaxscale, found by name: `digits`, `resnet50_lars:4096`."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
# In an installed package; else the repository that the package is imported from.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def names() -> dict[str, Path]:
  """The file of every packaged config."""
  folder = next((f for f in _FOLDERS if (f / "digits.py").is_file()), None)
  return {p.stem: p for p in sorted(folder.glob("*.py"))} if folder else {}


def locate(path: str) -> str:
  """`FILE[:arg]` of `NAME[:arg]`; what names no packaged config is given back.

  A file of that name comes first.

  Example:
    >>> Path(locate("resnet50_lars:4096")).name
    'resnet50_lars.py:4096'
  """
  name, colon, arg = path.partition(":")
  file = names().get(name)
  if file is None or Path(name).is_file():
    return path
  near = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
  return f"{near}{colon}{arg}"
