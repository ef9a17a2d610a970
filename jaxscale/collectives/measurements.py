"""Measurement of all-reduce times on a mesh, and of alpha and beta of its links."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import cluster
from jaxscale.collectives.api import reducer, sum_tree
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.collectives.planner import Link, Plan, plan


def fit_link(num_devices: int, num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
  """Fit alpha and beta of an axis to the times of ring all-reduces along it.

  The model is T = 2 (n - 1) (alpha + beta M / n), fitted by least squares of relative
  errors, so that small messages count as much as large ones. Neither value is negative.

  Args:
    num_devices: number of devices n >= 2 along the axis.
    num_bytes: payload M of each measurement, in bytes.
    seconds: time T of each measurement.

  Example:
    >>> link = fit_link(4, [4e3, 4e6], [6 * (1e-6 + 1e-6), 6 * (1e-6 + 1e-3)])
    >>> round(link.alpha, 9), round(link.beta, 12)
    (1e-06, 1e-09)
  """
  from scipy.optimize import nnls  # Takes 0.6 s.

  times = np.maximum(np.asarray(seconds, float), 1e-9)
  rows = np.stack([np.ones_like(times), np.asarray(num_bytes) / num_devices], axis=1)
  rows = rows * (2 * (num_devices - 1) / times)[:, None]
  (alpha, beta), _ = nnls(rows, np.ones_like(times))
  return Link(float(alpha), float(beta))


def in_turns(calls: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
  """Return the seconds of every call in every round, where calls take turns."""
  for call in calls.values():  # one call to compile, one to warm up
    jax.block_until_ready(call())
    jax.block_until_ready(call())
  seconds: dict[Any, list[float]] = {name: [] for name in calls}
  for turn in range(rounds):
    names = list(calls)
    shift = turn % len(names)  # a call does not always follow the same one
    for name in names[shift:] + names[:shift]:
      start = time.perf_counter()
      jax.block_until_ready(calls[name]())
      seconds[name].append(time.perf_counter() - start)
  return seconds


def medians(seconds: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
  """Return each call's median time in seconds, the maximum over all processes."""
  own = [statistics.median(s) for s in seconds.values()]
  slowest = [max(column) for column in zip(*cluster.gather(own), strict=True)]
  return dict(zip(seconds, slowest, strict=True))


def rows(mesh: Mesh, num_bytes: int, dtype: str) -> Any:
  """Return the payloads of all devices, [devices, values], with a row on each device."""
  shape = (mesh.size, -(-num_bytes // jnp.dtype(dtype).itemsize))
  sharding = NamedSharding(mesh, P(mesh.axis_names))
  return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=sharding)()


def along(mesh: Mesh, axis: str | None) -> Any:
  """Return a jitted sum of rows by a ring along an axis; None omits the communication."""
  others = tuple(a for a in mesh.axis_names if a != axis)

  def local(x: jax.Array):
    return x[:, :1] if axis is None else sum_tree(x, plan({axis: mesh.shape[axis]}, 0, "ring"))

  out = P(mesh.axis_names if axis is None else others)
  mapped = jax.shard_map(local, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=out)
  return one_at_a_time(jax.jit(mapped), mesh)


def measure_links(
  mesh: Mesh, sizes: Sequence[int], dtype: str, rounds: int
) -> tuple[dict[str, Link], float]:
  """Measure alpha and beta of every axis with several devices, and an empty call's time."""
  axes = [a for a, n in mesh.shape.items() if n > 1]
  functions = {axis: along(mesh, axis) for axis in (None, *axes)}
  times = []
  for num_bytes in sizes:
    x = rows(mesh, num_bytes, dtype)
    calls = {axis: functools.partial(f, x) for axis, f in functions.items()}
    times.append(medians(in_turns(calls, rounds)))
  empty = min(each[None] for each in times)
  own = {a: [max(each[a] - empty, 0) for each in times] for a in axes}
  return {a: fit_link(mesh.shape[a], sizes, own[a]) for a in axes}, empty


def measure_algorithms(
  mesh: Mesh,
  algorithms: Sequence[str],
  payloads: Sequence[int],
  dtype: str,
  rounds: int,
  links: Mapping[str, Link] | None = None,
) -> list[tuple[int, Plan]]:
  """Time every algorithm at every size; the torus uses the best dimensions for `links`.

  Returns:
    Pairs of payload bytes and a plan with measured seconds.
  """
  measured = []
  for num_bytes in payloads:
    plans = {a: plan(mesh.shape, num_bytes, a, links=links) for a in algorithms}
    x = rows(mesh, num_bytes, dtype)
    calls = {a: functools.partial(reducer(mesh, by), x) for a, by in plans.items()}
    took = medians(in_turns(calls, rounds))
    measured += [(num_bytes, by._replace(seconds=took[a])) for a, by in plans.items()]
  return measured
