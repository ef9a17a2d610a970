"""Load the parameters of a run's newest checkpoint, without the optimizer state.

Only the parameters are read from disk: with AdamW, one array in three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale.checkpoint import checkpoint_files, checksum
from jaxscale.checkpoint import directory as checkpoint_dir
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.errors import ConfigError


class LoadedParams(NamedTuple):
  """Parameters of a checkpoint.

  Attributes:
    params: the parameters that the run evaluates: their average if the run keeps one.
    step: the step of the checkpoint.
    notes: one line for each newer checkpoint that is damaged.
  """

  params: Any
  step: int
  notes: tuple[str, ...]


def newest_params(workdir: str | Path, abstract: Any) -> LoadedParams:
  """Load the evaluated parameters of the newest intact checkpoint.

  Damaged checkpoints are skipped and left in place; only the run itself renames them.

  Args:
    workdir: the workdir of a run.
    abstract: the shapes, dtypes and shardings of the parameters; without shardings they
      are put on this process's first device.

  Raises:
    ConfigError: there is no intact checkpoint, or it belongs to another model.
  """
  directory = (Path(workdir) / "checkpoints").absolute()
  steps = checkpoint_dir.steps(directory)
  if not steps:
    problem = "the run has no checkpoint yet; give the workdir of a run that has saved one"
    raise ConfigError(f"--workdir={workdir}: {problem}")
  first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def sharded(x):
    sharding = getattr(x, "sharding", None) or first_device
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  abstract = jax.tree.map(sharded, abstract)
  notes = []
  for step in reversed(steps):
    try:
      return LoadedParams(_load(directory / str(step), abstract), step, tuple(notes))
    except DamagedError as damage:
      notes.append(f"skipping checkpoint {step}, which is damaged ({damage})")
  raise ConfigError(f"{directory}: all checkpoints are damaged; {notes[-1]}")


def _load(path: Path, abstract: Any) -> Any:
  leaves = checkpoint_files.read_manifest(path)["leaves"]
  prefix, abstract_params = "params/", {"params": abstract}
  if averaged := any(name.startswith("average/0/") for name in leaves):
    # The average covers (params, model_state), but a stack of layers has no model_state.
    prefix, abstract_params = "average/0/", {"average": [abstract, {}]}
  saved = {name: leaf for name, leaf in leaves.items() if name.startswith(prefix)}
  checkpoint_files.check_same_leaves(path, saved, checksum.describe(abstract_params))
  loaded = checkpoint_files.load(path, abstract_params, partial=True)
  checksum.verify(loaded, leaves)
  return loaded["average"][0] if averaged else loaded["params"]
