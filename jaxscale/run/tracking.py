"""The trackers of a run: which there are, and what of the run they are given."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import secrets
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from jaxscale import metrics
from jaxscale.config import Config, ConfigError, TrackerContext
from jaxscale.config.bases import Tracker
from jaxscale.config.record import to_plain
from jaxscale.experiment.own_classes import build
from jaxscale.files import read_json, write_json
from jaxscale.run import provenance

FILE = "tracking.json"  # in the workdir: the id that trackers know the run by


def check_packages(config: Config) -> None:
  """Refuse trackers whose package is not installed here.

  Raises:
    ConfigError: its line says what to install.
  """
  for tracker in config.log.trackers:
    if tracker.package and not _is_installed(tracker.package):
      name, package = type(tracker).__name__, tracker.package
      missing = f"needs the package {package}, which {sys.executable} lacks"
      remedy = f"pip install '{tracker.install or package}', or leave it out"
      raise ConfigError(f"Config.log.trackers: {name} {missing}; {remedy}")


def _is_installed(package: str) -> bool:
  try:
    spec = importlib.util.find_spec(package)
  except ModuleNotFoundError:  # of `a.b`, a
    return False
  # A mere folder of that name, as W&B leaves where it runs, has no file to load.
  return spec is not None and spec.origin is not None


def sources(config: Config, workdir: Path) -> list[metrics.TrackerSource]:
  """The trackers of a run, for its `MetricWriter`; process 0 calls it."""
  if not config.log.trackers:
    return []
  run_id = tracked_id(workdir)

  def opened(tracker: Tracker, note: Callable[[str], None]) -> metrics.Tracker:
    name = workdir.absolute().name
    facts = to_plain(config), _environment(), note
    context = TrackerContext(run_id, name, workdir, *facts)
    return build(tracker, context, kind=metrics.Tracker, wanted="a metrics.Tracker")

  return [
    metrics.TrackerSource(type(t).__name__, functools.partial(opened, t), t.flush_s)
    for t in config.log.trackers
  ]


def tracked_id(workdir: Path) -> str:
  """The id that trackers know the run by; made at its first start, and kept.

  Where the file is damaged it is made anew: trackers begin another run, with all of
  metrics.jsonl.
  """
  known = read_json(workdir / FILE, {"id": str}).get("id", "")
  if re.fullmatch(r"[\w-]{1,64}", known, re.ASCII):
    return known
  name = re.sub(r"[^\w-]+", "-", workdir.absolute().name, flags=re.ASCII)[:40]
  made = f"{name}-{secrets.token_hex(4)}"
  with contextlib.suppress(OSError):  # a full disk costs this, not the run
    write_json(workdir / FILE, {"id": made})
  return made


@functools.cache
def _environment() -> dict:
  return provenance.environment() | {"command": shlex.join(sys.orig_argv)}
