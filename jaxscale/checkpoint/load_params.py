"""The parameters of a run's newest checkpoint, without its optimizer.

No more than those is read from the disk: of AdamW's three copies one.
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
    params: those that the run evaluates: their average, where it keeps one.
    step: of the checkpoint.
    notes: one line for each newer checkpoint that is damaged.
  """

  params: Any
  step: int
  notes: tuple[str, ...]


def newest_params(workdir: str | Path, abstract: Any) -> LoadedParams:
  """The evaluated parameters of the newest intact checkpoint.

  Damaged ones are skipped and left in place: the run itself renames them.

  Args:
    workdir: of a run.
    abstract: shapes, dtypes and shardings of the parameters; without shardings they
      are put on this process's first device.

  Raises:
    ConfigError: there is no checkpoint, no intact one, or it is of another model.
  """
  directory = (Path(workdir) / "checkpoints").absolute()
  steps = checkpoint_dir.steps(directory)
  if not steps:
    why = "there is no checkpoint in it, give the directory of a run that has saved one"
    raise ConfigError(f"--workdir={workdir}: {why}")
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
      notes.append(f"checkpoint {step} is damaged ({damage}), skipped")
  raise ConfigError(f"{directory}: no checkpoint there is intact; {notes[-1]}")


def _load(path: Path, abstract: Any) -> Any:
  leaves = checkpoint_files.read_manifest(path)["leaves"]
  prefix, wanted = "params/", {"params": abstract}
  if averaged := any(name.startswith("average/0/") for name in leaves):
    # An average is of (params, model_state), of which a stack of layers has none.
    prefix, wanted = "average/0/", {"average": [abstract, {}]}
  saved = {name: leaf for name, leaf in leaves.items() if name.startswith(prefix)}
  checkpoint_files.check_same_leaves(path, saved, checksum.describe(wanted))
  loaded = checkpoint_files.load(path, wanted, partial=True)
  checksum.verify(loaded, leaves)
  return loaded["average"][0] if averaged else loaded["params"]
