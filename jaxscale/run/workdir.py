"""A run's record in its workdir, and whether a workdir holds the same experiment."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import MISSING
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxscale import cluster
from jaxscale.checkpoint import directory
from jaxscale.config import Config
from jaxscale.config.record import FORMAT, check_format, copy_own_files, to_plain
from jaxscale.errors import ConfigError
from jaxscale.experiment import build, microbatches
from jaxscale.metrics import write_json

# What may change when a run resumes: where it runs and what it records.
_NOT_IDENTITY = (
  "mesh", "layout", "evaluation", "checkpoint", "checks", "faults", "log",
  "target_accuracy", "target_loss", "stop_at_target", "input_threads",
  "exchange.algorithm", "exchange.dims", "exchange.links", "data.cache_dir",
)  # fmt: skip


def write_config(workdir: Path, described: dict[str, Any], config: Config) -> None:
  """Write config.json, with copies of the files that the user's own classes are in."""
  files = copy_own_files(config, workdir)
  write_json(workdir / "config.json", described | ({"files": files} if files else {}))


def describe(experiment: build.Experiment) -> dict[str, Any]:
  """The resolved config, what was derived from it, and the software, as JSON."""
  packages = ("jaxscale", "jax", "flax", "optax", "orbax-checkpoint", "grain")
  return {
    "format": FORMAT,
    "config": to_plain(experiment.config),
    "derived": experiment.derived._asdict()
    | {"phases": [phase._asdict() for phase in experiment.derived.phases]},
    "data": experiment.train_data.info._asdict(),
    "python": platform.python_version(),
    "versions": {name: metadata.version(name) for name in packages},
    "devices": [str(d) for d in jax.devices()],
    "processes": jax.process_count(),
  }


def describe_text(experiment: build.Experiment, workdir: Path) -> str:
  """The same for a person: one line per setting and per derived quantity."""
  lines = [f"jaxscale {metadata.version('jaxscale')}  workdir {workdir}", "config"]
  for field in dataclasses.fields(experiment.config):
    lines.append(f"  {field.name:24} {getattr(experiment.config, field.name)}")
  lines.append("derived")
  numbers = experiment.derived._asdict()
  phases = numbers.pop("phases")
  for name, value in numbers.items():
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    lines.append(f"  {name:24} {shown}")
  for phase in phases if len(phases) > 1 else ():
    size = f", images of {phase.image_size}" if phase.image_size else ""
    steps, batch = f"{phase.start + 1:,} to {phase.stop:,}", f"{phase.batch_size:,}"
    lines.append(f"  steps {steps}: batch {batch}{size}")
  if text := microbatches.device_summary(experiment.config, experiment.derived):
    lines.append(f"  {text}")
  lines += [f"  {note}" for note in experiment.notes]
  return "\n".join(lines)


def experiment_in(workdir: Path, config: Any) -> build.Experiment:
  """`build.experiment` for the run of a directory; all processes call it.

  Where the run began on another number of devices, its batches are spread over
  those there are now, so that none holds more examples at a time than then.

  Raises:
    ConfigError: data or devices do not fit the config, or the run.
  """
  return build.experiment(config, cluster.from_leader(start_devices(workdir, config)))


def start_devices(workdir: Path, config: Any) -> int | None:
  """Devices on which the run of a directory began, by its config.json.

  Until it has saved, whoever starts it begins anew: then it is the largest number
  that it was started on, this one included. The steps of each have the smallest
  micro-batches, and none has to have found memory for more.

  Args:
    workdir: of the run.
    config: of the run that resumes there.

  Returns:
    None: it begins now, or what is there is not its own (`claim_workdir` says so).
  """
  try:
    described = json.loads((workdir / "config.json").read_text())
    derived = described["derived"]
    start = int(derived.get("start_devices") or derived["num_devices"])
    if _another(described["config"], config):
      return None
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return None
  has_saved = directory.steps(workdir / "checkpoints")
  return start if has_saved else max(start, jax.device_count())


def claim_workdir(workdir: Path, config: Any) -> None:
  """Make the directory, or check that what it holds is this experiment.

  A setting that did not exist when the directory was made counts as its default.

  Raises:
    ConfigError: it cannot be made, or belongs to another experiment.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ConfigError(f"--workdir={workdir}: {e.strerror}, use another one") from None
  path = workdir / "config.json"
  if not path.exists():
    return
  try:
    described = json.loads(path.read_text())
    before = described["config"]
  except (ValueError, KeyError, TypeError):
    what = "its config.json is unreadable; use another one"
    raise ConfigError(f"--workdir={workdir}: {what}") from None
  check_format(described, workdir)
  if another := _another(before, config):
    raise ConfigError(
      f"--workdir={workdir}: holds another experiment, {another}; use another --workdir"
    )


def _another(before: dict[str, Any], config: Any) -> str | None:
  """What makes it another experiment: a setting, with its values then and now."""
  defaults = {
    f.name: to_plain(f.default if f.default_factory is MISSING else f.default_factory())
    for f in dataclasses.fields(config)
    if f.default is not MISSING or f.default_factory is not MISSING
  }
  before, now = defaults | before, to_plain(config)
  free: set[str] = set(_NOT_IDENTITY)
  if now["sync"].get("workers") == "replica":
    free.remove("mesh")  # else other devices would be one worker
  if config.model.is_stack and not now["noise_scale"]:
    # Nothing is random in these, and no statistics are a micro-batch's: a pipeline
    # may resume what was begun without micro-batches.
    free.add("accumulate_steps")
  for name, (old, new) in _differences(before, now).items():
    if not {name, name.split(".")[0]} & free:
      return f"{name} is {old!r} there and {new!r} now"
  return None


def _differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
  if isinstance(old, dict) and isinstance(new, dict):
    found = {}
    for name in {**old, **new}:
      path = f"{prefix}.{name}" if prefix else name
      found |= _differences(old.get(name), new.get(name), path)
    return found
  return {} if old == new else {prefix: (old, new)}
