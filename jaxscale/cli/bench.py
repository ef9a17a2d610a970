"""Measure all-reduce algorithms on all devices, and print the fastest for each message size.

A ring along each axis is measured first, at every size, to fit alpha (seconds per message)
and beta (seconds per byte) of the axis. Then all algorithms are measured, the torus with
the dimensions that are best on those links. Calls of the algorithms alternate, so that
other load on the machine affects all of them equally. The printed time is the median over
--rounds of the slowest process. The time of an empty call is subtracted before the fit,
but not in the table.

For several processes, start one on each host with srun, or set JAXSCALE_COORDINATOR,
JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID. On a CPU, JAX_NUM_CPU_DEVICES=8 simulates
eight devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale import cluster
from jaxscale.cli.parser import Namespace, Parser, value, whole
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.metrics.text import cell, table

if TYPE_CHECKING:
  from jaxscale.collectives.planner import Link, Plan

_DTYPES = ("float32", "bfloat16", "float16", "int32")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  shape = value(_shape, "sizes of axes, as 2x4", lambda sizes: min(sizes) > 0)
  sizes = value(_sizes, "bytes, as 4KB,1MB", lambda sizes: min(sizes) > 0)
  parser.option("--mesh AxB", "the mesh axes, slowest links first (default: one axis)", shape)
  text = "the message sizes per device; 1 KB is 1,000 bytes"
  parser.option("--sizes SIZES", text, sizes, default="1KB,64KB,1MB,16MB")
  parser.option("--rounds N", "the number of timed calls per algorithm", whole(1), default=11)
  types = f"the type of the message: {', '.join(_DTYPES)}"
  parser.option("--dtype TYPE", types, choices=_DTYPES, default="float32")
  parser.option("--algorithms NAMES", "the algorithms, e.g. ring,psum (default: all)")


def _shape(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split("x"))


def _sizes(text: str) -> list[int]:
  sizes = []
  for part in text.upper().split(","):
    unit = next((u for u in _UNITS if part.endswith(u)), "")
    sizes.append(int(part.removesuffix(unit)) * _UNITS.get(unit, 1))
  return sizes


def run(args: Namespace) -> None:
  """Measure and print the report."""
  from jaxscale.collectives.planner import ALGORITHMS

  algorithms = (args.algorithms or ",".join(ALGORITHMS)).split(",")
  for name in algorithms:
    if name not in ALGORITHMS:
      raise ConfigError(f"--algorithms={name}: {nearest(name, ALGORITHMS)}")
  with cluster.open_session():
    import jax  # Imported once all processes have joined.

    from jaxscale.collectives import measurements

    mesh, what = make_mesh(args.mesh), (args.sizes, args.dtype, args.rounds)
    note = ""
    if not args.algorithms and any(n & (n - 1) for n in mesh.shape.values()):
      algorithms.remove("halving_doubling")
      note = "; without halving_doubling, which needs powers of two"
    links, empty = measurements.measure_links(mesh, *what)
    measured = measurements.measure_algorithms(mesh, algorithms, *what, links)
    count, is_leader = jax.process_count(), cluster.is_leader()
  if is_leader:  # Outside the session, so that a failed print fails the command.
    shape = ", ".join(f"{a} {n}" for a, n in mesh.shape.items())
    device = mesh.devices.flat[0].device_kind
    print(f"mesh {shape}; processes {count}; {device}; {args.dtype}; median of {args.rounds}{note}")
    print(*report(mesh.shape, measured, links, empty), sep="\n")


def make_mesh(shape: tuple[int, ...] | None) -> Any:
  """Return a mesh of this shape over all devices of all processes.

  Raises:
    ConfigError: the product of the sizes is not the number of devices.
  """
  import jax
  from jax.sharding import AxisType

  shape = shape or (jax.device_count(),)
  if (size := math.prod(shape)) != (count := jax.device_count()):
    text = f"--mesh={'x'.join(map(str, shape))}: needs {size} devices; give sizes "
    raise ConfigError(f"{text}whose product is {count}, the number of devices")
  few = ("replica", "data")[-len(shape) :]
  names = few if len(shape) <= 2 else tuple(f"axis{i}" for i in range(len(shape)))
  return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape))


def report(
  sizes: Mapping[str, int],
  measured: Sequence[tuple[int, Plan]],
  links: Mapping[str, Link],
  empty: float,
) -> list[str]:
  """Return the lines to print: times with predictions, links, the fastest at each size."""
  from jaxscale.collectives.planner import plan

  rows: list[tuple[str, ...]] = []
  best: dict[int, Plan] = {}
  for num_bytes, by in measured:
    model = plan(sizes, num_bytes, by.algorithm, links=links).seconds
    predicted = cell(None if model is None else 1e3 * (model + empty), ".3f")
    took, dims = f"{1e3 * _seconds(by):.3f}", " x ".join(map(str, by.dims))
    rows.append((f"{num_bytes:,}", by.algorithm, took, predicted, dims))
    best[num_bytes] = min(best.get(num_bytes, by), by, key=_seconds)
  lines = [table(("bytes", "algorithm", "measured ms", "model ms", "dims"), rows, (1, 4))]
  lines += ["", f"an empty call: {1e6 * empty:.0f} us, in both columns"]
  for axis, link in links.items():
    rate = f"{1e-9 / link.beta:.3g} GB/s" if link.beta else "no seconds per byte"
    took = f"alpha {1e6 * link.alpha:.1f} us, beta {link.beta:.3g} s/byte"
    lines.append(f"{axis}: {took} ({rate})")
  lines.append("")
  for num_bytes, by in best.items():
    model = plan(sizes, num_bytes, links=links)
    lines.append(f"plan for {num_bytes:,} bytes: {by} measured; by the model {model}")
  return lines


def _seconds(measured: Plan) -> float:
  return measured.seconds or 0.0
