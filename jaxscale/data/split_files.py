"""Files of a split of text: one file by name, or those of a directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxscale.data.directory import is_visible, kinds, left_out_note, tree
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import open_regular, refuse_pointer
from jaxscale.metrics.text import few


class SplitFiles(NamedTuple):
  """Files of a split.

  Attributes:
    name: the path of the split without an ending, for messages.
    paths: the files by name, at least one.
    endings: the endings of files of their kind.
    notes: a line about skipped files, if there are any.
  """

  name: str
  paths: list[Path]
  endings: Sequence[str]
  notes: tuple[str, ...]

  @property
  def stamps(self) -> list[tuple[str, int, int]]:
    """The path, size and modification time of each file, which the keys of caches contain."""
    stats = [(path.absolute(), path.stat()) for path in self.paths]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in stats]


def split_files(
  directory: Path, split: str, kinds_of: Sequence[Sequence[str]], setting: str
) -> SplitFiles:
  """Return the files of a split, all of one kind.

  Args:
    directory: the directory of the splits.
    split: the name of a file without its ending, or of a directory.
    kinds_of: the endings of the files of each kind, in lower case.
    setting: the name of the settings class for messages.

  Raises:
    ConfigError: there are no files, files of several kinds, or a file cannot be read.
  """
  if not directory.is_dir():
    raise ConfigError(f"{setting}.path={str(directory)!r}: no such directory; check the path")
  base, endings = directory / split, [ending for kind in kinds_of for ending in kind]
  entries = sorted(os.listdir(base.parent)) if base.parent.is_dir() else []
  names = [n for n in entries if n.startswith(base.name) and n[len(base.name) :].lower() in endings]
  files = [base.parent / name for name in names if not (base.parent / name).is_dir()]
  left_out: Counter[str] = Counter()
  if base.is_dir():
    inside = tree(str(base))
    names = [name for name in inside.files if name.lower().endswith((*endings,))]
    left_out = inside.left_out + kinds(set(inside.files) - set(names))
    files += [base / name for name in names]
  if not files:
    shown = [name for name in entries if is_visible(name)]
    problem = f"{directory} contains {few(shown, 10) or 'nothing'}"
    if base.is_dir():
      shown = [f"{count} {kind}" for kind, count in left_out.items()]
      problem = f"the directory {base} contains {few(shown, 10) or 'nothing'}"
    fix = f"give a file {split} or files in a directory {split} that end in {', '.join(endings)}"
    raise ConfigError(f"{setting}: {problem}; {fix}")
  kind = next(kind for kind in kinds_of if files[0].name.lower().endswith((*kind,)))
  sources = {path if path.parent == base.parent else base for path in files}
  if len(sources) > 1 or not all(path.name.lower().endswith((*kind,)) for path in files):
    both = f"{files[0].name} and {files[-1].name}"
    raise ConfigError(f"{setting}: {split!r} of {directory} has {both}; keep only one kind")
  for path in files:
    try:
      with open_regular(path) as file:
        refuse_pointer(path, file.read(64))
    except OSError as e:
      fix = "restore it, or remove it"
      raise invalid(str(path), ..., f"cannot be read: {e.strerror}", fix) from None
  taken = f"text files end in {', '.join(endings)}"
  return SplitFiles(str(base), files, kind, left_out_note(base, left_out, taken))
