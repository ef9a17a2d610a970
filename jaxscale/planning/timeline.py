"""Predict the time of a compiled step from its schedule: what computes and what waits.

The model goes through the instructions in the order of the schedule, with two clocks: one for
compute, and one for the network, on which collectives queue. A collective with separate start
and done instructions runs between them; time after its done instruction is exposed, as is all
time of a collective that is not asynchronous. The body of a loop is evaluated once, and counts
as often as it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxscale import hlo
from jaxscale.hlo import Collective, parse
from jaxscale.hlo.cost import COLLECTIVES, is_free, trip_count
from jaxscale.hlo.parse import Computation, Instruction, Module
from jaxscale.metrics.text import grouped
from jaxscale.planning import kernels

Transfer = Callable[[Collective], float]  # seconds of one execution


class Times(NamedTuple):
  """Seconds of a device in one step.

  Attributes:
    compute: the seconds by kind of kernel (`kernels.Kind`).
    exposed: the seconds of exposed communication by mesh axes, e.g. "data+model".
    sent: the seconds of all communication, hidden or not, by mesh axes.
  """

  compute: dict[str, float]
  exposed: dict[str, float]
  sent: dict[str, float]

  @property
  def total(self) -> float:
    """The sum of compute and exposed communication."""
    return sum(self.compute.values()) + sum(self.exposed.values())


class Program:
  """Compiled step, read once, for any rates and links."""

  def __init__(self, text: str, mesh: Any):
    """Args: text of `Compiled.as_text()`; mesh, or its sizes."""
    self._modules = [(m, _by_position(m, mesh), {}) for m in parse.modules(text)]

  def times(self, rates: Mapping[str, float], transfer: Transfer) -> Times:
    """Predict the seconds of a step.

    Args:
      rates: the rates, from `machine.Rates.at`.
      transfer: a function that returns the seconds of a collective.
    """
    total = _no_times()
    for module, placed, known in self._modules:
      _add(total, _Walk(module, placed, known, rates, transfer).computation(module.entry), 1)
    return Times(*map(dict, total))


_Placed = dict[tuple[str, int], list[hlo.Placed]]  # by computation and index


def _by_position(module: Module, mesh: Any) -> _Placed:
  # A computation may be called from several places.
  unique = {(p.computation, p.start, p.collective.name): p for p in hlo.placed(module, mesh)}
  return grouped(((p.computation, p.start), p) for p in unique.values())


def _no_times() -> Times:
  return Times(*(defaultdict(float) for _ in Times._fields))


class _Walk(NamedTuple):
  module: Module
  placed: _Placed
  kernels: dict[int, kernels.Kernel]  # by the id of an instruction; the same at any rates
  rates: Mapping[str, float]
  transfer: Transfer

  def computation(self, name: str) -> Times:
    """Return the times of a computation, which is evaluated once."""
    times = _no_times()
    home: Computation = self.module.computations.get(name, {})
    clock = free = 0.0
    waiting: dict[int, list[tuple[float, str]]] = {}
    for i, instruction in enumerate([*home.values(), None]):  # None: the end.
      for done, axes in waiting.pop(i, ()):
        times.exposed[axes] += max(done - clock, 0.0)
        clock = max(clock, done)
      if instruction:
        clock += self._compute(home, instruction, times)
      for p in self.placed.get((name, i), ()):
        took, axes = self.transfer(p.collective), "+".join(p.collective.axes or ()) or "all"
        times.sent[axes] += took
        free = max(free, clock) + took
        # The next instruction waits for a collective that is not asynchronous.
        waiting.setdefault(max(p.end, i + 1), []).append((free, axes))
    return times

  def _compute(self, home: Computation, instruction: Instruction, total: Times) -> float:
    """Add the work of an instruction; return the seconds that pass."""
    opcode = instruction.opcode
    if opcode in ("while", "conditional", "call", "async-start"):
      inner = [self.computation(n) for n in parse.called(instruction)]
      times = 1.0
      if opcode == "while":
        times = trip_count(self.module, home, instruction) or 1
      if opcode == "conditional" and inner:
        inner = [max(inner, key=lambda f: sum(f.compute.values()))]
      return sum(_add(total, f, times) for f in inner)
    if is_free(instruction) or opcode.removesuffix("-start") in COLLECTIVES:
      return 0.0
    if (kernel := self.kernels.get(id(instruction))) is None:
      kernel = kernels.kernel_of(self.module, home, instruction)
      self.kernels[id(instruction)] = kernel
    took = kernels.seconds(kernel, self.rates)
    total.compute[_kind(kernel, took, self.rates)] += took
    return took


def _add(total: Times, inner: Times, times: float) -> float:
  for mine, theirs in zip(total, inner, strict=True):
    for key, value in theirs.items():
      mine[key] += times * value
  return times * inner.total


def _kind(kernel: kernels.Kernel, took: float, rates: Mapping[str, float]) -> str:
  """Return what limits a kernel: memory if its traffic takes longer than its arithmetic."""
  if "cycles" in rates or not kernel.flops:
    return kernel.kind
  traffic = kernel.bytes / (rates["bandwidth"] * rates["memory"])
  return kernel.kind if took - rates["launch"] > traffic else "memory"
