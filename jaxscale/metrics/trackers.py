"""Weights & Biases, MLflow and Trackio as a `Tracker`, by their public interfaces.

Each keeps one run of theirs per run of ours, over restarts. What they keep on this disk
is written anew from metrics.jsonl at each start: so it has every step once, also after
a kill, which takes what their buffers hold, and after a roll-back, which changes steps.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import message_of
from jaxscale.metrics.tracking import Tracker

# What a call of MLflow's REST API takes (mlflow.utils.validation).
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_VALUE = 1000, 100, 500
_MLFLOW_TAGS = {  # and what they have of the environment
  "mlflow.source.git.commit": "commit",
  "mlflow.source.name": "command",
  "jaxscale.host": "host",
}


def wandb_run(
  workdir: Path,
  run_id: str,
  config: dict[str, Any],
  online: bool,
  note: Callable[[str], None],
  flush_s: float,
  **options: Any,
) -> Tracker:
  """A run of Weights & Biases, in `workdir/wandb`.

  Offline, each start writes a new folder with all steps: of two folders of one run,
  `wandb sync` uploads the second over the first (wandb/wandb#5865, #3841). Where
  online fails, it is offline.

  Args:
    workdir: of the run.
    run_id: of the run there.
    config: shown with it.
    online: upload while it trains.
    note: takes a line for the user.
    flush_s: seconds that an upload may take at the end.
    options: of `wandb.init`.
  """
  import wandb  # pyright: ignore[reportMissingImports]

  # It shares the terminal with the run, and its process the cores.
  settings = wandb.Settings(
    silent=True, console="off", disable_git=True, disable_code=True, symlink=False,
    x_disable_stats=True, init_timeout=90, finish_timeout=flush_s, reinit="create_new",
  )  # fmt: skip
  wandb.setup(settings=wandb.Settings(silent=True))
  begin = functools.partial(
    wandb.init, id=run_id, dir=str(workdir), config=config, settings=settings,
    allow_val_change=True, **options,
  )  # fmt: skip
  if online:
    try:
      # Before it begins: there it would ask a terminal for a key that is missing, and
      # a run that did not reach its server cannot begin again offline.
      if not wandb.login(prompt=False, verify=True):
        raise wandb.Error("no API key (wandb login)")
    except wandb.Error as e:
      why = message_of(e)[:200]
      note(f"Weights & Biases: {why}; this start of the run is tracked offline")
      online = False
  text, first = "", -1
  if online:
    run = begin(mode="online", resume="allow")
    first = run.step - 1  # its server drops lines of steps before
  else:
    run = begin(mode="offline")
    folder = Path(run.dir).parent
    for old in folder.parent.glob(f"offline-run-*-{run_id}"):
      if old != folder:
        shutil.rmtree(old, ignore_errors=True)
    text = "Weights & Biases: to upload the run, from a machine with internet: "
    text += f"wandb sync {shlex.quote(str(folder))}"

  def log(step: int, time: float, values: dict[str, float]) -> None:
    run.log(values | {"_timestamp": time}, step=step)

  def finish(outcome: str) -> None:
    if outcome == "interrupted":
      run.mark_preempting()
    run.finish(exit_code=int(outcome == "failed"))

  return Tracker(log, finish, lambda name: first, text)


def mlflow_run(
  workdir: Path,
  run_id: str,
  name: str,
  config: dict[str, Any],
  environment: dict[str, Any],
  experiment: str,
  uri: str | None,
  note: Callable[[str], None],
) -> Tracker:
  """A run of MLflow, found again by its tag `jaxscale.id`.

  Args:
    workdir: of the run; MLflow's files are in `mlruns` there, where no URI is given.
    run_id: of the run.
    name: shown for it.
    config: its parameters there, by dotted names, of the first start.
    environment: of this start; what is not a tag is in `environment.json`.
    experiment: that it is in.
    uri: of the tracking server or store; None: MLFLOW_TRACKING_URI, if it is set.
    note: takes a line for the user.
  """
  # Its file store needs no database, which shared disks cannot hold; it is kept, but
  # gets nothing new (mlflow 3.7). Usage reports would need the internet.
  os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
  os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
  from mlflow.entities import (  # pyright: ignore[reportMissingImports]
    Metric,
    Param,
  )
  from mlflow.tracking import (  # pyright: ignore[reportMissingImports]
    MlflowClient,
  )

  # Each try without a route is a warning there; what fails in the end is one of ours.
  logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
  text = ""
  if not (uri := uri or os.environ.get("MLFLOW_TRACKING_URI")):
    uri = (workdir.absolute() / "mlruns").as_uri()
    show = "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri"
    text = f"MLflow: to see the run: {show} {shlex.quote(str(workdir / 'mlruns'))}"
  client = MlflowClient(tracking_uri=uri)
  found = client.get_experiment_by_name(experiment)
  group = found.experiment_id if found else client.create_experiment(experiment)
  runs = client.search_runs([group], f"tags.`jaxscale.id` = '{run_id}'")
  if runs:
    run = runs[0].info.run_id
    client.update_run(run, status="RUNNING")
  else:
    tags = {"jaxscale.id": run_id}
    run = client.create_run(group, tags=tags, run_name=name).info.run_id
    params = [Param(k, str(v)[:_MLFLOW_VALUE]) for k, v in flattened(config).items()]
    for i in range(0, len(params), _MLFLOW_PARAMS):
      client.log_batch(run, params=params[i : i + _MLFLOW_PARAMS])
  for tag, of in _MLFLOW_TAGS.items():
    client.set_tag(run, tag, str(environment.get(of))[:_MLFLOW_VALUE])
  try:
    client.log_text(run, json.dumps(environment, indent=2), "environment.json")
  except Exception as e:  # files may be where this host cannot write
    why = message_of(e)[:200]
    note(f"MLflow: environment.json is not there: {type(e).__name__}: {why}")

  def log(step: int, time: float, values: dict[str, float]) -> None:
    at = int(1000 * time)
    batch = [Metric(_mlflow_name(n), x, at, step) for n, x in values.items()]
    for i in range(0, len(batch), _MLFLOW_METRICS):
      client.log_batch(run, metrics=batch[i : i + _MLFLOW_METRICS])

  @functools.cache
  def known(name: str) -> int:
    history = client.get_metric_history(run, _mlflow_name(name))
    return max((m.step for m in history), default=-1)

  def finish(outcome: str) -> None:
    status = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
    client.set_tag(run, "jaxscale.outcome", outcome)
    client.set_terminated(run, status[outcome])

  return Tracker(log, finish, known, text)


def _mlflow_name(name: str) -> str:
  """Without what MLflow takes in no name of a metric."""
  return re.sub(r"[^\w\-./: ]", "_", name)[:250]


def trackio_run(run_id: str, config: dict[str, Any], project: str) -> Tracker:
  """A run of Trackio in its database on this machine: TRACKIO_DIR, or the home.

  Args:
    run_id: its name there.
    config: shown with it.
    project: that it is in.
  """
  import trackio  # pyright: ignore[reportMissingImports]

  try:
    before = [run for run in trackio.Api().runs(project) if run.name == run_id]
  except ValueError:  # there is no such project
    before = []
  for run in before:
    run.delete()
  run = trackio.init(
    project, name=run_id, config=config, embed=False, auto_log_gpu=False,
    auto_log_cpu=False,
  )  # fmt: skip
  project = shlex.quote(project)
  text = f"Trackio: to see the run: trackio show --project {project}; to upload it: "
  text += f"trackio sync --project {project} --space-id USER/NAME"
  return Tracker(
    lambda step, time, values: run.log(values, step=step),
    lambda outcome: run.finish(),
    lambda name: -1,
    text,
  )


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """The leaves of nested objects, by dotted names.

  Example:
    >>> flattened({"model": {"class": "MLP", "hidden": [64]}, "seed": 0})
    {'model.class': 'MLP', 'model.hidden': [64], 'seed': 0}
  """
  flat = {}
  for name, value in tree.items():
    is_inner = isinstance(value, Mapping) and value
    flat |= flattened(value, f"{prefix}{name}.") if is_inner else {prefix + name: value}
  return flat
