"""Measures every all-reduce on a mesh, fits alpha and beta, prints the plan.

python -m jaxscale.cli.bench [--mesh 2x4] [--sizes 4KB,1MB] [--json FILE]

First a ring along each axis alone, at every size: alpha and beta of the axis are
fitted to it. Then all algorithms, the torus with the dimensions that are best on
those links, at every size. In both, calls take turns, so that what else the
machine does falls on all alike; the figure of each is its median, that of the
slowest process. What an empty call takes is measured in the same turns and
subtracted before fitting, not from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import cluster
from jaxscale.collectives.plan import ALGORITHMS, Link, Measured, plan
from jaxscale.collectives.records import write_measurements
from jaxscale.config.loading import split_args
from jaxscale.config.validation import nearest
from jaxscale.errors import EXIT_DONE, ConfigError, leave, one_line_errors

DTYPES = ("float32", "bfloat16", "float16", "int32")
USAGE = """\
usage: python -m jaxscale.cli.bench [--mesh 2x4] [--sizes SIZES] [--rounds N]
                                            [--dtype TYPE] [--algorithms NAMES]
                                            [--json FILE]

Times every all-reduce on the devices of all processes, fits alpha and beta of each
mesh axis, and prints the plan for each size.

  --mesh AxB        sizes of the axes, slowest link first (default: one axis of all)
  --sizes SIZES     payloads of a device, as 4KB,1MB (default: 1KB,64KB,1MB,16MB);
                    1 KB = 1,000 bytes
  --rounds N        calls of each, of which the median counts (default: 11)
  --dtype TYPE      of the payload: float32, bfloat16, float16, int32
                    (default: float32)
  --algorithms NAMES  some of ring,torus,hierarchical,halving_doubling,psum
                    (default: all)
  --json FILE       also write what was found, for read_measurements

Several processes: start one on each host with srun, or set JAXSCALE_COORDINATOR,
JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID. On a CPU,
JAX_NUM_CPU_DEVICES=8 simulates eight devices.

exit code: 0 done, 2 a mistake in what was asked for, 1 anything else"""
OPTIONS = ("--mesh", "--sizes", "--rounds", "--dtype", "--algorithms", "--json")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


class Request(NamedTuple):
  """What a command line asks for.

  Attributes:
    mesh: sizes of the axes, slowest first; None: one axis of all devices.
    sizes: bytes.
    rounds: calls of each.
    dtype: of the payload.
    algorithms: to be timed.
    json: file to write; None: none.
  """

  mesh: tuple[int, ...] | None = None
  sizes: tuple[int, ...] = (10**3, 64 * 10**3, 10**6, 16 * 10**6)
  rounds: int = 11
  dtype: str = "float32"
  algorithms: tuple[str, ...] = ALGORITHMS
  json: str | None = None


def parse(argv: Sequence[str]) -> Request:
  """Split the command line.

  Raises:
    ConfigError: an option that does not exist, lacks its value or has a bad one.

  Example:
    >>> parse(["--mesh=2x4", "--sizes", "4KB,1MB"]).sizes
    (4000, 1000000)
  """
  given = {name.removeprefix("--"): text for name, text in split_args(argv, OPTIONS)}
  readers: dict[str, Callable[[str], Any]] = {
    "mesh": lambda text: tuple(
      _whole("--mesh", text, part) for part in text.split("x")
    ),
    "sizes": lambda text: tuple(_bytes(text, part) for part in text.split(",")),
    "rounds": lambda text: _whole("--rounds", text, text),
    "dtype": lambda text: _one_of("--dtype", text, DTYPES),
    "algorithms": lambda text: tuple(
      _one_of("--algorithms", part, ALGORITHMS) for part in text.split(",")
    ),
    "json": _writable,
  }
  return Request(**{name: readers[name](text) for name, text in given.items()})


def _whole(name: str, text: str, part: str) -> int:
  if not (part.isdecimal() and int(part)):
    example = "sizes of axes, as 2x4" if name == "--mesh" else "a whole number >= 1"
    raise ConfigError(f"{name}={text}: give {example}")
  return int(part)


def _bytes(text: str, part: str) -> int:
  unit = next((u for u in UNITS if part.upper().endswith(u)), "")
  number = part[: len(part) - len(unit)]
  if not (number.isdecimal() and int(number)):
    raise ConfigError(f"--sizes={text}: give bytes, as 4KB,1MB")
  return int(number) * UNITS.get(unit, 1)


def _writable(path: str) -> str:
  # Before anything is measured for it.
  if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
    raise ConfigError(f"--json={path}: give a file in a directory that exists")
  return path


def _one_of(name: str, text: str, choices: Sequence[str]) -> str:
  if text not in choices:
    raise ConfigError(f"{name}={text}: {nearest(text, choices)}")
  return text


def make_mesh(shape: tuple[int, ...] | None) -> Any:
  """The mesh asked for, over all devices of all processes.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  import math

  import jax
  from jax.sharding import AxisType

  shape = shape or (jax.device_count(),)
  if math.prod(shape) != jax.device_count():
    raise ConfigError(
      f"--mesh={'x'.join(map(str, shape))}: has {math.prod(shape)} devices, give sizes "
      f"that multiply to the {jax.device_count()} there are"
    )
  few = ("replica", "data")[-len(shape) :]
  names = few if len(shape) <= 2 else tuple(f"axis{i}" for i in range(len(shape)))
  return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape))


def table(
  measured: Sequence[Measured], links: Mapping[str, Link], empty: float
) -> list[str]:
  """Lines to print: times with predictions, links, plans."""
  lines = [f"{'bytes':>12}  {'algorithm':18}{'measured ms':>12}{'model ms':>11}  dims"]
  for m in measured:
    by = m.plan
    shape = " x ".join(map(str, by.dims))
    model = plan(m.sizes, m.num_bytes, by.algorithm, links=links).seconds
    predicted = "-" if model is None else f"{1e3 * (model + empty):.3f}"
    took = 1e3 * (by.seconds or 0.0)
    head = f"{m.num_bytes:12,}  {by.algorithm:18}{took:12.3f}{predicted:>11}"
    lines.append(f"{head}  {shape}".rstrip())
  lines += ["", f"an empty call: {1e6 * empty:.0f} us, in both columns"]
  for axis, link in links.items():
    rate = f"{1e-9 / link.beta:.3g} GB/s" if link.beta else "no seconds a byte"
    took = f"alpha {1e6 * link.alpha:.1f} us, beta {link.beta:.3g} s/byte"
    lines.append(f"{axis}: {took} ({rate})")
  lines.append("")
  for num_bytes in dict.fromkeys(m.num_bytes for m in measured):
    sizes = measured[0].sizes
    model = plan(sizes, num_bytes, links=links)
    best = plan(sizes, num_bytes, links=links, measured=measured)
    lines.append(f"plan for {num_bytes:,} bytes: {best} measured; by the model {model}")
  return lines


def run(request: Request) -> list[str]:
  """Measure what is asked for; returns the lines to print."""
  import jax

  from jaxscale.collectives.timing import measure_algorithms, measure_links

  mesh = make_mesh(request.mesh)
  what = (request.sizes, request.dtype, request.rounds)
  links, empty = measure_links(mesh, *what)
  measured = measure_algorithms(mesh, request.algorithms, *what, links)
  # An axis of one device has no link; nothing is ever sent along it.
  every = {a: links.get(a, Link(0.0, 0.0)) for a in mesh.axis_names}
  device = mesh.devices.flat[0]
  shape = ", ".join(f"{a} {n}" for a, n in mesh.shape.items())
  head = (
    f"mesh {shape}; processes {jax.process_count()}; {device.device_kind}; "
    f"{request.dtype}; median of {request.rounds}"
  )
  if request.json and cluster.is_leader():
    extra = {"dtype": request.dtype, "rounds": request.rounds, "device":
             device.device_kind, "processes": jax.process_count(),
             "empty_seconds": empty}  # fmt: skip
    write_measurements(request.json, mesh.shape, every, measured, **extra)
  return [head, *table(measured, every, empty)]


@one_line_errors
def main(argv: list[str]) -> int:
  """Measure and print; returns the exit code."""
  if "--help" in argv or "-h" in argv:
    print(USAGE)
    return EXIT_DONE
  request = parse(argv)
  with cluster.joined():
    try:
      lines = run(request)
    except OSError as e:
      raise ConfigError(f"--json={request.json}: {e.strerror}") from None
    if cluster.is_leader():
      print("\n".join(lines))
  return EXIT_DONE


if __name__ == "__main__":
  leave(main)
