"""Summarize a trace: step time, operations, parts of a step, and idle devices.

A trace is an XSpace of XLA's profiler (`*.xplane.pb`), as `run.tracer` and
`jax.profiler.trace` write it. It has planes of lines of events, which
`jax.profiler.ProfileData` reads. An operation of the compiled program is

- on GPUs an event of a stream in a plane "/device:GPU:0", with the name of its HLO instruction
  as the stat "hlo_op"; an event without it, such as a copy, has its own name;
- on TPUs an event of the line "XLA Ops" of its plane;
- on CPUs an event of any thread with "hlo_op" and "device_ordinal". Work in other threads ends
  with an event "end: ..." that has the operation as its producer.

The plane "/host:metadata" has the program itself (HloProto), which ProfileData does not return.
`_programs` reads the few fields with an instruction's position in the model. Their numbers are
those of tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto.

A loop, a call or a branch counts for the time that no operation inside of it covers. A device is
idle while it runs no operation; a device that waits in a collective is busy.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError, printable
from jaxscale.files import read_bytes
from jaxscale.hlo.cost import COLLECTIVES
from jaxscale.metrics.text import few, grouped, plural, short_time, table

# Host parts in the order of a step (`run.tracer`); device parts by the scopes of
# `training.step`, where transposed gradient operations are the backward pass.
HOST_PARTS = ("input", "step", "check", "evaluation", "saving")
# "communication" is all communication but the exchange: sums of metrics, BatchNorm's means,
# gathers of parameters.
DEVICE_PARTS = ("forward", "backward", "exchange", "communication", "update", "other")
_PART = re.compile(r"\b(exchange|update|gradients)/")
_DEVICE = re.compile(r"/device:(?:GPU|TPU|CUSTOM):\d+")
_CONTROL = ("while", "call", "conditional")  # opcodes
_WRAPPER = re.compile(r"jit\(|(shard_map|while|body|closed_call|vmap\(\))$")
_WIDEST = 60  # characters of a cell
_HLO = re.compile(r"%?([\w.\-]+) = ")  # "%fusion.3 = f32[8] fusion(...)"


class Op(NamedTuple):
  """Operation of the compiled program, summed over the trace.

  Attributes:
    name: the name of its HLO instruction.
    where: the position in the model, as JAX names it; "" if the trace does not have it.
    part: the part of the step, one of `DEVICE_PARTS`.
    seconds: the seconds over all devices.
    count: the number of executions over all devices.
  """

  name: str
  where: str
  part: str
  seconds: float
  count: int


class Summary(NamedTuple):
  """Summary of the traces of one or several processes.

  Attributes:
    steps: the numbers of the steps in the trace of any process.
    step_s: the seconds per step, the mean over processes; 0 if no steps were recorded.
    seconds: the seconds from the first step or operation to the end of the last one, the mean
      over processes.
    idle: the share of these seconds in which a device is idle, by device.
    ops: the operations, the most expensive first.
    host: the seconds that the main thread spent in each of `HOST_PARTS`, the mean over
      processes.
  """

  steps: tuple[int, ...]
  step_s: float
  seconds: float
  idle: dict[str, float]
  ops: tuple[Op, ...]
  host: dict[str, float]

  def parts(self) -> dict[str, float]:
    """Return the seconds of operations by part of the step, over all devices."""
    seconds = grouped((op.part, op.seconds) for op in self.ops)
    return {part: sum(seconds[part]) for part in DEVICE_PARTS if part in seconds}


class _Instruction(NamedTuple):
  opcode: str
  where: str  # its place in the model


class _Event(NamedTuple):
  start: float  # ns
  end: float
  name: str
  instruction: _Instruction


def find(folder: Path) -> list[Path]:
  """Find the newest trace in a folder, which has one file per process.

  Args:
    folder: the folder of a trace, or of several; or a workdir; or one file.

  Raises:
    ConfigError: there is no trace.
  """
  if folder.is_file():
    return [folder]
  files = [p for p in sorted(folder.rglob("*.xplane.pb")) if p.is_file()]
  # The profiler writes to a folder whose name begins with ".".
  files = [p for p in files if not any(x[0] == "." for x in p.relative_to(folder).parts)]
  if not files:
    hint = "use a folder with *.xplane.pb files, which --config.log.profile creates"
    raise ConfigError(f"{folder}: no trace, {hint}")
  newest = max(files, key=lambda p: p.stat().st_mtime).parent
  return [p for p in files if p.parent == newest]


def summarize(files: Sequence[Path]) -> Summary:
  """Read and summarize a trace.

  Args:
    files: the files, from `find`.

  Raises:
    ConfigError: a file is not a trace, or has no operation and no step.
  """
  traces = [_read(path) for path in files]
  totals: dict[tuple[str, str, str], tuple[float, int]] = {}
  idle: dict[str, float] = {}
  host: dict[str, float] = collections.defaultdict(float)
  for path, (_, devices, parts, (start, end)) in zip(files, traces, strict=True):
    process = f"{path.name.removesuffix('.xplane.pb')} " if len(files) > 1 else ""
    for device, events in devices.items():
      busy = _covered((e.start, e.end) for e in events)
      idle[f"{process}{device}"] = 1 - busy / (end - start)
      for event, seconds in _own_seconds(events):
        key = event.name, event.instruction.where, _part_of(*event.instruction)
        total, count = totals.get(key, (0.0, 0))
        totals[key] = total + seconds, count + 1
    for part, begin, finish in parts:
      host[part] += 1e-9 * (finish - begin) / len(files)
  ops = [Op(*key, seconds, count) for key, (seconds, count) in totals.items()]
  each = [1e-9 * (end - start) / len(s) for s, *_, (start, end) in traces if s]
  return Summary(
    steps=tuple(sorted({step for steps, *_ in traces for step in steps})),
    step_s=sum(each) / max(len(each), 1),
    seconds=1e-9 * sum(end - start for *_, (start, end) in traces) / len(files),
    idle=idle,
    ops=tuple(sorted(ops, key=lambda op: -op.seconds)),
    host={part: host[part] for part in HOST_PARTS if part in host},
  )


def text(summary: Summary, most: int = 10) -> str:
  """Format a summary: steps, idle devices, parts, and the most expensive operations.

  Args:
    summary: the summary, from `summarize`.
    most: the number of operations to show.
  """
  total = sum(op.seconds for op in summary.ops) or 1.0
  lines = [_head(summary)]
  if summary.idle:
    low, high = min(summary.idle.values()), max(summary.idle.values())
    spread = f"{low:.0%}" if len(summary.idle) == 1 else f"{low:.0%} to {high:.0%}"
    lines.append(f"idle: {spread} of the time, {plural(len(summary.idle), 'device')}")
  if summary.host:
    shares = [f"{p} {s / summary.seconds:.0%}" for p, s in summary.host.items()]
    lines.append(f"host: {', '.join(shares)} of the time")
  shares = [f"{part} {s / total:.0%}" for part, s in summary.parts().items() if s >= 0.005 * total]
  lines.append(f"devices: {', '.join(shares) or 'no operations'} of their operations")
  rows = []
  for op in summary.ops[:most]:
    name, where = printable(op.name)[:_WIDEST], printable(_short(op.where))
    took, share = short_time(op.seconds), f"{op.seconds / total:.1%}"
    rows.append((name, took, share, f"{op.count:,}", op.part, where))
  head = ("operation", "time", "share", "count", "part", "of")
  return "\n".join([*lines, "", table(head, rows, left=(0, 4, 5))])


def _head(summary: Summary) -> str:
  steps = summary.steps
  if not steps:
    return f"{short_time(summary.seconds)} without a named step"
  named = f"steps {steps[0]} to {steps[-1]}"
  if len(steps) != steps[-1] - steps[0] + 1:
    named = f"steps {few(steps)}"
  return f"{named} in {short_time(summary.seconds)}, {short_time(summary.step_s)} each"


def _short(where: str) -> str:
  """Return the end of a position in the model, which tells the most."""
  first = where.partition(":")[0].replace("/(", "/")  # XLA joins the names of fused operations.
  names = [name for name in first.split("/") if not _WRAPPER.match(name)]
  return "/".join(names[-3:])[-_WIDEST:]


def _part_of(opcode: str, where: str) -> str:
  """Return the part of an operation, one of `DEVICE_PARTS`.

  Example:
    >>> _part_of("dot", "jit(train_step)/gradients/transpose(jvp(CNN))/dot_general")
    'backward'
    >>> _part_of("all-reduce", "jit(train_step)/exchange/psum"), _part_of("copy", "")
    ('exchange', 'other')
  """
  scopes = _PART.findall(where)  # Several if XLA has fused instructions.
  if "exchange" in scopes:
    return "exchange"
  if opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
    return "communication"
  if "gradients" not in scopes:
    return scopes[0] if scopes else "other"
  return "backward" if "transpose(" in where else "forward"


def _read(path: Path):
  """Read the steps, operations by device, host parts, and the window, all in ns."""
  import jax.profiler

  try:
    content = read_bytes(path)
    planes = list(jax.profiler.ProfileData.from_serialized_xspace(content).planes)
  except (OSError, RuntimeError) as e:
    problem = getattr(e, "strerror", None) or "not a trace"
    raise ConfigError(f"{path}: {problem}; use an intact *.xplane.pb") from None
  steps, devices, ends = {}, collections.defaultdict(list), {}
  parts: list[tuple[str, float, float]] = []  # of the host
  for plane in planes:
    if _DEVICE.fullmatch(plane.name):
      devices[plane.name.removeprefix("/device:")] += _device_events(plane)
    elif plane.name == "/host:CPU":
      for line in plane.lines:
        for event in line.events:
          _host_event(event, steps, devices, ends, parts)
  known = _programs(content)

  def operation(start, end, key, name, program):
    guess = _Instruction(name.partition(".")[0], "")
    # Events of a cached program have its old number, and metadata the new one.
    found = (known[p, name] for p in (program, program.partition("(")[0]) if (p, name) in known)
    return _Event(start, max(end, ends.get(key, 0)), name, next(found, guess))

  operations = {
    device: sorted((operation(*event) for event in events), key=lambda e: e[:2])
    for device, events in devices.items()
    if events
  }
  times = [(e.start, e.end) for events in operations.values() for e in events]
  times += [*steps.values(), *((start, end) for _, start, end in parts)]
  if not times:
    advice = "trace training steps, or use another trace"
    raise ConfigError(f"{path}: no step and no operation in it; {advice}")
  window = min(a for a, _ in times), max(b for _, b in times)
  return steps, operations, parts, window


def _device_events(plane: Any) -> Iterator[tuple[float, float, Any, str, str]]:
  """Yield the operations of an accelerator's plane, without derived lines."""
  operations = [line for line in plane.lines if line.name == "XLA Ops"]
  streams = [line for line in plane.lines if line.name.startswith("Stream")]
  for line in operations or streams:
    for event in line.events:
      stats = dict(event.stats)
      name = str(stats.get("hlo_op") or event.name)
      if found := _HLO.match(name):
        name = found[1]
      yield event.start_ns, event.end_ns, None, name, _program(stats)


def _host_event(event: Any, steps, devices, ends, parts) -> None:
  """Add an event of the host's plane to the list that it belongs to."""
  name, start, end = event.name, event.start_ns, event.end_ns
  if name in HOST_PARTS:
    parts.append((name, start, end))
    return
  if "::" in name:  # Most events are XLA's own code, and not operations.
    return
  stats = dict(event.stats)
  if name.startswith("end: "):
    ends[stats.get("_ct"), stats.get("_c")] = start
  elif "hlo_op" in stats:
    key, device = (stats.get("_pt"), stats.get("_p")), stats.get("device_ordinal", 0)
    devices[f"CPU:{device}"].append((start, end, key, str(stats["hlo_op"]), _program(stats)))
  elif isinstance(step := stats.get("step_num"), int):
    steps[step] = (start, end)


def _program(stats: dict[str, Any]) -> str:
  """Return the program's name in "/host:metadata", "jit_train_step(7)"; "" if missing."""
  number = stats.get("program_id", "")
  return f"{name}({number})" if (name := stats.get("hlo_module")) else ""


def _own_seconds(events: Sequence[_Event]) -> Iterator[tuple[_Event, float]]:
  """Yield every operation with its time, excluding operations inside of loops and calls.

  Args:
    events: the events of a device, in order.
  """
  for i, event in enumerate(events):
    covered = 0.0
    if event.instruction.opcode in _CONTROL:
      after = itertools.islice(events, i + 1, None)
      inside = itertools.takewhile(lambda e, end=event.end: e.start < end, after)
      spans = ((e.start, min(e.end, event.end)) for e in inside)
      covered = _covered(spans)
    yield event, 1e-9 * (event.end - event.start - covered)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
  """Return the length of the union of spans, which are in order of their starts.

  Example:
    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4.0
  """
  covered, reached = 0.0, -math.inf
  for start, end in spans:
    covered += max(end - max(start, reached), 0.0)
    reached = max(end, reached)
  return covered


def _programs(content: bytes) -> dict[tuple[str, str], _Instruction]:
  """Return the instructions of all programs in a trace, by program and name.

  Each instruction is also listed without its program's number, and without its program, as an
  event on TPUs has no program. The result is empty if the trace has no program, or in an unknown
  format.
  """
  from google.protobuf.message import DecodeError

  programs = {}
  with contextlib.suppress(ValueError, DecodeError):
    for plane in _inside(content, 1):  # XSpace.planes
      if _text(plane, 2) != "/host:metadata":  # XPlane.name
        continue
      for metadata in _inside(plane, 4, 2):  # XPlane.event_metadata: the values of a map
        program = _text(metadata, 2)  # its name
        # XEventMetadata.stats, XStat.bytes_value (HloProto), HloProto.hlo_module,
        # HloModuleProto.computations, HloComputationProto.instructions.
        for fields in _inside(metadata, 5, 6, 1, 3, 2):
          where = "".join(_text(m, 2) for m in _inside(fields, 7))  # OpMetadata.op_name
          name, instruction = _text(fields, 1), _Instruction(_text(fields, 2), where)
          programs[program, name] = instruction
          programs.setdefault((program.partition("(")[0], name), instruction)
          programs.setdefault(("", name), instruction)
  return programs


def _inside(message: bytes, number: int, *inner: int) -> Iterator[bytes]:
  """Yield the values of a field of type message or text, or of fields inside of it."""
  from google.protobuf import empty_pb2, unknown_fields

  # A message without a schema: all of its fields are unknown to Empty.
  for field in unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message)):
    if field.field_number == number and isinstance(field.data, bytes):
      yield from _inside(field.data, *inner) if inner else (field.data,)


def _text(message: bytes, number: int) -> str:
  """Return the value of a text field; "" if the message does not have it."""
  return next(_inside(message, number), b"").decode()
