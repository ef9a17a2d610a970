"""Times all-reduces on a mesh: how long each takes, and what its links cost."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import cluster
from jaxscale.collectives.api import reducer
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.collectives.plan import Link, Measured, plan
from jaxscale.collectives.records import fit_link
from jaxscale.collectives.torus import ring


def in_turns(
  calls: Mapping[Any, Callable[[], Any]], rounds: int
) -> dict[Any, list[float]]:
  """Seconds of every call in every round, one after another within a round."""
  for call in calls.values():  # compile, and once more to be warm
    jax.block_until_ready(call())
    jax.block_until_ready(call())
  seconds: dict[Any, list[float]] = {name: [] for name in calls}
  for turn in range(rounds):
    names = list(calls)
    shift = turn % len(names)  # nobody always comes after the same one
    for name in names[shift:] + names[:shift]:
      start = time.perf_counter()
      jax.block_until_ready(calls[name]())
      seconds[name].append(time.perf_counter() - start)
  return seconds


def medians(seconds: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
  """The median of each, in the process where it is largest."""
  own = [statistics.median(s) for s in seconds.values()]
  slowest = [max(column) for column in zip(*cluster.gather(own), strict=True)]
  return dict(zip(seconds, slowest, strict=True))


def rows(mesh: Mesh, num_bytes: int, dtype: str) -> Any:
  """Payloads of all devices, [devices, values], one row on each."""
  shape = (mesh.size, -(-num_bytes // jnp.dtype(dtype).itemsize))
  sharding = NamedSharding(mesh, P(mesh.axis_names))
  return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=sharding)()


def along(mesh: Mesh, axis: str | None) -> Any:
  """A jitted sum of rows by a ring along one axis; None: an empty call."""
  others = tuple(a for a in mesh.axis_names if a != axis)

  def local(x):
    return x[:, :1] if axis is None else ring(x, axis)

  out = P(mesh.axis_names if axis is None else others)
  mapped = jax.shard_map(local, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=out)
  return one_at_a_time(jax.jit(mapped), mesh)


def measure_links(
  mesh: Mesh, sizes: Sequence[int], dtype: str, rounds: int
) -> tuple[dict[str, Link], float]:
  """Alpha and beta of every axis of two devices or more, and an empty call's time."""
  axes = [a for a, n in mesh.shape.items() if n > 1]
  functions = {axis: along(mesh, axis) for axis in (None, *axes)}
  times, empties = {}, []
  for num_bytes in sizes:
    x = rows(mesh, num_bytes, dtype)
    calls = {axis: functools.partial(f, x) for axis, f in functions.items()}
    found = medians(in_turns(calls, rounds))
    empties.append(found.pop(None))
    times[num_bytes] = found
  empty = min(empties)
  links = {
    a: fit_link(mesh.shape[a], sizes, [max(times[m][a] - empty, 0) for m in sizes])
    for a in axes
  }
  return links, empty


def measure_algorithms(
  mesh: Mesh,
  algorithms: Sequence[str],
  payloads: Sequence[int],
  dtype: str,
  rounds: int,
  links: Mapping[str, Link],
) -> list[Measured]:
  """Every algorithm at every size; the torus with its best dimensions there."""
  sizes, found = dict(mesh.shape), []
  for num_bytes in payloads:
    plans = {name: plan(sizes, num_bytes, name, links=links) for name in algorithms}
    x = rows(mesh, num_bytes, dtype)
    calls = {
      name: functools.partial(reducer(mesh, by), x) for name, by in plans.items()
    }
    took = medians(in_turns(calls, rounds))
    found += [
      Measured(sizes, num_bytes, by._replace(seconds=took[name]))
      for name, by in plans.items()
    ]
  return found
