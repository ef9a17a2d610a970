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
from jaxscale.training.state import TrainState, state_shardings
from jaxscale.training.step import Batch, TrainStep

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

  def median(self) -> float:
    """Of the processes' seconds."""
    return statistics.median(p.seconds for p in self.processes)

  def spread(self) -> float:
    """From the fastest to the slowest process, as a share of the median."""
    seconds = [p.seconds for p in self.processes]
    return (max(seconds) - min(seconds)) / self.median()

  def metrics(self) -> dict[str, float]:
    """By the names of `metrics.jsonl`, without their "perf/"."""
    exposed = max(self.exposed, 0.0)
    return {
      "compute_s": self.compute,
      "exposed_s": exposed,
      "exposed_share": exposed / (self.compute + exposed),
      "slowest_process": self.slowest().process,
      "spread": self.spread(),
    }


def time_exchange(
  train_step: TrainStep,
  silent_step: TrainStep,
  state: TrainState,
  batch: Batch,
  *,
  rounds: int = ROUNDS,
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
    >>> took, without, _ = time_exchange(step, silent_step, copy_state(state, mesh),
    ...                                  batch)               # doctest: +SKIP
  """
  calls = _Calls(state, batch)
  seconds = in_turns(
    {
      "with": functools.partial(calls, train_step),
      "without": functools.partial(calls, silent_step),
    },
    rounds,
  )
  return seconds["with"], seconds["without"], calls.state


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
  calls = _Calls(state, batch)
  call = functools.partial(calls, local_step)
  jax.block_until_ready(call())  # compiled before anybody times
  cluster.barrier("step report")
  seconds = in_turns({"alone": call}, rounds)["alone"]
  return gather_alone(statistics.median(seconds))


def gather_alone(seconds: float) -> tuple[Alone, ...]:
  """What every process measured by itself, in their order; all must call it."""
  own = (jax.process_index(), platform.node(), seconds)
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
  fastest = min(p.seconds for p in report.processes)
  slowest, median = report.slowest(), report.median()
  processes = "only one, nobody to wait for"
  if len(report.processes) > 1:
    processes = (
      f"alone on their own devices: {_ms(fastest)} to {_ms(slowest.seconds)}, median "
      f"{_ms(median)}; slowest is process {slowest.process} ({slowest.host}), "
      f"{slowest.seconds / median:.0%} of the median"
    )
  return "\n".join(
    [
      f"step report: {_ms(total)} per step of {rows:,} examples on "
      f"{plural(num_devices, 'device')}, median of {report.rounds} rounds",
      f"  compute   {_ms(report.compute)}: the same step without its exchange; sums of "
      "metrics and BatchNorm's means are left in it",
      f"  exchange  {_ms(exposed)} ({exposed / total:.0%}), give or take "
      f"{_ms(report.give_or_take)}: communication and compression that is not hidden",
      f"  processes {processes}",
    ]
  )


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def measure(
  experiment: build.Experiment,
  train_step: TrainStep,
  state: TrainState,
  batch: Batch,
  *,
  rounds: int = ROUNDS,
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
  quiet = experiment.replace(exchange=silent(experiment.exchange, mesh.axis_names))
  if sync is not None:

    def synchronizing(every: int) -> build.Experiment:
      method = sync.method._replace(every=every)
      return experiment.replace(sync=sync._replace(method=method))

    every = sync.method.every
    train_step = synchronizing(1).compile_train_step()
    quiet = synchronizing(NEVER)
  silent_step = quiet.compile_train_step()
  copy = copy_state(state, mesh)
  # What most steps do is timed, not how the run begins.
  copy = copy._replace(exchange_state=past_warm_start(copy.exchange_state))
  took, without, copy = time_exchange(
    train_step, silent_step, copy, batch, rounds=rounds
  )
  # Workers that train alone pay for a synchronization once in so many steps.
  took = [b + (a - b) / every for a, b in zip(took, without, strict=True)]
  if jax.process_count() == 1:  # its own devices are all there are
    return make_report(took, without, gather_alone(statistics.median(without)))
  here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  own = submesh(mesh, here)
  # Never asked for, but compiled: a real one may fit no other number of devices.
  none = silent(experiment.exchange, mesh.axis_names)
  local_step = quiet.replace(mesh=own, exchange=none).train_step
  alone = time_alone(local_step, *_on(own, copy, batch), rounds=rounds)
  return make_report(took, without, alone)


def copy_state(state: TrainState, mesh: Mesh) -> TrainState:
  """The same values in memory of their own."""
  copy = jax.jit(
    lambda x: jax.tree.map(jnp.copy, x), out_shardings=state_shardings(mesh)
  )
  return copy(state)


def _on(mesh: Mesh, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
  """What this process's devices hold, as arrays of its own mesh; nothing is copied."""
  everywhere, spread = replicated(mesh), batch_sharding(mesh)

  def here(x: jax.Array, sharding: Any) -> jax.Array:
    shards = [s.data for s in x.addressable_shards]
    rows = len(shards) * shards[0].shape[0] if sharding is spread else None
    shape = x.shape if rows is None else (rows, *x.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)

  own = jax.tree.map(lambda x: here(x, spread), (state.exchange_state, batch))
  shared = state._replace(exchange_state=())
  shared = jax.tree.map(lambda x: here(x, everywhere), shared)
  return shared._replace(exchange_state=own[0]), own[1]


class _Calls:
  """Steps one after another on a state that each of them donates."""

  def __init__(self, state: TrainState, batch: Batch):
    self.state, self.batch = state, batch

  def __call__(self, step: TrainStep) -> Any:
    self.state, metrics = step(self.state, self.batch)
    return self.state, metrics
