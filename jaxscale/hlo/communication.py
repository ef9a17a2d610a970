"""The collectives of a compiled step: what crosses the network, and what hides it.

`collectives` reads the text of a compiled program (`Compiled.as_text()`), so it
says what the compiler made of a step, not what was written. For every collective
there is: kind, dtypes, bytes, who with whom and so which mesh axes, how often
(loops count their trips), and whether compute is scheduled between its start and
its end. With M bytes of payload, of one device, in a group of n, the bytes that
the device sends by the best algorithms are

    all-reduce                    2 M (n-1)/n    M: what a device puts in
    reduce-scatter, all-to-all      M (n-1)/n    M: what a device puts in
    all-gather                      M (n-1)/n    M: what a device has after it
    collective-permute, -broadcast  M            M: what a device puts in

(Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002). Bytes are those of the
operands; a TPU's all-reduce may take float32 and give bfloat16, and the text does
not say where between it rounds. What is read:

- CPU: plain instructions. The program has no start and end of them: `is_async` is
  False and says nothing of what the runtime does.
- GPU: `-start` and `-done`; `"is_sync":true` in their backend_config means that
  they run one after the other all the same, and then `is_async` is False.
- TPU: plain instructions, `-start`/`-done`, fusions that begin, carry on and end a
  collective while they compute ("AsyncCollectiveStart"), fusions of an all-reduce
  with the slice of its result (a reduce-scatter, as the name of their emitter
  "AllReduceScatterFusion" says), and between slices `send`/`recv` to the
  "megascale" runtime.

`overlap` is an estimate (`cost`) of compute that is *scheduled* between start and
end, as a share of the whole step's. It says what can be hidden, not what is: the
compute may be shorter than the transfer, and two transfers may share it.
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
from jaxscale.metrics.text import table as text_table


class Collective(NamedTuple):
  """One collective of a program.

  Attributes:
    kind: "all-reduce", "reduce-scatter", "all-gather", "collective-permute",
      "all-to-all", "ragged-all-to-all", "collective-broadcast" or "send".
    name: of the instruction.
    dtypes: HLO's names, "f32" say, of what is sent.
    payload_bytes: M above, of one device and one execution.
    wire_bytes: that one device sends in one execution, by the table above.
    groups: ids of the devices that take part with each other, or (source,
      target) pairs of a permute; ids count the mesh in its order. () where the
      text has them in no form known here.
    group_size: n above; 2 for pairs.
    axes: mesh axes along which devices of a group differ; None without a mesh or
      groups.
    times: executions per step: the trips of the loops around it.
    times_known: False where a loop's trips are not in the text and counted as 1.
    conditional: whether it is in a branch that need not be taken.
    is_async: whether it has a start and an end with, perhaps, compute between.
    overlap: share of the step's compute between start and end, over all
      executions; None where the program is not scheduled.
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
  """Of one device and one step."""

  times: int
  payload_bytes: int
  wire_bytes: float


class _Program(NamedTuple):
  module: Module
  sizes: dict[str, int] | None  # of the mesh
  cost: Cost
  total: float  # cost of a step


class Placed(NamedTuple):
  """A collective, and where it is in the schedule of a computation.

  Attributes:
    computation: its name.
    start: index in it of the instruction that begins the collective.
    end: index of the one that waits for it; start + 1 where it is not asynchronous.
    collective: what it is.
  """

  computation: str
  start: int
  end: int
  collective: Collective


def collectives(compiled: Any, mesh: Any = None) -> list[Collective]:
  """The collectives of a program, in the order of its text.

  Args:
    compiled: `jax.jit(f).lower(...).compile()`, or its text.
    mesh: whose axes to name: a `Mesh`, or its sizes by axis, in its order.

  Returns:
    One entry an instruction; see `Collective`.

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
  text = compiled if isinstance(compiled, str) else compiled.as_text()
  return [p.collective for module in parse.modules(text) for p in placed(module, mesh)]


def placed(module: Module, mesh: Any = None) -> list[Placed]:
  """The collectives of one program with their places; see `collectives`.

  Args:
    module: of `parse.modules`.
    mesh: whose axes to name.
  """
  shape: Mapping[str, int] | None = getattr(mesh, "shape", mesh)
  sizes = dict(shape) if shape is not None else None
  place = {"times": 1, "times_known": True, "conditional": False}
  return [*_walk(_Program(module, sizes, *costs(module)), module.entry, place)]


def total(table: Sequence[Collective], kind: str | None = None, axis: str | None = None) -> Totals:
  """Sums over a step, each entry times its executions.

  Those in branches count as if every branch were taken.

  Args:
    table: of `collectives`.
    kind: count these alone.
    axis: count those alone whose groups differ along this axis.
  """
  rows = [row for row in table if kind in (None, row.kind)]
  rows = [row for row in rows if axis is None or axis in (row.axes or ())]
  sums = ((r.times, r.times * r.payload_bytes, r.times * r.wire_bytes) for r in rows)
  return Totals(*map(sum, zip((0, 0, 0), *sums, strict=True)))


def summary(table: Sequence[Collective]) -> str:
  """A table for people, one line for those that are alike.

  Example:
    >>> print(summary([]))
    no collectives
  """
  if not table:
    return "no collectives"
  alike: dict[tuple, list[Collective]] = {}
  for row in table:
    key = (row.kind, row.axes, row.dtypes, row.is_async, row.conditional)
    alike.setdefault(key, []).append(row)
  head = ("collective", "axes", "dtype", "times", "MB", "sent MB", "form", "overlap")
  text = [text_table(head, map(_line, alike.values()), left=range(len(head)))]
  everything = total(table)
  behind = sum(r.times * r.wire_bytes for r in table if r.overlap)
  share = behind / everything.wire_bytes if everything.wire_bytes else 0.0
  sent = f"a device sends {everything.wire_bytes / 1e6:.3f} MB per step"
  text.append(f"{sent}, {share:.0%} of it with compute between start and end")
  if not all(row.times_known for row in table):
    text.append("some loops do not tell their trips: counted once, at least that")
  return "\n".join(text)


def _line(rows: list[Collective]) -> tuple[str, ...]:
  row, sums = rows[0], total(rows)
  overlap = [r.overlap for r in rows if r.overlap is not None]
  form = ("async" if row.is_async else "sync") + ", in a branch" * row.conditional
  axes = "?" if row.axes is None else ",".join(row.axes) or "none"
  sizes = f"{sums.payload_bytes / 1e6:.3f}", f"{sums.wire_bytes / 1e6:.3f}"
  share = f"{sum(overlap):.1%}" if overlap else "?"
  return row.kind, axes, ",".join(row.dtypes), str(sums.times), *sizes, form, share


def _walk(
  program: _Program, name: str, place: dict[str, Any], begun: Set[str] = frozenset()
) -> Iterator[Placed]:
  """The collectives of a computation and of those that it runs.

  Args:
    program: that the computation is in.
    name: of the computation.
    place: of it.
    begun: collectives that are open where it runs: fusions in it carry them on.
  """
  module = program.module
  computation = module.computations.get(name, {})
  schedule = list(computation.values())
  before = np.cumsum([0.0, *(program.cost(computation, i) for i in schedule)])
  under_way = set(begun)
  for i, instruction in enumerate(schedule):
    if instruction.opcode in ("while", "call", "conditional"):
      for inner in parse.called(instruction):
        inside = _inside(module, computation, instruction, inner, place)
        yield from _walk(program, inner, inside, under_way)
      continue
    found_in, marks = _collectives_of(module, computation, instruction)
    for found, home in found_in:
      key = _key(found)
      if "AsyncCollectiveDone" in marks:
        under_way.discard(key)
        continue
      if "AsyncCollectiveStart" in marks:
        under_way.add(key)
      elif instruction.opcode == "fusion" and key in under_way:
        continue  # it carries on what was begun
      is_async = instruction.opcode.endswith("-start") or instruction.opcode == "send"
      is_async |= key in under_way
      is_async &= '"is_sync":true' not in instruction.text
      end = _end(module, computation, i, key) if is_async else i + 1
      share = place["times"] * (before[end] - before[i + 1]) / (program.total or 1.0)
      overlap = float(share) if module.is_scheduled else None
      here = place | {"name": instruction.name, "is_async": is_async}
      row = _collective(program, found, home, home is not computation, **here, overlap=overlap)
      yield Placed(name, i, end, row)


def _inside(module, computation, instruction, inner, place) -> dict[str, Any]:
  """How often a computation runs that a while, call or conditional runs."""
  if instruction.opcode == "conditional":
    return place | {"conditional": True}
  if instruction.opcode == "call":
    return place
  trips = trip_count(module, computation, instruction)
  if trips is None:
    return place | {"times_known": False}
  asks = (parse.attribute(instruction, "condition") or "").lstrip("%") == inner
  return place | {"times": place["times"] * (trips + asks)}


def _collectives_of(
  module: Module, computation: Computation, instruction: Instruction
) -> tuple[list[tuple[Instruction, Computation]], list[str]]:
  """Collectives that an instruction is or wraps, and what marks async fusions.

  Returns:
    The collectives, each with its computation, and targets of custom calls.
  """
  opcode = instruction.opcode
  kind = opcode.removesuffix("-start")
  # A `send` may also go to a callback of this host.
  is_local = "is_host_transfer=true" in instruction.text
  is_local &= "megascale" not in instruction.text
  if kind in COLLECTIVES or (kind == "send" and not is_local):
    return [(instruction, computation)], []
  found, marks = [], []
  if opcode in ("fusion", "call") or opcode.endswith("-start"):
    for name in parse.called(instruction):
      home = module.computations.get(name, {})
      for inner in home.values():
        marks += re.findall(r'custom_call_target="(\w+)"', inner.text)
        deeper, more = _collectives_of(module, home, inner)
        found, marks = found + deeper, marks + more
  return found, marks


def _key(instruction: Instruction) -> str:
  """What the instructions have in common that begin, carry on and end the same."""
  if named := re.search(r'_xla_host_transfer_rendezvous="[^"]*"', instruction.text):
    return named.group()
  chain = re.search(r'chain_id="\w+"', instruction.text)
  parts = (parse.attribute(instruction, x) for x in ("channel_id", "replica_groups"))
  return f"{instruction.opcode} {[*parts]} {chain and chain.group()}"


def _end(module: Module, computation: Computation, start: int, key: str) -> int:
  """Where in the schedule a collective that was started ends.

  The end of the computation, where it is not in it: at least so much is between.
  """
  schedule = list(computation.values())
  started, end = {schedule[start].name}, None
  is_send = schedule[start].opcode == "send"
  for i, instruction in enumerate(schedule[start + 1 :], start + 1):
    follows = bool(started.intersection(instruction.operands))
    if is_send and instruction.opcode == "recv" and _key(instruction) == key:
      started.add(instruction.name)  # what was sent comes back here
    elif follows and instruction.opcode.endswith("-update"):
      started.add(instruction.name)
    elif follows and instruction.opcode.endswith("-done"):
      end = i
    elif instruction.opcode == "fusion":
      found, marks = _collectives_of(module, computation, instruction)
      if "AsyncCollectiveDone" in marks and any(_key(x) == key for x, _ in found):
        end = i
    if end is not None and not is_send:
      break
  return len(schedule) if end is None else end


def _collective(program, found, home, is_wrapped, **place: Any) -> Collective:
  """Kind, bytes and members; `place` has the other fields, of where it is."""
  sent = tuple(a for x in found.operands if x in home for a in home[x].shape)
  sent = sent or found.shape
  kind = found.opcode.removesuffix("-start")
  groups, size, axes = _members(found, program.module.num_devices, program.sizes)
  if kind == "send" and (between := _megascale(found)):
    kind, size = between
  if kind == "all-reduce" and is_wrapped:
    uses = [x.opcode for x in home.values() if found.name in x.operands]
    if set(uses) == {"dynamic-slice"}:  # nothing but a slice of it is used
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
    **place,
  )


def _members(
  found: Instruction, num_devices: int, sizes: dict[str, int] | None
) -> tuple[Groups, int, tuple[str, ...] | None]:
  """(groups, devices in the largest of them, mesh axes) of a collective.

  Args:
    found: the collective.
    num_devices: of the program.
    sizes: of the mesh axes, in their order; None: unknown.
  """
  pairs = re.search(r'source_target_pairs="?(\{[\d,{}\s]*\})', found.text)
  written = pairs.group(1) if pairs else parse.attribute(found, "replica_groups")
  groups = parse.replica_groups(written, 0 if pairs else num_devices)
  if groups is None:
    return (), num_devices, _slice_axes(found, num_devices, sizes)
  size, axes = max(len(group) for group in groups), None
  # Ids count the mesh in its order, as XLA's partition ids do under `jit`; those of
  # a program for one slice count that slice, which is the first of the mesh.
  if sizes and max(max(group) for group in groups) < math.prod(sizes.values()):
    places = [np.unravel_index(group, tuple(sizes.values())) for group in groups]
    spread = [any(map(np.ptp, along)) for along in zip(*places, strict=True)]
    axes = tuple(itertools.compress(sizes, spread))
  return groups, size, axes


def _slice_axes(
  found: Instruction, num_devices: int, sizes: dict[str, int] | None
) -> tuple[str, ...] | None:
  """Leading mesh axes that a program, written for one slice, leaves out."""
  if sizes is None or "megascale" not in found.text:
    return None
  left, axes = math.prod(sizes.values()), []
  if (_megascale(found) or ("", 0))[1] == left:  # between all, those of a slice too
    return tuple(axis for axis, size in sizes.items() if size > 1)
  for axis, size in sizes.items():
    if left == num_devices:
      break
    left, axes = left // size, [*axes, axis]
  return tuple(axes) if left == num_devices else None


def _megascale(found: Instruction) -> tuple[str, int] | None:
  """(kind, members) of a transfer between slices of TPUs; None for what is none.

  Members are slices, `"{1,2}x{0:3}"`, each device with its like in the others; or,
  of an all-to-all over more than them, single devices, `{{100000,...,200003}}`.
  """
  if not (kind := re.search(r'_xla_megascale_transfer_type="(\w+)"', found.text)):
    return None
  name = kind.group(1).lower().replace("_", "-")
  slices = re.search(r'_xla_megascale_target="?\{+([\d,]*)\}', found.text)
  count = len(slices.group(1).split(",")) if slices else 2
  return (name, count) if name in COLLECTIVES else ("send", 2)


def _wire_bytes(kind: str, payload: int, size: int, groups: Groups) -> float:
  """Bytes that one device sends; the table is in the module's docstring.

  Args:
    kind: of the collective.
    payload: M, in bytes.
    size: n, devices in a group.
    groups: pairs of a permute: one that moves nothing sends nothing.
  """
  if kind in ("collective-permute", "send"):
    moved = any(pair[0] != pair[-1] for pair in groups) or not groups
    return float(payload if moved else 0)
  if kind == "collective-broadcast":
    return float(payload if size > 1 else 0)
  return (2 if kind == "all-reduce" else 1) * payload * (size - 1) / size
