"""Collectives of a compiled step, and their overlap with compute.

`collectives` parses the text of a compiled program (`Compiled.as_text()`), so that it
shows the compiler's result, not the source. For every collective it returns kind, dtypes,
bytes, groups of devices and their mesh axes, the number of executions (loops count their
iterations), and whether compute is scheduled between its start and end. With M bytes of
payload per device and n devices in a group, the best algorithms send per device

    all-reduce                    2 M (n-1)/n    M: input of a device
    reduce-scatter, all-to-all      M (n-1)/n    M: input of a device
    all-gather                      M (n-1)/n    M: output of a device
    collective-permute, -broadcast  M            M: input of a device

(Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002). Bytes are those of the operands. A
TPU's all-reduce may take float32 and return bfloat16, and the text does not show where it
rounds. The forms of collectives are:

- CPU: plain instructions without start and end. `is_async` is False, although the runtime
  may run them asynchronously.
- GPU: `-start` and `-done`. With `"is_sync":true` in their backend_config they run
  synchronously, and `is_async` is False.
- TPU: plain instructions, `-start`/`-done`, fusions that start, continue and end a
  collective while they compute ("AsyncCollectiveStart"), fusions of an all-reduce with
  the slice of its result (a reduce-scatter; their emitter is "AllReduceScatterFusion"),
  and between slices `send`/`recv` to the "megascale" runtime.

`overlap` is an estimate (`cost`) of the compute that is *scheduled* between start and
end, as a share of the whole step. It is an upper limit of the time that is hidden: the
compute may be shorter than the transfer, and transfers may share it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from jaxscale.hlo import parse
from jaxscale.hlo.cost import COLLECTIVES, Cost, costs, trip_count
from jaxscale.hlo.parse import Computation, Groups, Instruction, Module
from jaxscale.metrics import text


class Collective(NamedTuple):
  """Collective of a program.

  Attributes:
    kind: "all-reduce", "reduce-scatter", "all-gather", "collective-permute",
      "all-to-all", "ragged-all-to-all", "collective-broadcast" or "send".
    name: name of the instruction.
    dtypes: dtypes that are sent, as HLO names, e.g. "f32".
    payload_bytes: payload M of one device and one execution.
    wire_bytes: bytes that one device sends in one execution, by the module's table.
    groups: ids of the devices in each group, or (source, target) pairs of a permute; ids
      count devices in the order of the mesh. () if the text has an unknown form.
    group_size: number of devices n in a group; 2 for pairs.
    axes: mesh axes along which devices of a group differ; None without a mesh or groups.
    times: executions per step, by the iterations of the loops around it.
    times_known: False if a loop's iterations are not in the text; they count as 1.
    conditional: whether it is in a branch that may not be taken.
    is_async: whether it has separate start and end instructions.
    overlap: share of the step's compute between start and end, over all executions; None
      if the program is not scheduled.
  """

  kind: str
  name: str
  dtypes: tuple[str, ...]
  payload_bytes: int
  wire_bytes: float
  groups: Groups
  group_size: int
  axes: tuple[str, ...] | None
  times: int
  times_known: bool
  conditional: bool
  is_async: bool
  overlap: float | None


class Totals(NamedTuple):
  """Totals of collectives for one device and one step."""

  times: int
  payload_bytes: int
  wire_bytes: float


_Axes = tuple[str, ...] | None


class _Program(NamedTuple):
  module: Module
  sizes: dict[str, int] | None  # sizes of the mesh axes in their order; None means unknown
  cost: Cost
  total: float  # total cost of a step


class Placed(NamedTuple):
  """Collective with its position in the schedule of a computation.

  Attributes:
    computation: name of the computation.
    start: index of the instruction that starts the collective.
    end: index of the instruction that waits for it; start + 1 if it is synchronous.
    collective: the collective.
  """

  computation: str
  start: int
  end: int
  collective: Collective


def collectives(compiled: Any, mesh: Any = None) -> list[Collective]:
  """Return the collectives of a program in the order of its text.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`, or its text.
    mesh: the mesh for the axis names: a `Mesh`, or sizes by axis in the order of the mesh.

  Returns:
    One entry per instruction; see `Collective`.

  Example:
    >>> text = '''HloModule m, is_scheduled=true, num_partitions=4
    ... ENTRY %m (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}
    ... }'''
    >>> (one,) = collectives(text, {"replica": 2, "data": 2})
    >>> one.kind, one.axes, one.payload_bytes, one.wire_bytes
    ('all-reduce', ('data',), 32, 32.0)
  """
  program = compiled if isinstance(compiled, str) else compiled.as_text()
  return [p.collective for module in parse.modules(program) for p in placed(module, mesh)]


def placed(module: Module, mesh: Any = None) -> list[Placed]:
  """Return the collectives of a module with their positions; see `collectives`.

  Args:
    module: a module from `parse.modules`.
    mesh: the mesh for the axis names.
  """
  shape: Mapping[str, int] | None = getattr(mesh, "shape", mesh)
  sizes = dict(shape) if shape is not None else None
  context = {"times": 1, "times_known": True, "conditional": False}
  return [*_walk(_Program(module, sizes, *costs(module)), module.entry, context)]


def total(table: Sequence[Collective], kind: str | None = None, axis: str | None = None) -> Totals:
  """Sum the collectives of a step, each multiplied by its number of executions.

  Collectives in branches count as if every branch were taken.

  Args:
    table: result of `collectives`.
    kind: count only this kind; None means all.
    axis: count only collectives whose groups differ along this axis; None means all.
  """
  rows = [row for row in table if kind in (None, row.kind)]
  rows = [row for row in rows if axis is None or axis in (row.axes or ())]
  sums = ((r.times, r.times * r.payload_bytes, r.times * r.wire_bytes) for r in rows)
  return Totals(*map(sum, zip((0, 0, 0), *sums, strict=True)))


def summary(table: Sequence[Collective]) -> str:
  """Format collectives as a text table, with one line per group of similar ones.

  Example:
    >>> print(summary([]))
    no collectives
  """
  if not table:
    return "no collectives"
  keys = ((row.kind, row.axes, row.dtypes, row.is_async, row.conditional) for row in table)
  alike = text.grouped(zip(keys, table, strict=True))
  head = ("collective", "axes", "dtype", "times", "MB", "sent MB", "form", "overlap")
  lines = [text.table(head, map(_line, alike.values()), left=range(len(head)))]
  everything = total(table)
  behind = sum(r.times * r.wire_bytes for r in table if r.overlap)
  share = behind / everything.wire_bytes if everything.wire_bytes else 0.0
  sent = f"a device sends {everything.wire_bytes / 1e6:.3f} MB per step"
  lines.append(f"{sent}, {share:.0%} of it in collectives that overlap with compute")
  if not all(row.times_known for row in table):
    lines.append("the iterations of some loops are unknown and counted as 1")
  return "\n".join(lines)


def _line(rows: list[Collective]) -> tuple[str, ...]:
  row, sums = rows[0], total(rows)
  overlap = [r.overlap for r in rows if r.overlap is not None]
  form = ("async" if row.is_async else "sync") + ", in a branch" * row.conditional
  axes = "?" if row.axes is None else ",".join(row.axes) or "none"
  sizes = f"{sums.payload_bytes / 1e6:.3f}", f"{sums.wire_bytes / 1e6:.3f}"
  share = f"{sum(overlap):.1%}" if overlap else "?"
  return row.kind, axes, ",".join(row.dtypes), str(sums.times), *sizes, form, share


def _walk(
  program: _Program, name: str, context: dict[str, Any], begun: Set[str] = frozenset()
) -> Iterator[Placed]:
  """Yield the collectives of a computation and of the computations that it runs.

  Args:
    program: the program of the computation.
    name: name of the computation.
    context: number of executions and conditionality of the computation.
    begun: collectives that are in progress when it runs; fusions in it continue them.
  """
  module = program.module
  computation = module.computations.get(name, {})
  schedule = list(computation.values())
  before = np.cumsum([0.0, *(program.cost(computation, i) for i in schedule)])
  under_way = set(begun)
  for i, instruction in enumerate(schedule):
    if instruction.opcode in ("while", "call", "conditional"):
      for inner in parse.called(instruction):
        inside = _inside(module, computation, instruction, inner, context)
        yield from _walk(program, inner, inside, under_way)
      continue
    collectives, marks = _collectives_of(module, computation, instruction)
    for op, home in collectives:
      key = _key(op)
      if "AsyncCollectiveDone" in marks:
        under_way.discard(key)
        continue
      if "AsyncCollectiveStart" in marks:
        under_way.add(key)
      elif instruction.opcode == "fusion" and key in under_way:
        continue  # the fusion continues a collective that was started before
      is_async = instruction.opcode.endswith("-start") or instruction.opcode == "send"
      is_async |= key in under_way
      is_async &= '"is_sync":true' not in instruction.text
      end = _end(module, computation, i, key) if is_async else i + 1
      share = context["times"] * (before[end] - before[i + 1]) / (program.total or 1.0)
      overlap = float(share) if module.is_scheduled else None
      fields = context | {"name": instruction.name, "is_async": is_async}
      row = _collective(program, op, home, home is not computation, **fields, overlap=overlap)
      yield Placed(name, i, end, row)


def _inside(module, computation, instruction, inner, context) -> dict[str, Any]:
  """Return the executions of a computation inside a while, call or conditional."""
  if instruction.opcode == "conditional":
    return context | {"conditional": True}
  if instruction.opcode == "call":
    return context
  trips = trip_count(module, computation, instruction)
  if trips is None:
    return context | {"times_known": False}
  asks = (parse.attribute(instruction, "condition") or "").lstrip("%") == inner
  return context | {"times": context["times"] * (trips + asks)}


def _collectives_of(
  module: Module, computation: Computation, instruction: Instruction
) -> tuple[list[tuple[Instruction, Computation]], list[str]]:
  """Return the collectives that an instruction is or wraps, and marks of async fusions.

  Returns:
    The collectives, each with its computation, and the targets of custom calls.
  """
  opcode = instruction.opcode
  kind = opcode.removesuffix("-start")
  # A `send` may also be a transfer to a callback on the host.
  is_local = "is_host_transfer=true" in instruction.text
  is_local &= "megascale" not in instruction.text
  if kind in COLLECTIVES or (kind == "send" and not is_local):
    return [(instruction, computation)], []
  result, marks = [], []
  if opcode in ("fusion", "call") or opcode.endswith("-start"):
    for name in parse.called(instruction):
      home = module.computations.get(name, {})
      for inner in home.values():
        marks += re.findall(r'custom_call_target="(\w+)"', inner.text)
        deeper, more = _collectives_of(module, home, inner)
        result, marks = result + deeper, marks + more
  return result, marks


def _key(instruction: Instruction) -> str:
  """Return a key that the instructions of one collective share."""
  if named := re.search(r'_xla_host_transfer_rendezvous="[^"]*"', instruction.text):
    return named.group()
  chain = re.search(r'chain_id="\w+"', instruction.text)
  parts = (parse.attribute(instruction, x) for x in ("channel_id", "replica_groups"))
  return f"{instruction.opcode} {[*parts]} {chain and chain.group()}"


def _end(module: Module, computation: Computation, start: int, key: str) -> int:
  """Return the index in the schedule at which a started collective ends.

  If it does not end in the computation, this is the computation's end.
  """
  schedule = list(computation.values())
  started, end = {schedule[start].name}, None
  is_send = schedule[start].opcode == "send"
  for i, instruction in enumerate(schedule[start + 1 :], start + 1):
    follows = bool(started.intersection(instruction.operands))
    if is_send and instruction.opcode == "recv" and _key(instruction) == key:
      started.add(instruction.name)  # the recv that belongs to the send
    elif follows and instruction.opcode.endswith("-update"):
      started.add(instruction.name)
    elif follows and instruction.opcode.endswith("-done"):
      end = i
    elif instruction.opcode == "fusion":
      inner, marks = _collectives_of(module, computation, instruction)
      if "AsyncCollectiveDone" in marks and any(_key(x) == key for x, _ in inner):
        end = i
    if end is not None and not is_send:
      break
  return len(schedule) if end is None else end


def _collective(program, instruction, home, is_wrapped, **context: Any) -> Collective:
  """Build a `Collective` from its instruction; `context` has the other fields."""
  sent = tuple(a for x in instruction.operands if x in home for a in home[x].shape)
  sent = sent or instruction.shape
  kind = instruction.opcode.removesuffix("-start")
  groups, size, axes = _members(program, instruction)
  if kind == "send" and (between := _megascale(instruction)):
    kind, size = between
  if kind == "all-reduce" and is_wrapped:
    uses = {x.opcode for x in home.values() if instruction.name in x.operands}
    if uses == {"dynamic-slice"}:  # only a slice of the result is used
      kind = "reduce-scatter"
  payload = parse.num_bytes(sent) * (size if kind == "all-gather" else 1)
  return Collective(
    kind=kind,
    dtypes=tuple(dict.fromkeys(a.dtype for a in sent)),
    payload_bytes=payload,
    wire_bytes=_wire_bytes(kind, payload, size, groups),
    groups=groups,
    group_size=size,
    axes=axes,
    **context,
  )


def _members(program: _Program, instruction: Instruction) -> tuple[Groups, int, _Axes]:
  """Return the groups of a collective, the size of the largest one, and the mesh axes."""
  num_devices, sizes = program.module.num_devices, program.sizes
  pairs = re.search(r'source_target_pairs="?(\{[\d,{}\s]*\})', instruction.text)
  written = pairs.group(1) if pairs else parse.attribute(instruction, "replica_groups")
  groups = parse.replica_groups(written, 0 if pairs else num_devices)
  if groups is None:
    return (), num_devices, _slice_axes(program, instruction)
  size, axes = max(len(group) for group in groups), None
  # Ids count devices in the order of the mesh, like XLA's partition ids under `jit`. Ids of
  # a program for one slice count the devices of that slice, the first of the mesh.
  if sizes and max(max(group) for group in groups) < math.prod(sizes.values()):
    coordinates = [np.unravel_index(group, tuple(sizes.values())) for group in groups]
    spread = [any(map(np.ptp, along)) for along in zip(*coordinates, strict=True)]
    axes = tuple(itertools.compress(sizes, spread))
  return groups, size, axes


def _slice_axes(program: _Program, instruction: Instruction) -> _Axes:
  """Return the leading mesh axes over slices, which a program for one slice omits."""
  num_devices, sizes = program.module.num_devices, program.sizes
  if sizes is None or "megascale" not in instruction.text:
    return None
  left, axes = math.prod(sizes.values()), []
  if (_megascale(instruction) or ("", 0))[1] == left:  # between all devices, also in a slice
    return tuple(axis for axis, size in sizes.items() if size > 1)
  for axis, size in sizes.items():
    if left == num_devices:
      break
    left, axes = left // size, [*axes, axis]
  return tuple(axes) if left == num_devices else None


def _megascale(instruction: Instruction) -> tuple[str, int] | None:
  """Return (kind, members) of a transfer between TPU slices; None for others.

  Members are slices, `"{1,2}x{0:3}"`, where each device communicates with its counterpart
  in the other slices. In an all-to-all over further axes members are single devices,
  `{{100000,...,200003}}`.
  """
  if not (kind := re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.text)):
    return None
  name = kind.group(1).lower().replace("_", "-")
  slices = re.search(r'_xla_megascale_target="?\{+([\d,]*)\}', instruction.text)
  count = len(slices.group(1).split(",")) if slices else 2
  return (name, count) if name in COLLECTIVES else ("send", 2)


def _wire_bytes(kind: str, payload: int, size: int, groups: Groups) -> float:
  """Return the bytes that one device sends, by the table in the module's docstring.

  Args:
    kind: kind of the collective.
    payload: payload M in bytes.
    size: number of devices n in a group.
    groups: groups, or pairs of a permute, which sends nothing if all pairs are identities.
  """
  if kind in ("collective-permute", "send"):
    moved = any(pair[0] != pair[-1] for pair in groups) or not groups
    return float(payload if moved else 0)
  if kind == "collective-broadcast":
    return float(payload if size > 1 else 0)
  return (2 if kind == "all-reduce" else 1) * payload * (size - 1) / size
