"""Restore one shared checkpoint, read and verified by all processes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxscale import cluster
from jaxscale.checkpoint import checkpoint_files, checksum, reshard
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.errors import ConfigError
from jaxscale.metrics.log import logger
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.types import TrainState


def restore_step(
  path: Path, abstract: TrainState, resize: reshard.Resize | None, split: Split | None
) -> tuple[TrainState, dict[str, Any] | None]:
  """Load the state of a checkpoint, sharded as requested; all processes call it.

  Args:
    path: the path of the checkpoint.
    abstract: the requested state, as for `Checkpoints.restore`.
    resize: the conversion, as for `Checkpoints.restore`.
    split: how gradients are split now.

  Returns:
    The state, and the state of callbacks, None if it has none.

  Raises:
    DamagedError: in all processes, if any cannot read it, or its bytes have changed.
    ConfigError: it belongs to another experiment, or cannot be converted from its
      devices.
  """
  manifest = read_manifest(path)
  leaves = manifest["leaves"]
  other = reshard.find_reshard(manifest, abstract, resize, split)
  rows, saved = reshard.dealt_before(manifest, other.saved if other else abstract)
  checkpoint_files.check_same_leaves(path, leaves, checksum.describe(saved))
  if other and other.convert is None:
    raise ConfigError(f"{path}: {other.problem}")
  target = reshard.without_empty(other.to_load(abstract) if other else abstract)
  state = load_for_all(path, target, rows)
  checksum.verify(state, leaves, reshard.without_empty(saved), rows)
  state = reshard.with_empty(state, abstract)
  if other:
    state = other.apply(state, abstract)
    if cluster.is_leader():
      logger.info(f"checkpoint {path.name}: {other.summary()}")
  return state, manifest.get("callbacks")


def load_for_all(path: Path, abstract: Any, rows: checksum.Rows | None = None) -> Any:
  """Call `checkpoint_files.load` in all processes; if one cannot read it, none may use it.

  Raises:
    DamagedError: in all processes, if any cannot read it.
  """
  loaded, problem = None, None
  try:
    loaded = checkpoint_files.load(path, abstract, rows)
  except (DamagedError, OSError) as e:
    problem = str(e)
  if problems := [p for p in cluster.gather(problem) if p]:
    raise DamagedError(problems[0])
  return loaded


def read_manifest(path: Path) -> dict:
  """Read the manifest of a checkpoint in process 0, for all; all processes call it.

  Raises:
    DamagedError: in all processes, if the manifest is missing or has changed.
  """
  manifest, problem = None, None
  if cluster.is_leader():
    try:
      manifest = checkpoint_files.read_manifest(path)
      if checkpoint_files.is_unmerged(path):
        checkpoint_files.merge(path)
    except (DamagedError, OSError) as damage:
      problem = str(damage)
  manifest, problem = cluster.from_leader([manifest, problem])
  if problem:
    raise DamagedError(problem)
  return manifest
