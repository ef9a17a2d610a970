"""Constants of a machine that a run determines, for the site's file.

A run measures few things, so that it determines few constants: each is offered only
where the plan's seconds hang on it alone, by a rule that is named. What a run does not
determine says why.

    share of the peak   s' = s t / (T - o)     t: planned seconds of kernels of that
                                               kind, o: of the others, T: measured
    a link's rate       B' = bytes / (share (T - a))       a: planned of latencies
    a checkpoint's      bytes / seconds that training waited
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxscale.launch.measured import MeasuredRun
from jaxscale.metrics import text
from jaxscale.planning.machine import hosts
from jaxscale.planning.stored import Match, PlannedStep, StoredPlan

_KINDS = ("matmul", "convolution", "attention", "memory")
_DOMINANT = 0.8  # of the planned compute, above which one kind alone explains it
_HIDDEN = 0.1  # of what is sent, up to which the rest is the link's own time
_INPUT_BOUND = 0.2  # of the time, as `run.reporter` has it
_NOISE = 3.0  # times the step report's
_LARGE = 1e8  # bytes of a checkpoint, whose time is not that of opening files
_SAME = 0.02  # of a constant: as it was
# Of a constant that is a share, the largest that a site's file takes.
_AT_MOST_ONE = ("matmul", "attention", "memory")


class Correction(NamedTuple):
  """A constant as a run has it.

  Attributes:
    name: in the table [machine].
    value: None where the run does not determine it.
    was: in the plan; None: it had none.
    why: the reason, or why it is not determined.
  """

  name: str
  value: float | None
  was: float | None
  why: str


def corrections(
  run: MeasuredRun, found: Match, step_s: float
) -> tuple[Correction, ...]:
  """What a run says of the constants that its plan was made with.

  Args:
    run: that was planned.
    found: its plan, with a step.
    step_s: seconds of a step.
  """
  plan, step = found.plan, found.step
  if plan is None or step is None:
    return ()
  every = [_share(run, plan, step), *_link(run, plan, step)]
  every += [_input(run, step, plan), _start(run, plan), *_saving(run, found)]
  kept = [c for c in every if c is not None]
  return tuple(c for c in kept if not _is_same(c))


def _is_same(found: Correction) -> bool:
  known = found.value is not None and found.was
  return bool(known) and abs(found.value / found.was - 1) < _SAME  # pyright: ignore


def _share(run: MeasuredRun, plan: StoredPlan, step: PlannedStep) -> Correction | None:
  """The share of the peak, or of the bandwidth, that kernels of one kind reach."""
  planned = {k: step.parts[k] for k in _KINDS if step.parts.get(k)}
  compute = sum(planned.values())
  if not compute:
    return None
  by_cycles = "cycles" in plan.constants
  kind = max(planned, key=lambda k: planned[k])
  name = "cycles" if by_cycles else kind
  if plan.config.get("dtype") == "float32" and f"{kind}_float32" in plan.constants:
    name = f"{kind}_float32"
  if run.compute_s is None:
    return Correction(name, None, None, "log.step_report=True measures compute")
  if plan.has_tables:
    why = "kernels were planned by tables of a calibration"
    return Correction(name, None, None, f"{why}; `plan --calibrate` measures them anew")
  within = sum(
    s for n, s in step.parts.items()
    if n.startswith("exposed") and not {*n[8:].split("+")} <= {"replica", "data", "bn"}
  )  # fmt: skip
  if within > (1 - _DOMINANT) * compute:
    why = "what is sent within the model is in what was measured"
    return Correction(name, None, None, f"{why}; `plan --calibrate` measures kernels")
  took = (run.compute_s - within) / (1 + step.parts.get("stragglers", 0.0) / compute)
  was = plan.constants.get(name, 0.0)
  ratio = took / compute
  reason = f"compute took {ratio:.2f} times what was planned"
  if by_cycles:
    return Correction(name, was * ratio, was, reason)
  others = compute - planned[kind]
  if planned[kind] < _DOMINANT * compute or took <= others:
    kinds = sorted(planned, key=lambda k: -planned[k])
    shares = text.listed(f"{planned[k] / compute:.0%} {k}" for k in kinds)
    why = f"{reason}, and is planned as {shares}: one number does not tell them apart"
    both = "; `plan --calibrate` measures each"
    return Correction(" and ".join(kinds[:2]), None, None, why + both)
  value = was * planned[kind] / (took - others)
  if kind in _AT_MOST_ONE and value > 1:
    most = "bandwidth" if kind == "memory" else "peak"
    why = f"{reason}, which is more than the chip's {most} allows"
    return Correction(name, None, was, why)
  share = f"{planned[kind] / compute:.0%} of it planned as {kind}"
  return Correction(name, value, was, f"{reason}, {share}")


def _link(
  run: MeasuredRun, plan: StoredPlan, step: PlannedStep
) -> Iterator[Correction]:
  """The rate of the links that gradients cross, where nothing hides them."""
  sent = {
    axes: s for axes, s in step.sent.items() if s > 1e-3 * sum(step.parts.values())
  }
  if not sent or step.devices < 2:
    return
  per_node = plan.constants.get("per_node", 1)
  name = "network_link" if step.devices > per_node else "node_link"
  was, share = plan.constants.get(name), plan.constants.get("link_share")
  why = ""
  axes = next(iter(sent))
  exposed = step.parts.get(f"exposed {axes}", 0.0)
  size = sum(row["bytes"] for row in plan.sent if row["axes"] == axes)
  if len(sent) > 1:
    why = f"several axes send ({text.listed(sent)})"
  elif run.exposed_s is None:
    why = "log.step_report=True measures the exchange"
  elif _class(plan.config.get("exchange")) != "AllReduce":
    why = "the exchange also compresses, which takes time of its own"
  elif exposed < (1 - _HIDDEN) * sent[axes]:
    why = f"the plan hides {1 - exposed / sent[axes]:.0%} of what is sent"
  elif step != plan.step or not was or not share:
    why = "the plan has no bytes of this number of devices"
  elif run.exposed_s <= _NOISE * (run.exposed_noise_s or 0.05 * (run.compute_s or 0)):
    why = "what the exchange adds is within the noise of the step report"
  if why:
    yield Correction(name, None, was, f"{why}; `jaxscale bench` measures links")
    return
  assert was and share and run.exposed_s
  carried = size / (share * was)
  latency = sent[axes] - carried
  if not 0.5 * sent[axes] <= carried <= 1.05 * sent[axes] or run.exposed_s <= latency:
    why = f"latencies are {max(latency / sent[axes], 0):.0%} of what is planned to send"
    yield Correction(name, None, was, f"{why}; `jaxscale bench` measures links")
    return
  took = f"sending {text.byte_size(size)} took {text.short_time(run.exposed_s)}"
  planned = f"planned {text.short_time(exposed)}, none of it hidden"
  value = size / (share * (run.exposed_s - max(latency, 0.0)))
  yield Correction(name, value, was, f"{took}, {planned}")


def _class(node: object) -> str:
  return str(node.get("class")) if isinstance(node, Mapping) else ""


def _input(run: MeasuredRun, step: PlannedStep, plan: StoredPlan) -> Correction | None:
  """Return what a host loads, where training waits for it."""
  wait, rate = run.medians.get("perf/input_wait"), run.rate
  if wait is None or not rate or wait < _INPUT_BOUND:
    return None
  why = f"training waits for input {wait:.0%} of its time"
  return Correction("input_rate", rate / hosts(step.devices, plan.constants), None, why)


def _start(run: MeasuredRun, plan: StoredPlan) -> Correction | None:
  if not run.start_s:
    return None
  why = f"{text.duration(run.start_s)} from the first process to its first steps"
  why += ", with the step report" * (run.compute_s is not None)
  return Correction("start", run.start_s, plan.constants.get("start"), why)


def _saving(run: MeasuredRun, found: Match) -> Iterator[Correction]:
  """Bytes a second of a checkpoint that training waits for."""
  planned = found.plan.run if found.plan else None
  if not (planned and found.is_whole and run.is_done and run.goodput):
    return
  seconds, size = run.goodput.seconds, planned["state_bytes"]
  waited = seconds["saving"]
  if waited <= 0 or not planned["saves"]:
    return
  name, was = "save_rate", found.plan and found.plan.constants.get("save_rate")
  if size < _LARGE:
    why = f"checkpoints of {text.byte_size(size)} take as long as opening their files"
    yield Correction(name, None, was, why)
  elif seconds["lost"] or seconds["down"]:
    yield Correction(name, None, was, "the run was restarted, and saved more often")
  else:
    why = (
      f"training waited {text.duration(waited)} for {planned['saves']:,} checkpoints"
    )
    why += f" of {text.byte_size(size)}"
    yield Correction(name, planned["saves"] * size / waited, was, why)


def paste(run: str, found: Sequence[Correction]) -> str:
  """The lines of a site's file, each with its reason; "" where there are none.

  Args:
    run: its name.
    found: of `corrections`.

  Example:
    >>> found = Correction("start", 42.0, 180.0, "0:42 to the first step")
    >>> print(paste("first", [found]))  # doctest: +ELLIPSIS
    # of run first, ...
    [machine]
    start = 42.0  # was 180: 0:42 to the first step
  """
  lines = []
  for c in found:
    if c.value is not None:
      was = f"was {c.was:.3g}" if c.was else "was not given"
      lines.append(f"{c.name} = {_number(c.value)}  # {was}: {c.why}")
  if not lines:
    return ""
  return "\n".join(
    [f"# of run {run}, {time.strftime('%Y-%m-%d')}", "[machine]", *lines]
  )


def _number(value: float) -> str:
  """Three digits, as TOML has a float: 2.5e+10 becomes 25e9."""
  short = float(f"{value:.3g}")
  for power in (12, 9, 6):
    if short >= 10**power:
      return f"{short / 10**power:.10g}e{power}"
  return f"{short:.10g}" if short % 1 else f"{short:.1f}"
