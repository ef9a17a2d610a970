"""Measures the chip that it runs on, and the links between processes.

    jaxscale plan --calibrate --site FILE.toml

Each program of `micro_kernels` is compiled and called in turns; the median counts. Of
products and convolutions that gives a table of rates. Of a CPU's loops the compiled
text says how much of what is in them (`loops`), and seconds of each are those that fit
best: least squares of the logarithms of programs' seconds.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import cluster
from jaxscale.collectives.measurements import fit_link, in_turns, medians
from jaxscale.planning import loops, micro_kernels, parse
from jaxscale.planning.cost import flops_of, is_free
from jaxscale.planning.measured import Calibrated, Cost, Table
from jaxscale.planning.micro_kernels import Micro


class Sizes(NamedTuple):
  """What is measured; a test takes less.

  Attributes:
    turns: calls of each, of which the median counts.
    products: (m, n, k) that are measured.
    forms: of products.
    convolutions: (side, input channels, output channels, size of the kernel).
    images: rows of a convolution.
    shapes: of convolutions: `micro_kernels.convolution`.
    flops: of a product, at least: small ones are done in a batch.
    loops: by how much a CPU's loops are smaller.
    most: of the programs with loops.
    payloads: bytes of collectives.
  """

  turns: int = 3
  products: micro_kernels.Grid = ((16, 128, 1024), *((4, 16, 128, 1024),) * 2)
  forms: tuple[str, ...] = ("nn", "nt", "tn")
  convolutions: micro_kernels.Grid = ((4, 8, 32), (3, 32, 128), (32, 128), (1, 3))
  shapes: tuple[str, ...] = ("plain", "stride", "input", "kernel", "kernel stride")
  images: int = 16
  flops: float = 2e7
  loops: int = 1
  most: int | None = None
  payloads: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


USUAL = Sizes()
TINY = Sizes(
  turns=2, products=((8, 16), (8,), (8, 16)), forms=("nn",),
  convolutions=((4, 8), (4,), (8,), (3,)), shapes=("plain",), images=2, flops=1e4,
  loops=256, most=8, payloads=(1 << 10, 1 << 12),
)  # fmt: skip
_SHORTEST = 2e-3  # seconds of calls that are timed together
_SEVERAL, _LARGE, _SQUARE = 16, 2**20, 256  # collectives in a program; bytes; a product
# Costs that are not of an element, and log(seconds) that no element takes: what few of
# the programs have would else stand for all that is wrong with them.
_WHOLE, _SLOWEST = ("call", "kernel", "buffer", "page"), math.log(1e-8)
_COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip


class Timed(NamedTuple):
  """A program that was timed.

  Attributes:
    text: as compiled.
    buffers: that it takes and gives.
    pages: of memory that the kernel of the system filled in, a call.
    seconds: of each turn.
  """

  text: str
  buffers: int
  pages: float
  seconds: list[float]

  @property
  def median(self) -> float:
    """Of the turns."""
    return statistics.median(self.seconds)


def timed(micro: Micro, turns: int) -> Timed:
  """Compiles a program and calls it in turns.

  All processes call it: those of a node share its memory, and do the same at the same
  time in a step too.
  """
  values = micro_kernels.arguments(micro)
  compiled = jax.jit(micro.function).lower(*values).compile()

  def call() -> Any:
    return compiled(*values)

  jax.block_until_ready(call())
  began = time.perf_counter()
  jax.block_until_ready(call())
  count = max(int(_SHORTEST / max(time.perf_counter() - began, 1e-7)), 1)
  cluster.barrier("calibrate")
  _seconds(call, count)
  before = _pages()
  seconds = [_seconds(call, count) for _ in range(turns)]
  pages = (_pages() - before) / (turns * count)
  buffers = len(values) + len(jax.tree.leaves(call()))
  return Timed(compiled.as_text() or "", buffers, pages, seconds)


def _pages() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _seconds(call: Callable[[], Any], count: int) -> float:
  began = time.perf_counter()
  done = None
  for _ in range(count):
    done = call()
  jax.block_until_ready(done)
  return (time.perf_counter() - began) / count


def work_of(found: Timed) -> dict[str, float]:
  """All that a program does, by names of costs."""
  total = {"call": 1.0, "buffer": float(found.buffers), "page": found.pages}
  for module in parse.modules(found.text):
    home = module.computations[module.entry]
    free = (i for i in home.values() if is_free(i) and i.opcode == "parameter")
    given = sum(parse.num_bytes(i.shape) for i in free)
    made = sum(parse.num_bytes(i.shape) for i in home.values() if not is_free(i))
    for instruction in home.values():
      if is_free(instruction) or flops_of(module, home, instruction):
        continue
      for name, amount in loops.work(module, home, instruction, given + made).items():
        total[name] = total.get(name, 0.0) + amount
  return {name: amount for name, amount in total.items() if amount}


def fit_loops(
  measured: Iterable[tuple[Mapping[str, float], float]],
) -> tuple[list[Cost], float]:
  """Seconds of each cost, from (work, seconds) of programs; and how far it is off.

  Returns:
    Costs, and the median of errors of programs' seconds, as a share.

  Example:
    >>> (one, two), error = fit_loops(
    ...   [({"a": 1e3}, 2e-6), ({"b": 4e3}, 4e-6), ({"a": 1e3, "b": 1e3}, 3e-6)])
    >>> round(1e9 * one.seconds, 3), round(1e9 * two.seconds, 3)
    (2.0, 1.0)
  """
  from scipy.optimize import least_squares

  rows = [(work, max(seconds, 1e-9)) for work, seconds in measured]
  names = sorted({name for work, _ in rows for name in work})
  amounts = np.array([[work.get(n, 0.0) for n in names] for work, _ in rows])
  wanted = np.log([seconds for _, seconds in rows])
  # Begin where each cost alone would take a part of its cheapest program.
  each = np.exp(wanted)[:, None] / np.where(amounts > 0, amounts, np.nan)
  start = np.log(np.nanmin(each, axis=0) / 3)
  highest = np.array([math.inf if n in _WHOLE else _SLOWEST for n in names])
  start = np.minimum(start, highest - 1)

  def errors(logs):
    return np.log(amounts @ np.exp(logs)) - wanted

  def slopes(logs):
    parts = amounts * np.exp(logs)
    return parts / parts.sum(axis=1, keepdims=True)

  bounds = start - 12, np.minimum(start + 3, highest)
  jac = cast("Any", slopes)
  found = least_squares(errors, start, jac, bounds, loss="soft_l1", f_scale=0.3)
  off = float(np.median(np.abs(np.expm1(errors(found.x)))))
  pairs = zip(names, np.exp(found.x), strict=True)
  return [Cost(name=n, seconds=float(f"{x:.4g}")) for n, x in pairs], off


def measure_chip(sizes: Sizes = USUAL) -> tuple[dict[str, Any], float]:
  """What one device of this process has.

  Args:
    sizes: of what is measured.

  Returns:
    Fields of `machine.Machine`, and `Calibrated.off`.
  """
  is_cpu = jax.devices()[0].platform == "cpu"
  call = timed(Micro("empty", lambda x: x, [((1,), "float32")]), sizes.turns)
  dtypes = ("float32",) if is_cpu else ("float32", "bfloat16")
  tables, spreads, off = [], [], 0.0
  for dtype in dtypes:
    for form in sizes.forms:
      tables.append(_products(form, dtype, sizes, call.median, spreads))
    for form in sizes.shapes:
      tables.append(_convolutions(form, dtype, sizes, call.median, spreads))
  fields: dict[str, Any] = {"tables": tables, "host": call.median}
  fastest = max(max(t.values) for t in tables if t.kind == "matmul")
  fields["bandwidth"], memory = _memory(sizes, call.median)
  fields["tables"].append(memory)
  if is_cpu:
    some = itertools.islice(micro_kernels.loops(sizes.loops), sizes.most)
    found = [timed(micro, sizes.turns) for micro in some]
    costs, off = fit_loops((work_of(t), t.median) for t in found)
    # A run keeps its memory (`cluster.cpu_settings`), and has no new pages in a step.
    costs = [cost for cost in costs if cost.name != "page"]
    fields |= {"loops": costs, "matmul": 1.0, "memory": 1.0}
    fields |= {"peak_float32": fastest, "peak_bfloat16": fastest}
  fields["jitter"] = statistics.median(spreads)
  return fields, off


def _products(form, dtype, sizes: Sizes, empty: float, spreads: list[float]) -> Table:
  values = []
  for m, n, k in micro_kernels.grid(sizes.products):
    micro = micro_kernels.product(form, dtype, m, n, k, sizes.flops)
    found = timed(micro, sizes.turns)
    spreads.append(_spread(found.seconds))
    values.append(2 * m * n * k * micro.times / max(found.median - empty, 1e-7))
  short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
  return _table("matmul", form, short, sizes.products, values)


def _convolutions(form, dtype, sizes: Sizes, empty: float, spreads) -> Table:
  side, *others = sizes.convolutions
  values = []
  for shape in micro_kernels.grid(sizes.convolutions):
    micro = micro_kernels.convolution(form, dtype, *shape, rows=sizes.images)
    found = timed(micro, sizes.turns)
    spreads.append(_spread(found.seconds))
    (module,) = parse.modules(found.text)
    home = module.computations[module.entry]
    flops = sum(flops_of(module, home, i) for i in home.values())
    values.append(flops / max(found.median - empty, 1e-7))
  short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
  halved = 2 if form in ("stride", "kernel stride") else 1
  pixels = tuple((n // halved) ** 2 for n in side)
  taps = tuple(n * n for n in others[-1])
  return _table("convolution", form, short, (pixels, *others[:-1], taps), values)


def _memory(sizes: Sizes, empty: float) -> tuple[float, Table]:
  """Bytes/s of a large array that is read and written; and by size."""
  counts = [n // sizes.loops for n in (2**14, 2**18, 2**22)]
  rates = []
  for n in counts:
    found = timed(Micro("add", lambda x: x + 1, [((n,), "float32")]), sizes.turns)
    rates.append(8 * n / max(found.median - empty, 1e-7))
  return rates[-1], _table("memory", "", "f32", ([8 * n for n in counts],), rates)


def _spread(seconds: Sequence[float]) -> float:
  return statistics.pstdev(seconds) / statistics.mean(seconds)


def _table(
  kind: str, form: str, dtype: str, grid: Any, values: Sequence[float]
) -> Table:
  rounded = tuple(float(f"{v:.4g}") for v in values)
  sizes = tuple(tuple(map(float, s)) for s in grid)
  return Table(kind=kind, form=form, dtype=dtype, grid=sizes, values=rounded)


def measure_links(sizes: Sizes = USUAL) -> dict[str, Any]:
  """Fields of `machine.Machine` that the links between all processes have.

  All processes call it. Devices of one host are taken to be of one node.

  Args:
    sizes: of what is measured.
  """
  from jax.sharding import AxisType

  n = jax.device_count()
  if n < 2:
    return {}
  mesh = jax.make_mesh((n,), ("data",), (AxisType.Auto,))
  link = "node" if jax.process_count() == 1 else "network"
  tables, fields = [], {}
  for kind in _COLLECTIVES:
    took = _collective_seconds(mesh, kind, sizes)
    tables.append(
      _table(kind, link, "", ((n,), sizes.payloads), [max(t, 1e-7) for t in took])
    )
    if kind == "all-reduce":
      found = fit_link(n, sizes.payloads, took)
      fields[f"{link}_link"] = 1 / max(found.beta, 1e-15)
      fields[f"{link}_alpha"] = found.alpha
  return fields | {"tables": tables, "link_share": 1.0}


def _collective_seconds(mesh: Any, kind: str, sizes: Sizes) -> list[float]:
  """Seconds of one, as a step has them: each after some compute that it waits for.

  A process with a single core has its sockets served only when the scheduler gives way
  to that thread, which costs milliseconds, or nothing: the mean of several counts. All
  begin together: of gloo's that send before they ask for what they receive, one that
  comes late has the other's data wait behind its own, and takes up to twice as long.
  """
  n, took = mesh.size, []
  for size in sizes.payloads:
    count = max(size // 4 // (n if kind == "all-gather" else 1), n)
    count -= count % n
    repeats = _SEVERAL if size < _LARGE else 2
    calls = {
      name: _chained(mesh, _sender(name, n), count, repeats) for name in (kind, "empty")
    }
    found = medians(in_turns(calls, sizes.turns + 2))
    took.append(max(found[kind] - found["empty"], 0.0) / repeats)
  return took


def _chained(
  mesh: Any, send: Callable[[Any], Any], count: int, repeats: int
) -> Callable[[], Any]:
  """So many collectives of `count` float32, in turn; all devices begin together."""
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  rows = NamedSharding(mesh, P("data"))
  x = jax.jit(lambda: jnp.ones(mesh.size * count), out_shardings=rows)()
  square = jnp.full((_SQUARE, _SQUARE), 1e-3)

  def local(x, square):
    y = square * jax.lax.pmax(square[0, 0], "data")
    for _ in range(repeats):
      y = y @ square
      y = y + send(x * y[0, 0])[0]
    return y[:1, :1]

  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False
  )
  compiled = jax.jit(mapped).lower(x, square).compile()
  return lambda: compiled(x, square)


def _sender(kind: str, n: int) -> Callable[[Any], Any]:
  from jax import lax

  ring = [(i, (i + 1) % n) for i in range(n)]
  each: dict[str, Callable[[Any], Any]] = {
    "empty": lambda x: x,
    "all-reduce": lambda x: lax.psum(x, "data"),
    "all-gather": lambda x: lax.all_gather(x, "data", tiled=True),
    "reduce-scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
    "all-to-all": lambda x: lax.all_to_all(x.reshape(n, -1), "data", 0, 0)[0],
    "collective-permute": lambda x: lax.ppermute(x, "data", ring),
  }
  return each[kind]


def calibrate(command: str, sizes: Sizes = USUAL) -> dict[str, Any]:
  """All that is measured here, as fields of `machine.Machine`.

  All processes call it; each measures its chip, the slowest counts for the links.

  Args:
    command: that measures, for the file.
    sizes: of what is measured.
  """
  fields, off = measure_chip(sizes)
  links = measure_links(sizes)
  fields["tables"] += links.pop("tables", [])
  return fields | links | {"calibrated": _where(command, fields["jitter"], off)}


def _where(command: str, spread: float, off: float) -> Calibrated:
  device = jax.devices()[0]
  kind = chip_of(device)
  name = device.device_kind
  if device.platform == "cpu":
    cores = len(os.sched_getaffinity(0))
    name = f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'} a process"
  date = datetime.date.today().isoformat()
  return Calibrated(
    date=date, machine=name, command=command, chip=kind,
    processes=jax.process_count(), spread=min(round(spread, 4), 0.99),
    off=min(round(off, 4), 0.99),
  )  # fmt: skip


def chip_of(device: Any) -> str:
  """The name that --chips has for a device; "" for one that is not known."""
  from jaxscale.planning.machine import chip_kind, known_chips

  if device.platform == "cpu":
    return "cpu"
  words = device.device_kind.lower()
  kinds = {name: chip_kind(name).lower() for name in known_chips()}
  found = [name for name, kind in kinds.items() if kind and kind in words]
  return max(found, key=len, default="")


def _processor() -> str:
  from pathlib import Path

  info = Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
  return names[0] if names else platform.processor() or platform.machine()
