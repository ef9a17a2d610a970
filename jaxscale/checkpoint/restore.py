"""One shared checkpoint, read and verified by all processes together."""

from __future__ import annotations

from pathlib import Path

from jaxscale import cluster
from jaxscale.checkpoint import checkpoint_files, checksum, reshard
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.errors import ConfigError
from jaxscale.metrics.log import logger
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.types import TrainState


def restore_step(
  path: Path, abstract: TrainState, resize: reshard.Resize | None, split: Split | None
) -> TrainState:
  """The state of a checkpoint, sharded as asked for; all processes call it.

  Args:
    path: of the checkpoint.
    abstract: as of `Checkpoints.restore`.
    resize: likewise.
    split: how gradients are split here.

  Raises:
    DamagedError: in all, if any process cannot read it, or its bytes have changed.
    ConfigError: it is of another experiment, or of devices that it cannot be
      converted from.
  """
  manifest = _read_manifest(path)
  leaves = manifest["leaves"]
  other = reshard.find_reshard(manifest, abstract, resize, split)
  saved = other.saved if other else abstract
  checkpoint_files.check_same_leaves(path, leaves, checksum.describe(saved))
  if other and other.convert is None:
    raise ConfigError(f"{path}: {other.why}")
  state, problem = None, None
  try:
    wanted = reshard.without_empty(other.to_load(abstract) if other else abstract)
    state = checkpoint_files.load(path, wanted, pad=other is not None)
  except (DamagedError, OSError) as e:
    problem = str(e)
  # What one process cannot read, none may resume from.
  if problems := [p for p in cluster.gather(problem) if p]:
    raise DamagedError(problems[0])
  checksum.verify(state, leaves, reshard.without_empty(saved))
  assert state is not None
  state = reshard.with_empty(state, abstract)
  if other:
    state = other.apply(state, abstract)
    if cluster.is_leader():
      logger.info(f"checkpoint {path.name}: {other.summary()}")
  return state


def _read_manifest(path: Path) -> dict:
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
