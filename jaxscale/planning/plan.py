"""A plan: memory, bytes, seconds, run and job of a config on chips that are not here.

    jaxscale plan --config FILE --chips h100-256 [--site FILE.toml] [--nodes 1,2,4]

`make_plan` is the same as a function. What is exact (memory, bytes) is the compiler's;
seconds are a model's (`kernels`, `timeline`, `transfer`, `step_plan`), from the slowest
to the fastest that the constants of the chip allow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale import hlo
from jaxscale.errors import ConfigError
from jaxscale.planning import job, step_plan, topologies
from jaxscale.planning.fits import Fit, RefusedError
from jaxscale.planning.machine import Machine, Rates, rates_of
from jaxscale.planning.step_plan import Step
from jaxscale.planning.topologies import Chips
from jaxscale.training.flops import FORWARD_AND_BACKWARD

_GAIN = 1.4  # of throughput by twice the devices, below which strong scaling ends
_MOST = 8  # times the devices asked for, up to which scaling is planned


class Plan(NamedTuple):
  """What is planned.

  Attributes:
    config: of the run.
    chips: that were asked for.
    rates: of the chip and its links.
    fit: memory of a device.
    collectives: of a step, of `hlo.collectives`.
    step: on those chips.
    example_flops: model FLOPs that an example is trained with.
    parameters: of the model.
    strong: the same batch on other numbers of chips.
    weak: the same rows for each device on them.
    skipped: numbers of devices that the batch does not divide over.
    knee: devices up to which twice as many give 1.4 times the rate; None: not found.
    run: what it is made of; None: its text is not here.
    job: what the run takes; None likewise.
    compiled: names of the chips that were compiled for.
    seconds: of compilation.
  """

  config: cfg.Config
  chips: Chips
  rates: Rates
  fit: Fit
  collectives: list[hlo.Collective]
  step: Step
  example_flops: int
  parameters: int
  strong: tuple[Step, ...]
  weak: tuple[Step, ...]
  skipped: tuple[int, ...]
  knee: int | None
  run: job.RunLength | None
  job: job.Job | None
  compiled: tuple[str, ...]
  seconds: float

  @property
  def ratio(self) -> float:
    """FLOPs of an example's forward pass by parameters: compute to communication.

    24.6 of AlexNet and 308 of ResNet-50 in arXiv:1709.05011; ours: 23.8 and 320.
    """
    return self.example_flops / FORWARD_AND_BACKWARD / self.parameters

  @property
  def mfu(self) -> float:
    """Model FLOPs utilization: of the peak in bfloat16, as `run.efficiency` has it."""
    peak = self.rates.constants["peak_bfloat16"].value * self.step.devices
    return self.step.rate * self.example_flops / peak


def make_plan(
  config: cfg.Config,
  chips: str | Chips,
  *,
  machine: Machine | None = None,
  nodes: Sequence[int] = (),
) -> Plan:
  """Compile a config's step, once or twice, and plan the rest from that.

  Args:
    config: of the run.
    chips: a name as in `topologies`, "h100-256" say.
    machine: constants of a site, in place of the chip's.
    nodes: numbers of nodes, or of slices of TPUs, to scale to; (): powers of two.

  Raises:
    ConfigError: an unknown chip, or a config that does not fit so many.
    RefusedError: the compiler refuses the step.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> plan = make_plan(load_config("configs/resnet50_lars.py:32768"), "h100-256")
    ...                                                          # doctest: +SKIP
    >>> round(plan.step.rate), plan.knee                         # doctest: +SKIP
    (612345, 1024)
  """
  found = topologies.find_chips(chips) if isinstance(chips, str) else chips
  rates = rates_of(found.kind, machine)
  first = step_plan.compile_step(config, found)
  sizes = _sizes(first.devices, rates.per_node, nodes)
  compiled = [first, *_second(config, found, first, sizes)]
  step = step_plan.step_on(config, compiled, rates, first.devices, first.rows)
  strong, weak, skipped = _scaling(config, compiled, rates, sizes)
  run = job.run_of(first.experiment)
  return Plan(
    config=config,
    chips=found,
    rates=rates,
    fit=first.fit,
    step=step,
    collectives=hlo.collectives(first.fit.compiled, first.fit.mesh),
    example_flops=first.experiment.example_flops,
    strong=strong,
    weak=weak,
    parameters=_parameters(first.experiment),
    skipped=skipped,
    knee=_knee(strong),
    run=run,
    job=job.job_of(run, step, rates) if run else None,
    compiled=tuple(f"{found.kind} x {c.devices}" for c in compiled),
    seconds=sum(c.fit.seconds for c in compiled),
  )


def _second(
  config: cfg.Config, chips: Chips, first: step_plan.Compiled, sizes: Sequence[int]
) -> list[step_plan.Compiled]:
  """The program of other rows; [] where there is none, or it does not compile."""
  other = step_plan.second_size(config, chips, first, sizes)
  name = step_plan.sized(chips, other) if other else None
  if name is None:
    return []
  with contextlib.suppress(ConfigError, RefusedError):
    return [step_plan.compile_step(config, topologies.find_chips(name))]
  return []


def _parameters(experiment: Any) -> int:
  import jax

  params = experiment.abstract_state().params
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def _sizes(devices: int, per_node: int, nodes: Sequence[int]) -> list[int]:
  """Numbers of devices to scale to, those asked for among them."""
  if nodes:
    return sorted({devices, *(n * per_node for n in nodes)})
  sizes = {1, devices}
  size = min(per_node, devices)
  while size % 2 == 0 and per_node > 64:  # within a slice
    sizes.add(size)
    size //= 2
  size = min(per_node, devices)
  while size <= _MOST * devices:
    sizes.add(size)
    size *= 2
  return sorted(sizes)


def _scaling(config, compiled, rates: Rates, sizes: Sequence[int]):
  """(strong scaling, weak scaling, sizes that neither has)."""
  first = compiled[0]
  num_train = first.experiment.derived.num_train
  strong, weak, skipped = [], [], []
  for n in sizes:
    rows = step_plan.rows_of(config, num_train, n)
    is_planned = rows is not None and (len(compiled) > 1 or rows == first.rows)
    try:
      if is_planned and rows is not None:
        strong.append(step_plan.step_on(config, compiled, rates, n, rows))
      else:
        skipped.append(n)
      weak.append(step_plan.step_on(config, compiled, rates, n, first.rows))
    except ConfigError:  # the mesh does not fit so many
      skipped.append(n)
  return tuple(strong), tuple(weak), tuple(dict.fromkeys(skipped))


def _knee(strong: Sequence[Step]) -> int | None:
  """The most devices to which it pays to go."""
  fitting = [step for step in strong if step.fits]
  for step, more in itertools.pairwise(fitting):
    doublings = math.log2(more.devices / step.devices)
    gain = (more.rate / step.rate) ** (1 / doublings)
    if gain < _GAIN:
      return step.devices
  return None


def bottleneck(plan: Plan) -> tuple[str, str]:
  """What takes most of the step, and what would move it.

  Returns:
    Its name in `Step.parts`, and a sentence.
  """
  name, seconds = max(plan.step.parts.items(), key=lambda part: part[1])
  share = seconds / plan.step.seconds["expected"]
  axes = name.removeprefix("exposed ")
  sends = f"communication along {axes} that nothing hides; more rows for each device, "
  text = _ADVICE.get(name, f"{sends}less to send (exchange=HalfPrecision) or faster links")
  what, _, advice = text.partition("; ")
  if text == _ARITHMETIC and plan.config.dtype == "float32":
    advice = f"dtype='bfloat16', {advice}"
  return name, f"{what} takes {share:.0%} of the step; {advice} would shorten it"


# What a part of the step is; and what would move it.
_ARITHMETIC = "arithmetic of products and convolutions; less remat or a faster chip"
_ADVICE = {
  "memory": "memory traffic; more bandwidth or fewer passes over activations",
  "matmul": _ARITHMETIC,
  "convolution": _ARITHMETIC,
  "attention": "arithmetic of attention; shorter sequences or a faster chip",
  "contention": "compute that communication slows; sending less",
  "stragglers": "waiting for the slowest device; fewer or steadier nodes",
  "input": "waiting for examples; more cores or a faster decoder",
  "host": "the host between steps; more rows for each device",
}


def as_json(plan: Plan) -> dict[str, Any]:
  """The plan as plain values, with every constant and where it is from."""
  from jaxscale.config.record import to_plain

  return {
    "chips": plan.chips.name,
    "calibrated": plan.rates.is_calibrated,
    "compiled_for": list(plan.compiled),
    "compiler": topologies.compiler(plan.chips.chip.platform),
    "compile_seconds": round(plan.seconds, 1),
    "memory": plan.fit.memory._asdict() if plan.fit.memory else None,
    "memory_limit": plan.fit.limit,
    "sent": sent(plan),
    "step": _step_json(plan.step),
    "mfu": plan.mfu,
    "flops_per_parameter": plan.ratio,
    "bottleneck": bottleneck(plan)[1],
    "strong": [_step_json(s) for s in plan.strong],
    "weak": [_step_json(s) for s in plan.weak],
    "skipped": list(plan.skipped),
    "knee": plan.knee,
    "run": plan.run._asdict() if plan.run else None,
    "job": plan.job._asdict() if plan.job else None,
    "machine": _given(plan.rates.machine),
    "constants": {n: c._asdict() for n, c in sorted(plan.rates.constants.items())},
    "config": to_plain(plan.config),
  }


def _given(machine: Machine) -> dict[str, Any]:
  """What a site's file has, as plain values."""
  return {n: v for n, v in dataclasses.asdict(machine).items() if v not in (None, ())}


def _step_json(step: Step) -> dict[str, Any]:
  return step._asdict() | {"rate": step.rate, "efficiency": step.efficiency}


def sent(plan: Plan) -> list[dict[str, Any]]:
  """Bytes of a device and step, by collective and axes."""
  sums: dict[tuple[str, str], list[float]] = {}
  for row in plan.collectives:
    axes = "+".join(row.axes) if row.axes else "all"
    found = sums.setdefault((row.kind, axes), [0, 0.0])
    found[0] += row.times
    found[1] += row.times * row.wire_bytes
  return [
    {"collective": kind, "axes": axes, "times": int(times), "bytes": size}
    for (kind, axes), (times, size) in sums.items()
  ]
