"""Trackers of a run, and the information that they get."""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from jaxscale import metrics
from jaxscale.cluster.environment import is_installed
from jaxscale.config import Config, ConfigError, TrackerContext
from jaxscale.config.bases import Tracker
from jaxscale.config.record import to_plain
from jaxscale.experiment.own_classes import build
from jaxscale.files import read_json, write_json
from jaxscale.run import provenance

FILE = "tracking.json"  # in the workdir: the run's id in trackers


def check_packages(config: Config) -> None:
  """Check that the packages of all trackers are installed.

  Raises:
    ConfigError: a package is missing; the message says how to install it.
  """
  for x in config.log.trackers:
    if (package := x.package) and not is_installed(package):
      missing = f"{type(x).__name__} needs the package {package}, which {sys.executable} lacks"
      remedy = f"run pip install '{x.install or package}', or remove the tracker"
      raise ConfigError(f"Config.log.trackers: {missing}; {remedy}")


def sources(config: Config, workdir: Path) -> list[metrics.TrackerSource]:
  """Return the trackers of a run for its `MetricWriter`; process 0 calls it."""
  if not config.log.trackers:
    return []
  run_id = tracked_id(workdir)

  def opened(tracker: Tracker, note: Callable[[str], None]) -> metrics.Tracker:
    facts = to_plain(config), _environment(), note
    context = TrackerContext(run_id, workdir.absolute().name, workdir, *facts)
    return build(tracker, context, kind=metrics.Tracker, expected="a metrics.Tracker")

  return [
    metrics.TrackerSource(type(t).__name__, functools.partial(opened, t), t.flush_s)
    for t in config.log.trackers
  ]


def tracked_id(workdir: Path) -> str:
  """Return the run's id in trackers, which is created at its first start.

  If the file is damaged, a new id is created, so trackers begin a new run and get all of
  metrics.jsonl.
  """
  known = read_json(workdir / FILE, {"id": str}).get("id", "")
  if re.fullmatch(r"[\w-]{1,64}", known, re.ASCII):
    return known
  name = re.sub(r"[^\w-]+", "-", workdir.absolute().name, flags=re.ASCII)[:40]
  made = f"{name}-{secrets.token_hex(4)}"
  with contextlib.suppress(OSError):  # A full disk costs the id, not the run.
    write_json(workdir / FILE, {"id": made})
  return made


@functools.cache
def _environment() -> dict:
  return provenance.environment() | {"command": provenance.command()}
