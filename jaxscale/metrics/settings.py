"""Settings of the built-in trackers; their packages are imported only when a run uses them.

A run is one run of the tracker, over all restarts. The local files of Weights & Biases
are written again from metrics.jsonl at each start, so that they have every step once even
after a kill, which loses buffered steps, or a rollback, which replaces steps.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, Literal

from jaxscale import metrics  # Lazy: its names load on first use.
from jaxscale.config.bases import Tracker, TrackerContext
from jaxscale.config.record import flat
from jaxscale.errors import message_of

# The names for --config.log.trackers= (HOMES in config/choice.py lists this module).
__all__ = ["MLflow", "Wandb"]

# Limits of one call of MLflow's REST API (mlflow.utils.validation).
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_VALUE = 1000, 100, 500
_MLFLOW_TAGS = {  # MLflow's tag to the entry of `TrackerContext.environment`.
  "mlflow.source.git.commit": "commit",
  "mlflow.source.name": "command",
  "jaxscale.host": "host",
}


class Wandb(Tracker):
  """Weights & Biases; the API key comes from WANDB_API_KEY or `wandb login`.

  Attributes:
    project: the name of the W&B project.
    entity: the W&B user or team that owns the project; None uses W&B's default.
    mode: the mode; "offline" writes to `wandb/` in the workdir, to be uploaded by `wandb sync`,
      "online" uploads during training.
    group: the name of the W&B group of this run; None sets no group.
    tags: the tags of the run; () sets none.
  """

  project: str = "jaxscale"
  entity: str | None = None
  mode: Literal["offline", "online"] = "offline"
  group: str | None = None
  tags: tuple[str, ...] = ()

  package, install = "wandb", "jaxscale[wandb]"

  def build(self, context: TrackerContext):
    """Open the run in `workdir/wandb`, offline if W&B cannot be reached.

    Offline, each start writes a new folder with all steps: if a run has two folders, `wandb
    sync` uploads the second over the first (wandb/wandb#5865, #3841).
    """
    import wandb  # pyright: ignore[reportMissingImports]

    # W&B shares the terminal and the cores with the run, so it stays quiet.
    quiet = dict(silent=True, console="off", disable_git=True, disable_code=True, symlink=False)
    limits = dict(x_disable_stats=True, init_timeout=90, finish_timeout=self.flush_s)
    settings = wandb.Settings(**quiet, **limits, reinit="create_new")
    wandb.setup(settings=wandb.Settings(silent=True))
    home = dict(project=self.project, entity=self.entity, group=self.group, tags=self.tags)
    run_of = dict(id=context.id, name=context.name, dir=str(context.workdir), allow_val_change=True)
    described = context.config | {"environment": context.environment}
    begin = functools.partial(wandb.init, **home, **run_of, config=described, settings=settings)
    text, first = "", -1
    if self.mode == "online" and _is_reached(wandb, context):
      run = begin(mode="online", resume="allow")
      first = run.step - 1  # W&B's server drops records of earlier steps.
    else:
      run = begin(mode="offline")
      folder = Path(run.dir).parent
      for old in folder.parent.glob(f"offline-run-*-{context.id}"):
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

    return metrics.Tracker(log, finish, lambda name: first, text)


def _is_reached(wandb: Any, context: TrackerContext) -> bool:
  """Return whether W&B's server accepts the key; a note says why if not.

  The check comes before the run begins: W&B would ask a terminal for a missing key, and a
  run whose server is not reached cannot begin again offline.
  """
  try:
    if not wandb.login(prompt=False, verify=True):
      raise wandb.Error("no API key (wandb login)")
  except wandb.Error as e:
    problem = message_of(e)[:200]
    context.note(f"Weights & Biases: {problem}; this start of the run is tracked offline")
    return False
  return True


class MLflow(Tracker):
  """MLflow; MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD set user and password.

  Attributes:
    experiment: the name of the MLflow experiment.
    uri: the address of a tracking server or store; None uses MLFLOW_TRACKING_URI if it is
      set, else files in `mlruns/` in the workdir.
  """

  experiment: str = "jaxscale"
  uri: str | None = None

  package, install = "mlflow", "jaxscale[mlflow]"

  def build(self, context: TrackerContext):
    """Open the run with the tag `jaxscale.id`, or create it."""
    # MLflow's file store needs no database, which shared disks cannot hold; it still works,
    # but is no longer developed (mlflow 3.7). Telemetry would need the internet.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    # urllib3 warns of each retry; the tracker reports the final failure.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    text, uri = "", self.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
      files = context.workdir / "mlruns"
      uri = files.absolute().as_uri()
      show = "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri"
      text = f"MLflow: to see the run: {show} {shlex.quote(str(files))}"
    client = MlflowClient(tracking_uri=uri)
    run = self._run(client, context)
    for tag, name in _MLFLOW_TAGS.items():
      client.set_tag(run, tag, str(context.environment.get(name))[:_MLFLOW_VALUE])
    try:
      client.log_text(run, json.dumps(context.environment, indent=2), "environment.json")
    except Exception as e:  # The artifact store may not be writable from this host.
      problem = f"{type(e).__name__}: {message_of(e)[:200]}"
      context.note(f"MLflow: could not save environment.json: {problem}")

    def log(step: int, time: float, values: dict[str, float]) -> None:
      at = int(1000 * time)
      batch = [Metric(_mlflow_name(n), x, at, step) for n, x in values.items()]
      for i in range(0, len(batch), _MLFLOW_METRICS):
        client.log_batch(run, metrics=batch[i : i + _MLFLOW_METRICS])

    @functools.cache
    def known(name: str) -> int:
      return max((m.step for m in client.get_metric_history(run, _mlflow_name(name))), default=-1)

    def finish(outcome: str) -> None:
      status = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
      client.set_tag(run, "jaxscale.outcome", outcome)
      client.set_terminated(run, status[outcome])

    return metrics.Tracker(log, finish, known, text)

  def _run(self, client: Any, context: TrackerContext) -> str:
    """Return MLflow's id of the run; the parameters are those of the first start."""
    from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

    known = client.get_experiment_by_name(self.experiment)
    group = known.experiment_id if known else client.create_experiment(self.experiment)
    runs = client.search_runs([group], f"tags.`jaxscale.id` = '{context.id}'")
    if runs:
      run = runs[0].info.run_id
      client.update_run(run, status="RUNNING")
      return run
    tags = {"jaxscale.id": context.id}
    run = client.create_run(group, tags=tags, run_name=context.name).info.run_id
    settings = flat(context.config)
    params = [Param(name, str(x)[:_MLFLOW_VALUE]) for name, x in settings.items()]
    for i in range(0, len(params), _MLFLOW_PARAMS):
      client.log_batch(run, params=params[i : i + _MLFLOW_PARAMS])
    return run


def _mlflow_name(name: str) -> str:
  """Replace characters that MLflow does not allow in the name of a metric."""
  return re.sub(r"[^\w\-./: ]", "_", name)[:250]
