"""The seconds of a compiled step, by its schedule: what computes and what waits.

The instructions are gone through in the order of the schedule, with two clocks: one
of compute, one of the network, on which collectives queue. A collective that begins
and ends apart runs between; what it is not done with when it is waited for is exposed,
as is all of one that is not asynchronous. The body of a loop is gone through once and
counts as often as it runs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxscale import hlo
from jaxscale.hlo import Collective, parse
from jaxscale.hlo.cost import COLLECTIVES, is_free, trip_count
from jaxscale.hlo.parse import Computation, Instruction, Module
from jaxscale.planning import kernels

Transfer = Callable[[Collective], float]  # seconds of one execution
Overlap = Literal["schedule", "backward"]
# A backward pass has two of the three products of each layer, and what is sent of its
# last layer finds nothing to hide behind.
_BACKWARD_SHARE = 2 / 3


class Times(NamedTuple):
  """Seconds of a device in one step.

  Attributes:
    compute: by `kernels.KINDS`.
    exposed: of communication, by mesh axes, "data+model" say.
    sent: of communication in all, hidden or not, by the same.
  """

  compute: Mapping[str, float]
  exposed: Mapping[str, float]
  sent: Mapping[str, float]

  @property
  def total(self) -> float:
    """All that a device does, one after the other."""
    return sum(self.compute.values()) + sum(self.exposed.values())


class Program:
  """A compiled step, read once, for any rates and links."""

  def __init__(self, text: str, mesh: Any):
    """Args: text of `Compiled.as_text()`; mesh, or its sizes."""
    self._modules = [(m, _by_place(m, mesh)) for m in parse.modules(text)]
    self._kernels: dict[tuple[int, str, str], kernels.Kernel] = {}

  def times(
    self, rates: Mapping[str, float], transfer: Transfer, *, overlap: Overlap = "schedule"
  ) -> Times:
    """The seconds of a step.

    Args:
      rates: of `machine.Rates.at`.
      transfer: seconds of a collective.
      overlap: "schedule": what the compiler's lets run together; "backward": as if all
        collectives ran during the backward pass, as those of PyTorch and Horovod do.
    """
    found = _found()
    for module, placed in self._modules:
      _add(found, _Walk(self, module, placed, rates, transfer).computation(module.entry), 1)
    compute, exposed, sent = map(dict, found)
    if overlap == "backward" and sum(sent.values()):
      hidden = _BACKWARD_SHARE * sum(compute.values())
      share = max(1 - hidden / sum(sent.values()), 0.0)
      exposed = {axes: share * s for axes, s in sent.items()}
    return Times(compute, exposed, sent)

  def kernel(self, module: Module, name: str, i: Instruction) -> kernels.Kernel:
    """An instruction's, which is the same at all rates."""
    key = id(module), name, i.name
    if key not in self._kernels:
      self._kernels[key] = kernels.kernel_of(module, module.computations[name], i)
    return self._kernels[key]


_Placed = dict[str, dict[int, list[hlo.Placed]]]  # by computation and index


def _by_place(module: Module, mesh: Any) -> _Placed:
  found: _Placed = {}
  seen = set()
  for p in hlo.placed(module, mesh):
    key = p.computation, p.start, p.collective.name
    if key not in seen:  # a computation may be called from several places
      seen.add(key)
      found.setdefault(p.computation, {}).setdefault(p.start, []).append(p)
  return found


_Sums = defaultdict[str, float]


class _Found(NamedTuple):
  compute: _Sums
  exposed: _Sums
  sent: _Sums


def _found() -> _Found:
  return _Found(*(defaultdict(float) for _ in _Found._fields))


class _Walk(NamedTuple):
  program: Program
  module: Module
  placed: _Placed
  rates: Mapping[str, float]
  transfer: Transfer

  def computation(self, name: str) -> _Found:
    """What a computation takes, gone through once."""
    found = _found()
    home: Computation = self.module.computations.get(name, {})
    clock = free = 0.0
    waiting: dict[int, list[tuple[float, str]]] = {}
    for i, instruction in enumerate(home.values()):
      for done, axes in waiting.pop(i, ()):
        found.exposed[axes] += max(done - clock, 0.0)
        clock = max(clock, done)
      clock += self._compute(home, name, instruction, found)
      for p in self.placed.get(name, {}).get(i, ()):
        took, axes = self.transfer(p.collective), "+".join(p.collective.axes or ()) or "all"
        found.sent[axes] += took
        free = max(free, clock) + took
        # One that is not asynchronous is waited for by the next instruction.
        waiting.setdefault(max(p.end, i + 1), []).append((free, axes))
    for done, axes in itertools.chain(*waiting.values()):
      found.exposed[axes] += max(done - clock, 0.0)
      clock = max(clock, done)
    return found

  def _compute(
    self, home: Computation, name: str, instruction: Instruction, found: _Found
  ) -> float:
    """Adds what an instruction computes; the seconds that pass."""
    opcode = instruction.opcode
    if opcode in ("while", "conditional", "call") or opcode == "async-start":
      inner = [self.computation(n) for n in parse.called(instruction)]
      times = 1.0
      if opcode == "while":
        times = trip_count(self.module, home, instruction) or 1
      if opcode == "conditional" and inner:
        inner = [max(inner, key=lambda f: sum(f.compute.values()))]
      return sum(_add(found, f, times) for f in inner)
    if is_free(instruction) or opcode.removesuffix("-start") in COLLECTIVES:
      return 0.0
    kernel = self.program.kernel(self.module, name, instruction)
    took = kernels.seconds(kernel, self.rates)
    found.compute[_kind(kernel, took, self.rates)] += took
    return took


def _add(found: _Found, inner: _Found, times: float) -> float:
  for mine, theirs in zip(found, inner, strict=True):
    for key, value in theirs.items():
      mine[key] += times * value
  return times * (sum(inner.compute.values()) + sum(inner.exposed.values()))


def _kind(kernel: kernels.Kernel, took: float, rates: Mapping[str, float]) -> str:
  """A product whose traffic takes longer than its arithmetic is bound by memory."""
  if "cycles" in rates or not kernel.flops:
    return kernel.kind
  traffic = kernel.bytes / (rates["bandwidth"] * rates["memory"])
  return kernel.kind if took - rates["launch"] > traffic else "memory"
