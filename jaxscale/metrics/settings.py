"""Settings of the built-in trackers; they load without the packages of any."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from jaxscale import metrics  # whose names load when they are asked for
from jaxscale.config.bases import Tracker, TrackerContext
from jaxscale.errors import ConfigError

# The names that --config.log.trackers= takes (by HOMES in config/choice.py).
__all__ = ["MLflow", "Prometheus", "Trackio", "Wandb"]


class Wandb(Tracker):
  """Weights & Biases; its key is WANDB_API_KEY or that of `wandb login`.

  Attributes:
    project: that the run is in.
    entity: the user or team of the project; None: W&B's default.
    mode: "offline" writes to `wandb/` in the workdir, for `wandb sync`; "online"
      uploads while the run trains.
    group: of runs.
    tags: of the run.
  """

  project: str = "jaxscale"
  entity: str | None = None
  mode: Literal["offline", "online"] = "offline"
  group: str | None = None
  tags: tuple[str, ...] = ()

  package, install = "wandb", "jaxscale[wandb]"

  def build(self, context: TrackerContext):
    return metrics.wandb_run(
      context.workdir,
      context.id,
      context.config | {"environment": context.environment},
      self.mode == "online",
      context.note,
      self.flush_s,
      name=context.name,
      project=self.project,
      entity=self.entity,
      group=self.group,
      tags=self.tags,
    )


class MLflow(Tracker):
  """MLflow; its user and password are variables, such as MLFLOW_TRACKING_USERNAME.

  Attributes:
    experiment: that the run is in.
    uri: of a tracking server or store; None: MLFLOW_TRACKING_URI if it is set, else
      files in `mlruns/` in the workdir.
  """

  experiment: str = "jaxscale"
  uri: str | None = None

  package, install = "mlflow", "jaxscale[mlflow]"

  def __post_init__(self):
    if self.uri and urlsplit(self.uri).password:
      why = "config.json would hold its password; set MLFLOW_TRACKING_USERNAME and "
      raise ConfigError(f"MLflow.uri: {why}MLFLOW_TRACKING_PASSWORD")

  def build(self, context: TrackerContext):
    return metrics.mlflow_run(
      context.workdir,
      context.id,
      context.name,
      context.config,
      context.environment,
      self.experiment,
      self.uri,
      context.note,
    )


class Trackio(Tracker):
  """Trackio, in its database in TRACKIO_DIR (~/.cache/huggingface/trackio).

  Attributes:
    project: that the run is in.
  """

  project: str = "jaxscale"

  package, install = "trackio", "jaxscale[trackio]"

  def build(self, context: TrackerContext):
    config = context.config | {"environment": context.environment}
    return metrics.trackio_run(context.id, config, self.project)


class Prometheus(Tracker):
  """The newest values as a text file for Prometheus' node_exporter.

  Attributes:
    directory: of its textfile collector, on the host of process 0.
  """

  directory: str

  def build(self, context: TrackerContext):
    return metrics.prometheus_file(Path(self.directory), context.id)
