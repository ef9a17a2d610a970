"""Plan memory, communication, step time, run and job of a config on absent chips.

    jaxscale plan --config FILE --chips h100-256 [--site FILE.toml] [--nodes 1,2,4]

`make_plan` is the same as a function. Memory and bytes are exact, as they are the compiler's.
Times are predicted by a model (`kernels`, `timeline`, `transfer`, `step_plan`), with a range
from the slowest to the fastest that the uncertainty of the chip's constants allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale import hlo
from jaxscale.config.phase_settings import measuring
from jaxscale.errors import ConfigError
from jaxscale.mesh import MODEL_AXES
from jaxscale.metrics.text import grouped
from jaxscale.planning import estimate, job, step_plan, topologies
from jaxscale.planning.fits import Fit, RefusedError
from jaxscale.planning.machine import Machine, Rates, rates_of
from jaxscale.planning.step_plan import Compiled, Step
from jaxscale.planning.topologies import Chips
from jaxscale.training.flops import FORWARD_AND_BACKWARD

_GAIN = 1.4  # Strong scaling ends where doubling the devices gives less throughput than this.
_FEWER = 4  # The second program has so many times fewer rows, if the batch allows.
_MOST = 8  # Scaling is planned up to this multiple of the requested devices.
_Rows = Mapping[int, int | None]  # rows per device by the number of devices


class Plan(NamedTuple):
  """Plan of a config on some chips.

  Attributes:
    config: the config of the run.
    chips: the requested chips.
    rates: the rates of the chip and its links.
    fit: the memory of a device.
    collectives: the collectives of a step, from `hlo.collectives`.
    step: the step on those chips.
    example_flops: the model FLOPs to train on an example.
    parameters: the number of parameters of the model.
    strong: the steps with the same batch on other numbers of chips.
    weak: the steps with the same rows per device on other numbers of chips.
    skipped: the numbers of devices that do not divide the batch.
    knee: the number of devices above which doubling gives less than 1.4 times the speed; None
      if it was not found.
    run: the length of the run; None for text, which plan does not read.
    job: the predicted job; None for text, which plan does not read.
    growth: the savings of a growing batch by number of devices; () for a constant batch, for
      text, and if the programs have one number of rows.
    compiled: the names of the chips that programs were compiled for.
    seconds: the seconds of compilation.
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
  growth: tuple[job.Saving, ...]
  compiled: tuple[str, ...]
  seconds: float

  @property
  def ratio(self) -> float:
    """Compute to communication: FLOPs of an example's forward pass divided by parameters.

    arXiv:1709.05011 has 24.6 for AlexNet and 308 for ResNet-50; this gives 23.8 and 320.
    """
    return self.example_flops / FORWARD_AND_BACKWARD / self.parameters

  @property
  def mfu(self) -> float:
    """Model FLOPs utilization relative to the bfloat16 peak, as in `run.efficiency`."""
    peak = self.rates.constants["peak_bfloat16"].value * self.step.devices
    return self.step.rate * self.example_flops / peak


def make_plan(
  config: cfg.Config,
  chips: str | Chips,
  *,
  machine: Machine | None = None,
  nodes: Sequence[int] = (),
) -> Plan:
  """Compile a config's step, once or twice, and plan everything from the result.

  Args:
    config: the config of the run.
    chips: a name as in `topologies`, e.g. "h100-256".
    machine: the constants of a site, which replace the chip's.
    nodes: the numbers of nodes, or of TPU slices, to scale to; () uses powers of two.

  Raises:
    ConfigError: the chip is unknown, or the config does not fit so many chips.
    RefusedError: the compiler refuses the step.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> plan = make_plan(load_config("configs/resnet50_lars.py:32768"), "h100-256")
    ...                                                          # doctest: +SKIP
    >>> round(plan.step.rate), plan.knee                         # doctest: +SKIP
    (612345, 1024)
  """
  chips = topologies.find_chips(chips) if isinstance(chips, str) else chips
  rates = rates_of(chips.kind, machine)
  first = step_plan.compile_step(config, chips)
  experiment, fit = first.fit.experiment, first.fit
  sizes, num_train = _sizes(first.devices, rates.per_node, nodes), experiment.derived.num_train
  rows = {n: step_plan.rows_of(config, num_train, n) for n in sizes}
  compiled = [first, *_second(config, chips, first, rows)]
  step = step_plan.step_on(config, compiled, rates, first.devices, first.rows)
  strong, weak, skipped = _scaling(config, compiled, rates, rows)
  run, grows = job.run_of(experiment), ()
  if run and len(compiled) > 1:
    sized = functools.partial(step_plan.step_on, config, compiled, rates)
    grows = job.savings(experiment, [*{s.devices: s for s in (step, *strong)}.values()], sized)
  # A rule that measures may let the batch stay, so that the job must have time for all steps.
  took = grows[0].seconds if grows and not measuring(config.phases) else None
  return Plan(
    config=config,
    chips=chips,
    rates=rates,
    fit=fit,
    collectives=hlo.collectives(fit.compiled, fit.mesh),
    step=step,
    example_flops=experiment.example_flops,
    parameters=estimate.shapes_of(experiment).parameters,
    strong=strong,
    weak=weak,
    skipped=skipped,
    knee=_knee(strong),
    run=run,
    job=job.job_of(run, step, rates, took) if run else None,
    growth=grows,
    compiled=tuple(f"{chips.kind} x {c.devices}" for c in compiled),
    seconds=sum(c.fit.seconds for c in compiled),
  )


def _second(config: cfg.Config, chips: Chips, first: Compiled, sizes: _Rows) -> list[Compiled]:
  """Return the program with fewer rows; [] if all sizes have the same, or it does not compile."""
  other = {n: rows for n, rows in sizes.items() if rows and rows != first.rows}
  others = {name: other[n] for n in other if (name := step_plan.sized(chips, n))}
  wanted = max(first.rows / _FEWER, 1)
  if others:
    with contextlib.suppress(ConfigError, RefusedError):
      best = min(others, key=lambda name: abs(others[name] - wanted))
      return [step_plan.compile_step(config, topologies.find_chips(best))]
  return []


def _sizes(devices: int, per_node: int, nodes: Sequence[int]) -> list[int]:
  """Return the numbers of devices to scale to, including the requested ones."""
  if nodes:
    return sorted({devices, *(n * per_node for n in nodes)})
  sizes, size = {1, devices}, min(per_node, devices)
  while per_node > 64 and size % 2 == 0:  # Stay within a slice.
    sizes.add(size)
    size //= 2
  doublings = range((_MOST * devices).bit_length())
  larger = (min(per_node, devices) << i for i in doublings)
  return sorted({*sizes, *(n for n in larger if n <= _MOST * devices)})


def _scaling(config, compiled, rates: Rates, sizes: _Rows):
  """Return (strong scaling, weak scaling, sizes that fit neither)."""
  first = compiled[0]
  strong, weak, skipped = [], [], []
  for n, rows in sizes.items():
    try:
      if rows is not None and (len(compiled) > 1 or rows == first.rows):
        strong.append(step_plan.step_on(config, compiled, rates, n, rows))
      else:
        skipped.append(n)
      weak.append(step_plan.step_on(config, compiled, rates, n, first.rows))
    except ConfigError:  # The mesh does not fit so many devices.
      skipped.append(n)
  return tuple(strong), tuple(weak), tuple(dict.fromkeys(skipped))


def _knee(strong: Sequence[Step]) -> int | None:
  """Return the largest number of devices that is worth using."""
  fitting = [step for step in strong if step.fits]
  for step, more in itertools.pairwise(fitting):
    doublings = math.log2(more.devices / step.devices)
    if (more.rate / step.rate) ** (1 / doublings) < _GAIN:
      return step.devices
  return None


def bottleneck(plan: Plan) -> tuple[str, str]:
  """Return the part that takes most of the step, and what would shorten it.

  Returns:
    The name in `Step.parts`, and a sentence.
  """
  name, seconds = max(plan.step.parts.items(), key=lambda part: part[1])
  what, advice = _ADVICE.get(name, ("", ""))
  if not what:
    what = f"communication along {name.removeprefix('exposed ')} that no computation hides"
    advice = "more rows for each device, less to send (exchange=HalfPrecision) or faster links"
  if (what, advice) == _ARITHMETIC and plan.config.dtype == "float32":
    advice = f"dtype='bfloat16', {advice}"
  share = seconds / plan.step.seconds["expected"]
  return name, f"{what} takes {share:.0%} of the step; {advice} would shorten it"


def hybrid_advice(plan: Plan) -> str:
  """Return the advice to keep `fsdp` within a node, where the state fits; "" if it does not."""
  sizes, memory = plan.fit.mesh.shape, plan.fit.memory
  inside = plan.rates.per_node // math.prod(sizes.get(axis, 1) for axis in MODEL_AXES)
  times, rest = divmod(sizes.get("fsdp", 1), max(inside, 1))
  # Moments and parameters are arguments; gradients, as large as parameters, are temporaries.
  needed = times * memory.arguments * 4 / 3 + memory.temporaries if memory else math.inf
  if inside < 2 or times < 2 or rest or needed > plan.fit.limit:
    return ""
  return (
    f"fsdp {sizes['fsdp']} crosses nodes, so every gather and sum of a layer uses the network; "
    f"compare mesh.replica=-1 with mesh.fsdp={inside}, which sums over nodes once per step"
  )


# By part of the step: a description, and what would shorten it.
_ARITHMETIC = "arithmetic of products and convolutions", "less remat or a faster chip"
_ADVICE = {
  "memory": ("memory traffic", "more bandwidth or fewer passes over activations"),
  **dict.fromkeys(("matmul", "convolution"), _ARITHMETIC),
  "attention": ("arithmetic of attention", "shorter sequences or a faster chip"),
  "contention": ("compute that communication slows", "sending less"),
  "stragglers": ("waiting for the slowest device", "fewer or steadier nodes"),
  "input": ("waiting for examples", "more cores or a faster decoder"),
  "host": ("the host between steps", "more rows for each device"),
}


def as_json(plan: Plan) -> dict[str, Any]:
  """Return the plan as JSON, with every constant and its source."""
  from jaxscale.config.record import to_plain

  compiler = topologies.compiler(plan.chips.chip.platform)
  page: dict[str, Any] = dict(chips=plan.chips.name, calibrated=plan.rates.is_calibrated)
  page |= dict(compiled_for=[*plan.compiled], compiler=compiler)
  page["compile_seconds"] = round(plan.seconds, 1)
  page["memory"] = plan.fit.memory._asdict() if plan.fit.memory else None
  page |= dict(memory_limit=plan.fit.limit, sent=sent(plan), step=_step_json(plan.step))
  page |= dict(mfu=plan.mfu, flops_per_parameter=plan.ratio, bottleneck=bottleneck(plan)[1])
  page["advice"] = hybrid_advice(plan)
  page |= {name: [*map(_step_json, getattr(plan, name))] for name in ("strong", "weak")}
  page |= dict(skipped=[*plan.skipped], knee=plan.knee)
  for name, part in (("run", plan.run), ("job", plan.job)):
    page[name] = part._asdict() if part else None
  page["growth"] = [saving._asdict() for saving in plan.growth]
  machine = dataclasses.asdict(plan.rates.machine)
  page["machine"] = {n: v for n, v in machine.items() if v not in (None, ())}
  page["constants"] = {n: c._asdict() for n, c in sorted(plan.rates.constants.items())}
  return page | {"config": to_plain(plan.config)}


def _step_json(step: Step) -> dict[str, Any]:
  return step._asdict() | {"rate": step.rate, "efficiency": step.efficiency}


def sent(plan: Plan) -> list[dict[str, Any]]:
  """Return the bytes sent per device and step, by collective and axes."""
  rows = grouped(((r.kind, "+".join(r.axes or ()) or "all"), r) for r in plan.collectives)
  totals = {key: hlo.total(alike) for key, alike in rows.items()}
  return [
    {"collective": kind, "axes": axes, "times": total.times, "bytes": total.wire_bytes}
    for (kind, axes), total in totals.items()
  ]
