"""Seconds of compute and of exposed communication in a step, measured.

Two compiled steps take turns on one state, the real one and the same without its
exchange (`exchange.silent`), and their medians are subtracted:

    compute = median(without),   exposed = median(with) - median(without)

What is *exposed* is the time that the step takes longer because of the exchange: its
communication and its compression, less all that is hidden behind compute. What both
steps have counts as compute: sums of metrics, means of BatchNorm's statistics, and
waiting in those for the slowest process.

Stragglers are found the other way: each process times the same step on its own
devices alone, where nothing waits for anybody, and then they compare.
"""

from __future__ import annotations

import functools
import platform
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale import cluster
from jaxscale.collectives.measurements import in_turns
from jaxscale.exchange.wrappers import past_warm_start, silent
from jaxscale.experiment import build
from jaxscale.mesh import batch_sharding, replicated, submesh
from jaxscale.metrics.text import plural
from jaxscale.training.state import state_shardings
from jaxscale.training.types import Batch, TrainState, TrainStep

ROUNDS = 10
NEVER = 2**31 - 1  # steps


class Alone(NamedTuple):
  """A process on its own devices: the median of its steps, in seconds."""

  process: int
  host: str
  seconds: float


class Report(NamedTuple):
  """What was measured.

  Attributes:
    compute: seconds of a step without the exchange.
    exposed: seconds that it takes longer with it; below 0 is noise.
    give_or_take: how far from their median half of the rounds' differences are.
    processes: each on its own devices alone.
    rounds: how often each step was timed.
  """

  compute: float
  exposed: float
  give_or_take: float
  processes: tuple[Alone, ...]
  rounds: int

  def slowest(self) -> Alone:
    """The process that the others wait for."""
    return max(self.processes, key=lambda p: p.seconds)

  def spread(self) -> float:
    """From the fastest to the slowest process, as a share of the median."""
    seconds = [p.seconds for p in self.processes]
    return (max(seconds) - min(seconds)) / statistics.median(seconds)

  def metrics(self) -> dict[str, float]:
    """By the names of `metrics.jsonl`, without their "perf/"."""
    exposed = max(self.exposed, 0.0)
    return {
      "compute_s": self.compute,
      "exposed_s": exposed,
      "exposed_share": exposed / (self.compute + exposed),
      "exposed_noise_s": self.give_or_take,
      "slowest_process": self.slowest().process,
      "spread": self.spread(),
    }


def time_exchange(
  train_step: TrainStep, silent_step: TrainStep, state, batch, *, rounds: int = ROUNDS
) -> tuple[list[float], list[float], TrainState]:
  """Seconds of every round with and without the exchange; all processes call it.

  Args:
    train_step: compiled, donates its state.
    silent_step: the same without the exchange, for the same state.
    state: donated: give a copy. Its replicas part.
    batch: global, on the devices; used in every step.
    rounds: each step once in each, after two that are not counted.

  Returns:
    With, without, and the last state.

  Example:
    >>> took, without, _ = time_exchange(step, silent_step, copy, batch)
    ...                                                      # doctest: +SKIP
  """
  steps = {"with": train_step, "without": silent_step}
  seconds, state = _steps_in_turns(steps, state, batch, rounds)
  return seconds["with"], seconds["without"], state


def time_alone(
  local_step: TrainStep, state: TrainState, batch: Batch, *, rounds: int = ROUNDS
) -> tuple[Alone, ...]:
  """Every process's median, each on its own devices; all processes call it.

  Args:
    local_step: on a mesh of the process's own devices.
    state: on that mesh; donated.
    batch: likewise; not donated.
    rounds: how many steps, after two that are not counted.
  """
  # Compiled before anybody times.
  state, _ = jax.block_until_ready(local_step(state, batch))
  cluster.barrier("step report")
  seconds, _ = _steps_in_turns({"alone": local_step}, state, batch, rounds)
  return _gather_alone(seconds["alone"])


def _steps_in_turns(steps: dict[str, TrainStep], state, batch, rounds: int):
  """(seconds of each step by round, the last state): all donate the one state."""

  def call(step):
    nonlocal state
    state, metrics = step(state, batch)
    return state, metrics

  calls = {name: functools.partial(call, step) for name, step in steps.items()}
  return in_turns(calls, rounds), state


def _gather_alone(seconds: Sequence[float]) -> tuple[Alone, ...]:
  own = jax.process_index(), platform.node(), statistics.median(seconds)
  return tuple(Alone(*found) for found in cluster.gather(own))


def make_report(
  took: Sequence[float], without: Sequence[float], processes: Sequence[Alone]
) -> Report:
  """Medians and differences of what was timed.

  Args:
    took: seconds of the whole step, by round.
    without: seconds of the step without its exchange, by round.
    processes: each alone.

  Example:
    >>> report = make_report([0.3, 0.5, 0.4], [0.3, 0.3, 0.3], [Alone(0, "a", 0.2)])
    >>> round(report.exposed, 3), round(report.give_or_take, 3)
    (0.1, 0.1)
  """
  compute = statistics.median(without)
  exposed = statistics.median(took) - compute
  apart = [abs(a - b - exposed) for a, b in zip(took, without, strict=True)]
  noise = statistics.median(apart)
  return Report(compute, exposed, noise, tuple(processes), len(took))


def text(report: Report, *, rows: int, num_devices: int) -> str:
  """Four lines for people.

  Args:
    report: of `make_report`.
    rows: examples of the global batch.
    num_devices: of the mesh.
  """
  exposed = max(report.exposed, 0.0)
  total = report.compute + exposed
  processes = "only one, nobody to wait for"
  if len(report.processes) > 1:
    seconds = [p.seconds for p in report.processes]
    slowest, median = report.slowest(), statistics.median(seconds)
    processes = (
      f"alone on their own devices: {_ms(min(seconds))} to {_ms(max(seconds))}, median "
      f"{_ms(median)}; slowest is process {slowest.process} ({slowest.host}), "
      f"{slowest.seconds / median:.0%} of the median"
    )
  return (
    f"step report: {_ms(total)} per step of {rows:,} examples on "
    f"{plural(num_devices, 'device')}, median of {report.rounds} rounds\n"
    f"  compute   {_ms(report.compute)}: the same step without its exchange; sums of "
    "metrics and BatchNorm's means are left in it\n"
    f"  exchange  {_ms(exposed)} ({exposed / total:.0%}), give or take "
    f"{_ms(report.give_or_take)}: communication and compression that is not hidden\n"
    f"  processes {processes}"
  )


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def measure(
  experiment: build.Experiment, train_step: TrainStep, state, batch, *, rounds=ROUNDS
) -> Report:
  """The report of a phase of a run; every process must call it.

  Of local updates, a step with a synchronization and one without are timed, and the
  difference is divided by the steps from one synchronization to the next.

  Compiles the step without exchange and, where there are several processes, the
  step on a process's own devices. Holds one copy of the state in addition to the real
  one, which is left as it is, as are data position and random numbers.

  Args:
    experiment: at the phase that is measured.
    train_step: its compiled step.
    state: that the run continues with.
    batch: a global batch on the devices.
    rounds: see `time_exchange`.
  """
  mesh, sync, every = experiment.mesh, experiment.sync, 1
  none = silent(experiment.exchange, mesh.axis_names)
  quiet = experiment.replace(exchange=none)
  if sync is not None:
    often, never = (
      experiment.replace(sync=sync._replace(method=sync.method._replace(every=steps)))
      for steps in (1, NEVER)
    )
    every = sync.method.every
    train_step, quiet = often.compile_train_step(), never
  silent_step = quiet.compile_train_step()
  # The same values in memory of their own.
  copying = functools.partial(jax.tree.map, jnp.copy)
  copy = jax.jit(copying, out_shardings=state_shardings(mesh))(state)
  # What most steps do is timed, not how the run begins.
  copy = copy._replace(exchange_state=past_warm_start(copy.exchange_state))
  steps = train_step, silent_step
  took, without, copy = time_exchange(*steps, copy, batch, rounds=rounds)
  # Workers that train alone pay for a synchronization once in so many steps.
  took = [b + (a - b) / every for a, b in zip(took, without, strict=True)]
  if jax.process_count() == 1:  # its own devices are all there are
    return make_report(took, without, _gather_alone(without))
  here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  own = submesh(mesh, here)
  # Never asked for, but compiled: a real one may fit no other number of devices.
  local_step = quiet.replace(mesh=own, exchange=none).train_step
  alone = time_alone(local_step, *_on(own, copy, batch), rounds=rounds)
  return make_report(took, without, alone)


def _on(mesh: Mesh, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
  """What this process's devices hold, as arrays of its own mesh; nothing is copied."""

  def here(x: jax.Array, is_spread: bool) -> jax.Array:
    shards = [s.data for s in x.addressable_shards]
    shape = (len(shards) * len(shards[0]), *x.shape[1:]) if is_spread else x.shape
    sharding: Any = batch_sharding(mesh) if is_spread else replicated(mesh)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)

  spread = TrainState(**{n: n == "exchange_state" for n in TrainState._fields})
  where = jax.tree.broadcast((spread, True), (state, batch))
  return jax.tree.map(here, (state, batch), where)
