"""Measured times of compute and exposed communication in a train step.

Two compiled steps run in turn on one state: the real one, and one without its exchange
(`exchange.silent`). The report subtracts their median times:

    compute = median(without),   exposed = median(with) - median(without)

The *exposed* time is the time by which the exchange makes the step longer: communication
and compression, less what is hidden behind compute. Work that both steps do counts as
compute: sums of metrics, means of BatchNorm's statistics, and the time spent waiting in them
for the slowest process.

To find stragglers, each process times the same step on its own devices alone, where it
waits for no other process, and the times are compared.
"""

from __future__ import annotations

import functools
import platform
import statistics
from collections.abc import Mapping, Sequence
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
  """Median step time of a process on its own devices, in seconds."""

  process: int
  host: str
  seconds: float


class Report(NamedTuple):
  """Measurements of a step.

  Attributes:
    compute: the seconds of a step without the exchange.
    exposed: the seconds that the exchange adds; a negative value is noise.
    give_or_take: the median distance of the rounds' differences from their median.
    processes: the processes, each timed on its own devices.
    rounds: the number of times that each step was timed.
  """

  compute: float
  exposed: float
  give_or_take: float
  processes: tuple[Alone, ...]
  rounds: int

  def slowest(self) -> Alone:
    """Return the process with the longest step time."""
    return max(self.processes, key=lambda p: p.seconds)

  def spread(self) -> float:
    """Return the slowest minus the fastest process, as a share of the median."""
    seconds = [p.seconds for p in self.processes]
    return (max(seconds) - min(seconds)) / statistics.median(seconds)

  def metrics(self) -> dict[str, float]:
    """Return the values by their names in `metrics.jsonl`, without "perf/"."""
    exposed = max(self.exposed, 0.0)
    return {
      "compute_s": self.compute,
      "exposed_s": exposed,
      "exposed_share": exposed / (self.compute + exposed),
      "exposed_noise_s": self.give_or_take,
      "slowest_process": self.slowest().process,
      "spread": self.spread(),
    }


def time_steps(
  steps: Mapping[str, TrainStep], state: TrainState, batch: Batch, rounds: int = ROUNDS
) -> tuple[dict[str, list[float]], TrainState]:
  """Time steps on one state, in turns; all processes that share the mesh call it.

  Args:
    steps: the compiled steps by name; they donate their state.
    state: the state, which is donated, so pass a copy; without an exchange its replicas
      diverge.
    batch: the batch on the devices, used in every step.
    rounds: the number of rounds; each runs all steps once, after two uncounted rounds.

  Returns:
    The seconds of each step by round, and the last state.

  Example:
    >>> seconds, _ = time_steps({"with": step, "without": silent_step}, copy, batch)
    ...                                                      # doctest: +SKIP
  """

  def call(step: TrainStep) -> tuple[TrainState, Any]:
    nonlocal state
    state, metrics = step(state, batch)
    return state, metrics

  calls = {name: functools.partial(call, step) for name, step in steps.items()}
  return in_turns(calls, rounds), state


def gather_alone(seconds: Sequence[float]) -> tuple[Alone, ...]:
  """Return every process's median of its step times; all processes call it."""
  own = jax.process_index(), platform.node(), statistics.median(seconds)
  return tuple(Alone(*found) for found in cluster.gather(own))


def make_report(
  took: Sequence[float], without: Sequence[float], processes: Sequence[Alone]
) -> Report:
  """Compute a report from times.

  Args:
    took: the seconds of the whole step, by round.
    without: the seconds of the step without its exchange, by round.
    processes: the processes, each timed alone.

  Example:
    >>> report = make_report([0.3, 0.5, 0.4], [0.3, 0.3, 0.3], [Alone(0, "a", 0.2)])
    >>> round(report.exposed, 3), round(report.give_or_take, 3)
    (0.1, 0.1)
  """
  compute = statistics.median(without)
  exposed = statistics.median(took) - compute
  noise = statistics.median([abs(a - b - exposed) for a, b in zip(took, without, strict=True)])
  return Report(compute, exposed, noise, tuple(processes), len(took))


def text(report: Report, *, rows: int, num_devices: int) -> str:
  """Format a report as four lines.

  Args:
    report: the report, from `make_report`.
    rows: the number of examples in the global batch.
    num_devices: the number of devices in the mesh.
  """
  exposed = max(report.exposed, 0.0)
  total = report.compute + exposed
  processes = "only one process, so none to compare"
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
    f"  compute   {_ms(report.compute)}: the same step without its exchange, but with sums "
    "of metrics and BatchNorm's means\n"
    f"  exchange  {_ms(exposed)} ({exposed / total:.0%}), give or take "
    f"{_ms(report.give_or_take)}: communication and compression not hidden by compute\n"
    f"  processes {processes}"
  )


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def measure(
  experiment: build.Experiment, train_step: TrainStep, state, batch, *, rounds=ROUNDS
) -> Report:
  """Measure a phase of a run; every process must call it.

  For local SGD, a step with a synchronization and one without are timed, and the
  difference is divided by the steps between synchronizations.

  This compiles the step without its exchange and, with several processes, the step on a
  process's own devices. It holds one additional copy of the state. The state, the data
  position and the random numbers do not change.

  Args:
    experiment: the experiment at the phase to measure.
    train_step: the phase's compiled step.
    state: the state that the run continues with.
    batch: a global batch on the devices.
    rounds: the number of rounds, as for `time_steps`.
  """
  mesh, sync, every = experiment.mesh, experiment.sync, 1
  none = silent(experiment.exchange, mesh.axis_names)
  quiet = experiment.replace(exchange=none)
  if sync is not None:
    # Measured are steps that all workers take.
    method = sync.method._replace(worker_steps=(NEVER,) * len(sync.method.worker_steps))
    often, never = (
      experiment.replace(sync=sync._replace(method=method._replace(every=steps)))
      for steps in (1, NEVER)
    )
    every = sync.method.every / sync.method.fragments  # Every step sends the first one only.
    train_step, quiet = often.compile_train_step(), never
  silent_step = quiet.compile_train_step()
  # Copy the values, as the steps donate their state.
  copying = functools.partial(jax.tree.map, jnp.copy)
  copy = jax.jit(copying, out_shardings=state_shardings(mesh))(state)
  # Time a step from the middle of training, not the special first steps.
  copy = copy._replace(exchange_state=past_warm_start(copy.exchange_state))
  steps = {"with": train_step, "without": silent_step}
  seconds, copy = time_steps(steps, copy, batch, rounds)
  alone = without = seconds["without"]
  # Local SGD pays for a synchronization once in so many steps.
  took = [b + (a - b) / every for a, b in zip(seconds["with"], without, strict=True)]
  if jax.process_count() > 1:  # Otherwise this process's devices are all devices.
    here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    own = submesh(mesh, here)
    # This step is never run with an exchange; the real one may not fit this number of devices.
    local_step = quiet.replace(mesh=own, exchange=none).train_step
    copy, batch = _on(own, copy, batch)
    # All processes compile before any of them measures.
    copy, _ = jax.block_until_ready(local_step(copy, batch))
    cluster.barrier("step report")
    alone = time_steps({"alone": local_step}, copy, batch, rounds)[0]["alone"]
  return make_report(took, without, gather_alone(alone))


def _on(mesh: Mesh, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
  """Return this process's shards as arrays on its own mesh, without a copy."""

  def here(x: jax.Array, is_spread: bool) -> jax.Array:
    shards = [s.data for s in x.addressable_shards]
    shape = (len(shards) * len(shards[0]), *x.shape[1:]) if is_spread else x.shape
    sharding: Any = batch_sharding(mesh) if is_spread else replicated(mesh)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)

  spread = TrainState(**{n: n == "exchange_state" for n in TrainState._fields})
  return jax.tree.map(here, (state, batch), jax.tree.broadcast((spread, True), (state, batch)))
