"""What was measured of a machine: rates of kernels by shape, costs of a CPU's loops.

A site's file has them in [machine]; `calibrate` writes them. Between the shapes that
were measured logarithms are interpolated, each dim on its own; beyond them the nearest
counts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError


@settings
class Table:
  """Rates on a grid of shapes.

  Attributes:
    kind: "matmul", "convolution", "attention", "memory", or a collective.
    form: which of them, as `kernels.Kernel.form` has it; of a collective "node" or
      "network".
    dtype: HLO's name.
    grid: sizes of each dim, rising.
    values: rates at all of them, the last dim fastest: FLOP/s, bytes/s, and of a
      collective seconds.
  """

  kind: str
  form: str = ""
  dtype: str = "f32"
  grid: tuple[tuple[float, ...], ...]
  values: Annotated[tuple[float, ...], "> 0"]

  def __post_init__(self):
    cells = math.prod(map(len, self.grid))
    if cells != len(self.values):
      n = len(self.values)
      raise ConfigError(f"Table.values: {n} for a grid of {cells}, measure again")
    for sizes in self.grid:
      if min(sizes) <= 0 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ConfigError(f"Table.grid: {sizes} do not rise from above 0")

  @property
  def key(self) -> tuple[str, str, str]:
    """What is looked for."""
    return self.kind, self.form, self.dtype


@settings
class Cost:
  """Seconds of one of something that a CPU's loops do.

  Attributes:
    name: of `loops.work`.
    seconds: of one.
  """

  name: str
  seconds: Annotated[float, ">= 0"]


@settings
class Calibrated:
  """When and where it was measured.

  Attributes:
    date: as 2026-11-25.
    machine: processor or accelerator, and how many cores a process has.
    command: that measured.
    chip: the kind that was measured, as --chips has it.
    processes: that took part; of one there are no links.
    spread: standard deviation of repeated measurements, as a share.
    off: error of the costs of loops, the median of the programs that they were fitted
      to, as a share.
  """

  date: str
  machine: str
  command: str
  chip: str
  processes: Annotated[int, ">= 1"] = 1
  spread: Annotated[float, "in [0, 1)"] = 0.0
  off: Annotated[float, "in [0, 1)"] = 0.0


class Measured:
  """Tables and costs, to be looked up."""

  def __init__(
    self, tables: Sequence[Table] = (), costs: Sequence[Cost] = (), slower: float = 1.0
  ):
    """Args: what was measured; and by how much all of it takes longer."""
    self.slower = slower
    self.costs: Mapping[str, float] = {c.name: slower * c.seconds for c in costs}
    self._tables = {t.key: t for t in tables}

  def rate(
    self, kind: str, form: str, dtype: str, dims: Sequence[float]
  ) -> float | None:
    """FLOP/s or bytes/s of a kernel; None: nothing like it was measured.

    Example:
      >>> table = Table(kind="memory", grid=((1e3, 1e5),), values=(1e9, 4e9))
      >>> round(Measured([table]).rate("memory", "", "f32", (1e4,)))
      2000000000
    """
    table = self._tables.get((kind, form, dtype))
    if table is None or len(table.grid) != len(dims):
      return None
    return interpolated(table, dims) / self.slower

  def seconds(
    self, kind: str, form: str, members: int, num_bytes: float
  ) -> float | None:
    """Of a collective among so many; None: it was not measured.

    Of another number of devices than measured the steps of a ring are as long as
    there, so that T(n, M) = (n - 1) / (m - 1) T(m, M m / n).
    """
    table = self._tables.get((kind, form, ""))
    if table is None or members < 2:
      return None
    sizes, payloads = table.grid
    at = min(sizes, key=lambda m: abs(math.log(m / members)))
    same = num_bytes * at / members if kind != "collective-permute" else num_bytes
    steps = (members - 1) / (at - 1) if kind != "collective-permute" else 1.0
    took = interpolated(table, (at, max(same, payloads[0])))
    return self.slower * steps * took * max(same / payloads[-1], 1.0)


def interpolated(table: Table, dims: Sequence[float]) -> float:
  """The value between those of a grid, by their logarithms.

  Args:
    table: of values.
    dims: as many as the grid has.
  """
  values = [math.log(v) for v in table.values]
  for sizes, size in zip(table.grid, dims, strict=True):  # the first dim goes first
    inner = len(values) // len(sizes)
    size = min(max(size, sizes[0]), sizes[-1])
    above = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
    if len(sizes) == 1:
      continue
    low, high = sizes[above - 1], sizes[above]
    share = math.log(size / low) / math.log(high / low)
    a, b = (values[i * inner : (i + 1) * inner] for i in (above - 1, above))
    values = [x + share * (y - x) for x, y in zip(a, b, strict=True)]
  return math.exp(values[0])


def read(table: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `machine.Machine` of a site's table [machine].

  Args:
    table: of TOML: `tables` is an array of tables, `loops` a table of numbers.
  """
  fields = dict(table)
  if isinstance(tables := fields.get("tables"), list):
    fields["tables"] = tuple(Table(**t) for t in tables)
  if isinstance(loops := fields.get("loops"), Mapping):
    fields["loops"] = tuple(Cost(name=n, seconds=s) for n, s in loops.items())
  if isinstance(calibrated := fields.get("calibrated"), Mapping):
    fields["calibrated"] = Calibrated(**calibrated)
  return fields
