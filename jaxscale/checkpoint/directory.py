"""List, prune and clean up a directory of checkpoints.

A directory whose name is a number is a committed checkpoint. All other names are temporary:
the run that holds, or held, lock token `<token>` writes to `<step>.tmp-<token>`;
`….removed` is being deleted; `<step>.damaged` is kept for inspection.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from jaxscale import metrics
from jaxscale.checkpoint import checkpoint_files
from jaxscale.errors import ConfigError
from jaxscale.files import whole_number

_PARTIAL, _REMOVED, _DAMAGED = ".tmp-", ".removed", ".damaged"


def steps(directory: Path) -> list[int]:
  """Return the steps that have a committed checkpoint, oldest first.

  Raises:
    ConfigError: the path is not a directory, or cannot be read.
    OSError: the disk or its server failed.
  """
  try:
    names = os.listdir(directory)
  except FileNotFoundError:
    return []
  except (NotADirectoryError, PermissionError) as e:
    remedy = "move it away, or use another --workdir"
    raise ConfigError(f"{directory}: {e.strerror}; {remedy}") from None
  numbers = ((name, whole_number(name)) for name in names)
  return sorted(n for name, n in numbers if n is not None and str(n) == name)


def partial_path(directory: Path, step: int, token: int) -> Path:
  """Return the path to which the owner of a token writes a checkpoint of this step."""
  return directory / f"{step}{_PARTIAL}{token}"


def prune(
  directory: Path,
  keep_last: int,
  keep_best: int,
  scores: dict[int, float | None],
  best_metric: str | None = None,
) -> None:
  """Delete checkpoints that are neither among the newest nor among the best.

  Damaged checkpoints and renamed copies do not count and are not deleted.

  Args:
    directory: the directory of checkpoints.
    keep_last: the number of newest checkpoints to keep.
    keep_best: the number of checkpoints with the highest score to keep in addition, the
      earliest of equal ones.
    scores: `metrics.score` by step, as far as it is known; missing scores are added.
    best_metric: the metric that the scores are of, from `metrics.signed`.
  """
  there = []
  for step in steps(directory):
    with contextlib.suppress(checkpoint_files.DamagedError):
      if step not in scores:
        manifest = checkpoint_files.read_manifest(directory / str(step))
        scores[step] = metrics.score(manifest["metrics"], best_metric)
      there.append(step)
  ranked = sorted((-x, step) for step in there if (x := scores[step]) is not None)
  best = {step for _, step in ranked[:keep_best]}
  for step in set(there) - set(there[-keep_last:]) - best:
    _remove(directory / str(step))


def remove_partial(directory: Path) -> None:
  """Delete what other runs left half-written or half-deleted.

  Each is renamed first, atomically. A process that still writes there can then no longer
  commit it, since the commit is a rename too, and its source no longer exists.
  """
  for name in os.listdir(directory):
    if _PARTIAL in name or _REMOVED in name:
      _remove(directory / name)


def mark_damaged(directory: Path, step: int) -> None:
  """Rename a damaged checkpoint, so that no run restores it."""
  earlier = len(list(directory.glob(f"{step}{_DAMAGED}*")))
  suffix = _DAMAGED + (f"-{earlier}" if earlier else "")
  (directory / str(step)).rename(directory / f"{step}{suffix}")


def has_damaged(directory: Path) -> bool:
  """Return whether there are damaged checkpoints."""
  return directory.exists() and any(directory.glob(f"*{_DAMAGED}*"))


def _remove(path: Path) -> None:
  """Delete under a name that is not a step, so that a partial checkpoint never looks whole."""
  gone = path.with_name(f".{path.name.lstrip('.')}{_REMOVED}")
  with contextlib.suppress(OSError):
    path.rename(gone)
  with contextlib.suppress(OSError):
    gone.unlink()  # It is a link or a file.
  shutil.rmtree(gone, ignore_errors=True)
