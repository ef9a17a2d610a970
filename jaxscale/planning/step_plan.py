"""Predict the step time of a config on any number of chips, from one or two compilations.

The step is compiled for the requested chips. If other numbers of chips give a device a different
number of rows, it is compiled once more for fewer rows. Both programs are evaluated (`timeline`)
with the links of every size. Between and beyond them, each part of the step is linear in the
rows of a device:

    t(rows) = t_1 + (t_2 - t_1) (rows - rows_1) / (rows_2 - rows_1)

so compilation costs the same for any number of chips. A synchronous step waits for its slowest
device. If compute has the relative standard deviation s, the slowest of N devices takes
1 + s E(N) times the mean, E(N) = F^-1((N - 3/8) / (N + 1/4)) with F the normal distribution's
(Blom, 1958). On GPUs, communication slows compute that runs at the same time: each second of it
costs a share of a second (arXiv:2507.03114).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale import config as cfg
from jaxscale.errors import ConfigError
from jaxscale.mesh import mesh_shape
from jaxscale.planning import fits, topologies, transfer
from jaxscale.planning.machine import CORNERS, Corner, Rates, hosts, links
from jaxscale.planning.timeline import Program, Times

_Seconds = dict[str, float]  # by part of the step


class Compiled(NamedTuple):
  """Compiled program of a step.

  Attributes:
    rows: the examples per device.
    devices: the number of devices of the planned step; on CPUs, fewer may be simulated.
    program: the parsed program, from which step times are computed.
    fit: the memory of the program, and the experiment of the step.
  """

  rows: int
  devices: int
  program: Program
  fit: fits.Fit


class Step(NamedTuple):
  """Planned step on a number of devices.

  Attributes:
    devices: the number of devices.
    nodes: the number of nodes.
    batch_size: the examples per step.
    rows: the examples per device.
    seconds: the seconds of the step, by corner.
    parts: the expected seconds by part: the kinds of kernels, "exposed AXES", "contention"
      (compute that communication slows), "stragglers", "input", "host".
    sent: the expected seconds of communication, hidden or not, by axes.
    alone: the expected seconds of a device that waits for no other.
    memory: the bytes per device, by the same linear model.
    fits: True if the memory is sufficient.
  """

  devices: int
  nodes: int
  batch_size: int
  rows: int
  seconds: Mapping[Corner, float]
  parts: Mapping[str, float]
  sent: Mapping[str, float]
  alone: float
  memory: float
  fits: bool

  @property
  def rate(self) -> float:
    """Examples per second."""
    return self.batch_size / self.seconds["expected"]

  @property
  def efficiency(self) -> float:
    """Efficiency relative to one device with the same rows that waits for no other."""
    return self.alone / self.seconds["expected"]


def sized(chips: topologies.Chips, devices: int) -> str | None:
  """Return the --chips name for this kind and a number of devices; None if there is none.

  Example:
    >>> sized(find_chips("v5e-16"), 512)                           # doctest: +SKIP
    '2xv5e-256'
  """
  chip, kind = chips.chip, chips.kind
  count, rest = divmod(devices, chip.cores)
  if rest or not chip.shapes or count in chip.shapes:
    return None if rest else f"{kind}-{count}"
  largest = max(chip.shapes)
  return None if count % largest else f"{count // largest}x{kind}-{largest}"


def rows_of(config: cfg.Config, num_train: int, devices: int) -> int | None:
  """Return the rows per device, or None if the batch is not divisible by the devices."""
  from jaxscale.experiment.derive import derive

  try:
    return derive(config, num_train, num_train, devices).device_batch_size
  except ConfigError:
    return None


def compile_step(config: cfg.Config, chips: topologies.Chips) -> Compiled:
  """Compile a config's step for some chips.

  Raises:
    ConfigError: the config does not fit so many devices.
    RefusedError: the compiler refuses the program.
  """
  asked = chips.count or len(chips.devices)
  here = len(chips.devices)
  if here < asked:  # Fewer CPUs are simulated, with the same rows on each.
    phases = config.phases
    sizes = config.batch_size, *getattr(phases, "batch_sizes", ())
    if wrong := next((size for size in sizes if size * here % asked), None):
      raise ConfigError(f"batch size {wrong}: give a multiple of {asked}")
    first, *own = (size * here // asked for size in sizes)
    if own:
      phases = dataclasses.replace(phases, batch_sizes=tuple(own))
    config = dataclasses.replace(config, batch_size=first, phases=phases)
  fit = fits.compile_for(config, chips)
  if fit.compiled is None:
    raise fits.RefusedError(f"--chips={chips.name}: the step {fits.line(fit, chips)}")
  try:
    program = Program(fit.compiled.as_text(), fit.mesh)
  except RuntimeError as e:  # Fails for asynchronous collectives of TPU v5p and v6e.
    problem = str(e).split("\n", 1)[0]
    raise fits.RefusedError(
      f"--chips={chips.name}: the step compiles, but JAX cannot read its program, so no time "
      f"can be planned; try another layout or chip: {problem}"
    ) from None
  return Compiled(fit.experiment.derived.device_batch_size, asked, program, fit)


def step_on(
  config: cfg.Config, compiled: Sequence[Compiled], rates: Rates, devices: int, rows: int
) -> Step:
  """Plan the step on a number of devices with a number of rows each.

  Args:
    config: the config of the run, for its mesh.
    compiled: one program, or two with different rows.
    rates: the rates of the chip and its links.
    devices: the number of devices.
    rows: the rows per device.

  Raises:
    ConfigError: the mesh does not fit so many devices.
  """
  mesh = mesh_shape(devices, **dataclasses.asdict(config.mesh))
  sizes, batch_size = _mesh_sizes(mesh._asdict(), compiled[0]), rows * mesh.row_blocks
  times = {c: _interpolated(compiled, rates, c, sizes, rows) for c in CORNERS}
  parts = {c: _parts(times[c], rates, c, devices, batch_size) for c in CORNERS}
  took: dict[Corner, float] = {c: sum(parts[c].values()) for c in CORNERS}
  expected = times["expected"]
  alone = sum(expected.compute.values()) + rates.at("expected")["host"]
  nodes = -(-devices // rates.per_node)
  totals = [{"": float(c.fit.memory.total)} for c in compiled if c.fit.memory]
  memory = _between(compiled, rows, totals)[""]
  size, fits = (devices, nodes, batch_size, rows), memory <= compiled[0].fit.limit
  return Step(*size, took, parts["expected"], expected.sent, alone, memory, fits)


def _mesh_sizes(shape: dict[str, int], first: Compiled) -> dict[str, int]:
  """Return the sizes of the program's mesh axes for the sizes of a different mesh."""
  sizes: dict[str, int] = dict(first.fit.mesh.shape)
  if "bn" in sizes:  # The axis is a part of `data`.
    shape["bn"] = min(sizes["bn"], shape["data"])
    shape["data"] //= shape["bn"]
  return {axis: shape.get(axis, n) for axis, n in sizes.items()}


def _interpolated(compiled, rates, corner, sizes, rows) -> Times:
  at = rates.at(corner)
  where = dict(sizes=sizes, per_node=rates.per_node, links=links(at))
  cost = functools.partial(transfer.seconds, **where)
  times = [c.program.times(at, cost) for c in compiled]
  return Times(*(_between(compiled, rows, parts) for parts in zip(*times, strict=True)))


def _between(compiled: Sequence[Compiled], rows: int, parts: Sequence[_Seconds]) -> _Seconds:
  """Interpolate the parts of the programs, by name, at a number of rows."""
  if len(parts) == 1:
    return parts[0]
  (a, b), (first, second) = parts, (c.rows for c in compiled)
  share = (rows - first) / (second - first)
  line = {k: a.get(k, 0.0) + share * (b.get(k, 0.0) - a.get(k, 0.0)) for k in {**a, **b}}
  return {k: max(value, 0.0) for k, value in line.items()}


def _parts(times: Times, rates: Rates, corner: Corner, devices: int, batch_size: int) -> _Seconds:
  """Return the seconds of a step by part."""
  at = rates.at(corner)
  compute = sum(times.compute.values())
  parts = times.compute | {f"exposed {axes}": s for axes, s in times.exposed.items() if s}
  hidden = max(sum(times.sent.values()) - sum(times.exposed.values()), 0.0)
  if lost := at["contention"] * hidden:
    parts["contention"] = lost
  parts["stragglers"] = compute * at["jitter"] * slowest_of(devices)
  parts["host"] = at["host"]
  if rate := rates.machine.input_rate:
    load = batch_size / hosts(devices, at) / rate
    parts["input"] = max(load - sum(parts.values()), 0.0)
  return parts


def slowest_of(number: int) -> float:
  """Return by how many standard deviations the slowest of `number` exceeds the mean.

  Example:
    >>> slowest_of(1), round(slowest_of(256), 2)
    (0.0, 2.81)
  """
  if number < 2:
    return 0.0
  return statistics.NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
