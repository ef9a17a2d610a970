"""A directory of checkpoints: which are there, which go, what is swept, set aside.

A name that is a number is a checkpoint that was committed. All else is on its way:
`<step>.tmp-<token>` is being written by the run that holds, or held, that token of
the lease; `….removed` is being deleted; `<step>.damaged` is kept for a person.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from jaxscale import metrics
from jaxscale.checkpoint import files

_UNDER_WAY, _REMOVED, _DAMAGED = ".tmp-", ".removed", ".damaged"


def steps(directory: Path) -> list[int]:
  """Steps that have a committed checkpoint, oldest first."""
  if not directory.exists():
    return []
  return sorted(int(name) for name in os.listdir(directory) if name.isdigit())


def under_way(directory: Path, step: int, token: int) -> Path:
  """Where the holder of a token writes a checkpoint of this step."""
  return directory / f"{step}{_UNDER_WAY}{token}"


def prune(
  directory: Path, keep_last: int, keep_best: int, scores: dict[int, float | None]
) -> None:
  """Delete what is neither among the last nor among the best.

  Args:
    directory: of the checkpoints.
    keep_last: how many of the newest stay.
    keep_best: how many of those with the highest score stay as well.
    scores: what is known of `metrics.score` by step; added to.
  """
  there = steps(directory)
  for step in there:
    if step not in scores:
      scores[step] = _score(directory / str(step))
  ranked = sorted((x, s) for s in there if (x := scores[s]) is not None)
  best = {step for _, step in ranked[max(len(ranked) - keep_best, 0) :]}
  for step in set(there) - set(there[-keep_last:]) - best:
    _remove(directory / str(step))


def sweep(directory: Path) -> None:
  """Delete what other runs left half-written or half-deleted.

  Each is renamed first, in one go: whoever still writes there can then not commit
  it, since the commit is a rename too, and finds nothing to rename.
  """
  for name in os.listdir(directory):
    if _UNDER_WAY in name or _REMOVED in name:
      _remove(directory / name)


def set_aside(directory: Path, step: int) -> None:
  """Keep a damaged checkpoint where no run takes it for one."""
  earlier = len(list(directory.glob(f"{step}{_DAMAGED}*")))
  suffix = _DAMAGED + (f"-{earlier}" if earlier else "")
  (directory / str(step)).rename(directory / f"{step}{suffix}")


def has_damaged(directory: Path) -> bool:
  """Whether some were set aside."""
  return directory.exists() and any(directory.glob(f"*{_DAMAGED}*"))


def _remove(path: Path) -> None:
  """Delete, under a name that is no step: half a checkpoint must not look whole."""
  gone = path.with_name(f".{path.name.lstrip('.')}{_REMOVED}")
  with contextlib.suppress(OSError):
    path.rename(gone)
  shutil.rmtree(gone, ignore_errors=True)


def _score(path: Path) -> float | None:
  try:
    return metrics.score(files.read_manifest(path)["metrics"])
  except files.DamagedError:
    return None
