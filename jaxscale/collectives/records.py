"""Measurements of collectives: alpha and beta fitted to them, and their file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.collectives.dims import Dim
from jaxscale.collectives.plan import ALGORITHMS, Link, Measured, Plan
from jaxscale.errors import ConfigError


def fit_link(
  num_devices: int, num_bytes: Sequence[float], seconds: Sequence[float]
) -> Link:
  """Alpha and beta of an axis from all-reduces by one ring along it.

  T = 2 (n - 1) (alpha + beta M / n), least squares of relative errors, so that small
  messages count as much as large ones; neither below zero.

  Args:
    num_devices: n >= 2, along the axis.
    num_bytes: M, of the payload of each measurement.
    seconds: T, of each.

  Example:
    >>> link = fit_link(4, [4e3, 4e6], [6 * (1e-6 + 1e-6), 6 * (1e-6 + 1e-3)])
    >>> round(link.alpha, 9), round(link.beta, 12)
    (1e-06, 1e-09)
  """
  steps = 2 * (num_devices - 1)
  times = np.maximum(np.asarray(seconds, float), 1e-9)
  rows = np.stack([np.ones_like(times), np.asarray(num_bytes) / num_devices], axis=1)
  rows = rows * (steps / times)[:, None]
  ones = np.ones_like(times)
  alpha, beta = np.linalg.lstsq(rows, ones, rcond=None)[0]
  # At the edge of what is allowed, one is zero and the other fits alone.
  if alpha < 0:
    alpha, beta = 0.0, _alone(rows[:, 1])
  elif beta < 0:
    alpha, beta = _alone(rows[:, 0]), 0.0
  return Link(float(alpha), float(beta))


def _alone(row: np.ndarray) -> float:
  return float(row.sum() / (row @ row)) if row.any() else 0.0


def write_measurements(
  path: str | Path,
  sizes: Mapping[str, int],
  links: Mapping[str, Link],
  measured: Sequence[Measured],
  **extra: Any,
) -> None:
  """Write what the benchmark found, as JSON."""
  record = {
    "mesh": dict(sizes),
    "links": {axis: link._asdict() for axis, link in links.items()},
    "measured": [
      {
        "num_bytes": m.num_bytes,
        "algorithm": m.plan.algorithm,
        "dims": [d._asdict() for d in m.plan.dims],
        "seconds": m.plan.seconds,
      }
      for m in measured
    ],
    **extra,
  }
  Path(path).write_text(json.dumps(record, indent=1) + "\n")


def read_measurements(path: str | Path) -> tuple[dict[str, Link], list[Measured]]:
  """Links and measurements of a file that the benchmark wrote, for `plan`.

  Args:
    path: of `jaxscale bench --json PATH`.

  Raises:
    ConfigError: no such file, or not one of the benchmark's.

  Example:
    >>> links, measured = read_measurements("links.json")   # doctest: +SKIP
    >>> plan(mesh.shape, 102e6, links=links, measured=measured)   # doctest: +SKIP
  """
  try:
    record = json.loads(Path(path).read_text())
    sizes = {str(a): int(n) for a, n in record["mesh"].items()}
    links = {
      str(a): Link(float(x["alpha"]), float(x["beta"]), bool(x["switched"]))
      for a, x in record["links"].items()
    }
    measured = [Measured(sizes, int(row["num_bytes"]), _plan(row, sizes))
                for row in record["measured"]]  # fmt: skip
  except OSError as e:
    raise ConfigError(f"{path}: {e.strerror}, give a file of the benchmark") from None
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ConfigError(
      f"{path}: not a file of jaxscale bench --json ({type(e).__name__}: {e})"
    ) from None
  return links, measured


def _plan(row: dict[str, Any], sizes: dict[str, int]) -> Plan:
  seconds = float(row["seconds"])
  if row["algorithm"] not in ALGORITHMS or not math.isfinite(seconds):
    raise ValueError(f"{row['algorithm']} took {seconds}")
  dims = tuple(
    Dim(tuple(d["axes"]), d["size"], d["stride"], d["live"]) for d in row["dims"]
  )
  return Plan(row["algorithm"], tuple(sizes), dims, seconds)
