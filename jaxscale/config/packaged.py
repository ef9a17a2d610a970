"""Packaged configs, which have names: `digits`, `resnet50_lars:4096`."""

from __future__ import annotations

from pathlib import Path

from jaxscale.config.validation import closest, nearest
from jaxscale.files import expand

_PACKAGE = Path(__file__).parent.parent
# The first exists in an installed package, the second in a checkout.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def names() -> dict[str, Path]:
  """Return the file of every packaged config, by name."""
  folder = next((f for f in _FOLDERS if (f / "digits.py").is_file()), None)
  return {p.stem: p for p in sorted(folder.glob("*.py"))} if folder else {}


def locate(path: str) -> str:
  """Return `FILE[:arg]` for `NAME[:arg]`; other texts are returned unchanged.

  A file called NAME takes precedence over the packaged config.

  Example:
    >>> Path(locate("resnet50_lars:4096")).name
    'resnet50_lars.py:4096'
  """
  name, colon, arg = (path := expand(path)).partition(":")
  file = names().get(name)
  if file is None or Path(name).is_file():
    return path
  near = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
  return f"{near}{colon}{arg}"


def similar(file: Path) -> str:
  """Return the hint for a missing file: a file or packaged config with a similar name."""
  if str(file) == file.stem:
    return f" and no packaged config, {nearest(file.stem, names())}"
  near = {p.stem: p for p in file.parent.glob("*.py")}
  close = closest(file.stem, near)
  return f", did you mean {str(near[close])!r}?" if close else ", check the path"
