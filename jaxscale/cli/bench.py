"""Time every all-reduce on the devices of all processes, and print plans by size.

First a ring along each axis alone, at every size: alpha and beta of the axis are
fitted to it. Then all algorithms, the torus with the dimensions that are best on
those links, at every size. In both, calls take turns, so that other load on the
machine affects all alike; the figure of each is its median, that of the slowest
process. The time of an empty call is measured in the same turns and subtracted
before fitting, not from the table.

Several processes: start one on each host with srun, or set JAXSCALE_COORDINATOR,
JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID. On a CPU,
JAX_NUM_CPU_DEVICES=8 simulates eight devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale import cluster
from jaxscale.cli.parser import Namespace, Parser, file, value, whole
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.metrics.text import cell, table

if TYPE_CHECKING:
  from jaxscale.collectives.planner import Link, Measured

_DTYPES = ("float32", "bfloat16", "float16", "int32")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def add_arguments(parser: Parser) -> None:
  """The options."""
  shape = value(_shape, "sizes of axes, as 2x4", lambda sizes: min(sizes) > 0)
  sizes = value(_sizes, "bytes, as 4KB,1MB", lambda sizes: min(sizes) > 0)
  parser.option("--mesh AxB", "axes, slowest link first (default: one of all)", shape)
  text = "payloads of a device, 1 KB = 1,000 bytes"
  parser.option("--sizes SIZES", text, sizes, default="1KB,64KB,1MB,16MB")
  parser.option("--rounds N", "calls, of which the median counts", whole(1), default=11)
  dtypes = f"one of {', '.join(_DTYPES)}"
  parser.option("--dtype TYPE", dtypes, choices=_DTYPES, default="float32")
  parser.option("--algorithms NAMES", "some, e.g. ring,psum (default: all)")
  parser.option("--json FILE", "also write it, for read_measurements", file)


def _shape(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split("x"))


def _sizes(text: str) -> list[int]:
  sizes = []
  for part in text.upper().split(","):
    unit = next((u for u in _UNITS if part.endswith(u)), "")
    sizes.append(int(part.removesuffix(unit)) * _UNITS.get(unit, 1))
  return sizes


def make_mesh(shape: tuple[int, ...] | None) -> Any:
  """The mesh asked for, over all devices of all processes.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  import math

  import jax
  from jax.sharding import AxisType

  shape = shape or (jax.device_count(),)
  if (wanted := math.prod(shape)) != (count := jax.device_count()):
    text = f"--mesh={'x'.join(map(str, shape))}: has {wanted} devices, give sizes "
    raise ConfigError(f"{text}that multiply to the {count} there are")
  few = ("replica", "data")[-len(shape) :]
  names = few if len(shape) <= 2 else tuple(f"axis{i}" for i in range(len(shape)))
  return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape))


def report(
  measured: Sequence[Measured], links: Mapping[str, Link], empty: float
) -> list[str]:
  """Lines to print: times with predictions, links, plans."""
  from jaxscale.collectives.planner import plan

  rows = []
  for m in measured:
    by = m.plan
    model = plan(m.sizes, m.num_bytes, by.algorithm, links=links).seconds
    predicted = cell(None if model is None else 1e3 * (model + empty), ".3f")
    took, dims = f"{1e3 * (by.seconds or 0.0):.3f}", " x ".join(map(str, by.dims))
    rows.append((f"{m.num_bytes:,}", by.algorithm, took, predicted, dims))
  head = ("bytes", "algorithm", "measured ms", "model ms", "dims")
  lines = [table(head, rows, left=(1, 4))]
  lines += ["", f"an empty call: {1e6 * empty:.0f} us, in both columns"]
  for axis, link in links.items():
    rate = f"{1e-9 / link.beta:.3g} GB/s" if link.beta else "no seconds per byte"
    took = f"alpha {1e6 * link.alpha:.1f} us, beta {link.beta:.3g} s/byte"
    lines.append(f"{axis}: {took} ({rate})")
  lines.append("")
  for num_bytes in dict.fromkeys(m.num_bytes for m in measured):
    sizes = measured[0].sizes
    model = plan(sizes, num_bytes, links=links)
    best = plan(sizes, num_bytes, links=links, measured=measured)
    lines.append(f"plan for {num_bytes:,} bytes: {best} measured; by the model {model}")
  return lines


def run(args: Namespace) -> None:
  """Measure what is asked for, and print it."""
  from jaxscale.collectives.planner import ALGORITHMS

  args.algorithms = (args.algorithms or ",".join(ALGORITHMS)).split(",")
  for name in args.algorithms:
    if name not in ALGORITHMS:
      raise ConfigError(f"--algorithms={name}: {nearest(name, ALGORITHMS)}")
  with cluster.open_session():
    lines = _measured(args)
  if lines:  # outside: a table that cannot be printed fails the command
    print(*lines, sep="\n")


def _measured(args: Namespace) -> list[str]:
  """The lines to print; [] in all processes but the leader."""
  import jax  # only once all processes have joined

  from jaxscale.collectives import measurements as timing
  from jaxscale.collectives.planner import Link

  mesh, what = make_mesh(args.mesh), (args.sizes, args.dtype, args.rounds)
  links, empty = timing.measure_links(mesh, *what)
  measured = timing.measure_algorithms(mesh, args.algorithms, *what, links)
  if not cluster.is_leader():
    return []
  # An axis of one device has no link; nothing is ever sent along it.
  every = {a: links.get(a, Link(0.0, 0.0)) for a in mesh.axis_names}
  device, count = mesh.devices.flat[0].device_kind, jax.process_count()
  if args.json:
    extra = {"dtype": args.dtype, "rounds": args.rounds, "device": device}
    extra |= {"processes": count, "empty_seconds": empty}
    try:
      timing.write_measurements(args.json, mesh.shape, every, measured, **extra)
    except OSError as e:
      raise ConfigError(
        f"--json={args.json}: {e.strerror}; give another file"
      ) from None
  shape = ", ".join(f"{a} {n}" for a, n in mesh.shape.items())
  what = f"mesh {shape}; processes {count}; {device}; {args.dtype}"
  return [f"{what}; median of {args.rounds}", *report(measured, every, empty)]
