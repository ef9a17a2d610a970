"""Load the parameters of a checkpoint, without the optimizer state.

Only what is evaluated is read from disk: with AdamW, one array in three.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import cluster
from jaxscale.checkpoint import checkpoint_files, checksum, restore
from jaxscale.checkpoint import directory as checkpoint_dir
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.errors import ConfigError
from jaxscale.files import read_json
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.trainable import merge


class LoadedParams(NamedTuple):
  """Parameters of a checkpoint.

  Attributes:
    params: the parameters.
    model_state: the model state that belongs to them.
    step: the step of the checkpoint.
    notes: one line for each newer checkpoint that is damaged.
  """

  params: Any
  model_state: Any
  step: int
  notes: tuple[str, ...]


def load(
  workdir: str | Path,
  params: Any,
  model_state: Any = None,
  *,
  step: int | str | None = None,
  take: str | None = None,
) -> LoadedParams:
  """Load the parameters and the model state of a checkpoint; all processes call it.

  Damaged checkpoints are skipped and left in place; only the run itself renames them.

  Args:
    workdir: the workdir of a run.
    params: the shapes, dtypes and shardings of the parameters; without shardings they are
      put on this process's first device.
    model_state: the model state, in the same form; None if the model has none.
    step: the step of the checkpoint; "best" selects the best by `checkpoint.best_metric`, and
      None the newest intact one.
    take: "params" or "average"; None selects the average if the run keeps one, as
      evaluations do.

  Raises:
    ConfigError: there is no intact checkpoint, or it belongs to another model.
  """
  directory = (Path(workdir) / "checkpoints").absolute()
  steps = saved_steps(workdir, step)
  first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def sharded(x):
    sharding = getattr(x, "sharding", None) or first_device
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  params, model_state = jax.tree.map(sharded, (params, model_state))
  notes = []
  for step in reversed(steps):
    try:
      loaded = _load(directory / str(step), params, model_state, take)
      return LoadedParams(*loaded, step, tuple(notes))
    except DamagedError as damage:
      notes.append(f"skipping checkpoint {step}, which is damaged ({damage})")
  raise ConfigError(f"{directory}: all checkpoints are damaged; {notes[-1]}")


def saved_steps(workdir: str | Path, step: int | str | None = None) -> list[int]:
  """Return the steps of the saved checkpoints, or only `step`; all processes call it.

  Raises:
    ConfigError: no checkpoint is saved, or none of this step, or the best is not known.
  """
  steps = cluster.from_leader(checkpoint_dir.steps((Path(workdir) / "checkpoints").absolute()))
  if not steps:
    problem = "the run has no checkpoint yet; give the workdir of a run that has saved one"
    raise ConfigError(f"{workdir}: {problem}")
  if step == "best":
    summary = read_json(Path(workdir) / "summary.json", {"best_step": int})
    step = cluster.from_leader(summary.get("best_step", step))
  if step not in (None, *steps):
    saved = ", ".join(map(str, steps))
    hint = " (best needs checkpoint.best_metric, and a summary.json)" * (step == "best")
    raise ConfigError(f"step={step}: no checkpoint of this step{hint}; use one of {saved}")
  return steps if step is None else [int(step)]


def chosen(leaves: dict[str, Any], take: str | None) -> str:
  """Return "params" or "average", by what a checkpoint has.

  Raises:
    ConfigError: the average is requested, but the run keeps none.
  """
  has_average = any(name.startswith("average/0") for name in leaves)
  if take == "average" and not has_average:
    problem = "the run keeps no average (Config.ema_decay=None); use take=params"
    raise ConfigError(f"take=average: {problem}")
  return take or ("average" if has_average else "params")


def _load(path: Path, params: Any, model_state: Any, take: str | None) -> tuple[Any, Any]:
  leaves = restore.read_manifest(path)["leaves"]
  # Orbax stores nothing for a model without state.
  state = model_state if jax.tree.leaves(model_state) else {}
  if is_average := chosen(leaves, take) == "average":
    # Frozen parameters have no average.
    part = _only(params, lambda name: f"average/0/{name}" in leaves)
    frozen = _only(params, lambda name: f"average/0/{name}" not in leaves)
    abstract = {"average": [part, state]} | ({"params": frozen} if jax.tree.leaves(frozen) else {})
  else:
    abstract = {"params": params} | ({"model_state": state} if state else {})
  requested = checksum.describe(abstract)
  parts = {"average"} if is_average else {"params", "model_state"}
  saved = {n: x for n, x in leaves.items() if n.partition("/")[0] in parts or n in requested}
  checkpoint_files.check_same_leaves(path, saved, requested)
  loaded = restore.load_for_all(path, abstract)
  checksum.verify(loaded, leaves)
  if is_average:
    part, loaded_state = loaded["average"]
    params = merge(part, loaded.get("params", params))
  else:
    params, loaded_state = loaded["params"], loaded.get("model_state")
  return params, loaded_state if state else model_state


def _only(params: Any, is_kept: Callable[[str], bool]) -> Any:
  """Return a tree with None in place of leaves whose path is not kept."""
  return jax.tree.map_with_path(lambda path, x: x if is_kept(path_name(path)) else None, params)
