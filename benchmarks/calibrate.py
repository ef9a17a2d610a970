"""Measure this machine's chip, and the links between its devices and processes.

    python benchmarks/calibrate.py >> site.toml
    srun --nodes 2 --ntasks-per-node 1 python benchmarks/calibrate.py       # and the links

A matrix product, a convolution and a pass over memory, each large, are timed in turns with an
empty program, and the medians count. Links are measured by all-reduces
(`collectives.measurements`). All processes must call `calibrate` together, as processes on a
node share its memory bandwidth in a training step, too.
"""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxscale import cluster
from jaxscale.collectives.measurements import in_turns, measure_links, medians
from jaxscale.hlo.cost import costs
from jaxscale.hlo.parse import modules
from jaxscale.planning.machine import chip_kind, known_chips, rates_of

_CHANNELS, _SIDE, _KERNEL = 256, 28, 3  # of the convolution
_ROUNDS = 10  # of each all-reduce


class Sizes(NamedTuple):
  """Sizes of the measurements.

  Attributes:
    turns: the calls of each program, whose median counts.
    product: the rows, columns and depth of the matrix product.
    images: the rows of the convolution.
    floats: the elements that are read and written.
    payloads: the sizes of the all-reduces in bytes.
  """

  turns: int = 10
  product: int = 8192
  images: int = 256
  floats: int = 2**28
  payloads: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


ACCELERATOR = Sizes()
CPU = Sizes(5, 1024, 8, 2**22, (1 << 10, 1 << 14, 1 << 18, 1 << 22))


def calibrate(sizes: Sizes | None = None) -> dict[str, Any]:
  """Return the constants of this machine, by the names of `machine.Machine`.

  Args:
    sizes: the sizes of the measurements; None uses the platform's.
  """
  is_cpu = jax.devices()[0].platform == "cpu"
  sizes = sizes or (CPU if is_cpu else ACCELERATOR)
  return _chip("float32" if is_cpu else "bfloat16", sizes) | _links(sizes)


def as_toml(constants: Mapping[str, Any]) -> str:
  r"""Format constants as the table [machine] of a site's file.

  Example:
    >>> print(as_toml({"chip": "cpu", "host": 2e-05}).partition("\n")[2])
    [machine]
    chip = "cpu"
    host = 2e-05
  """
  device, today = jax.devices()[0], datetime.date.today()
  name = device.device_kind if device.platform != "cpu" else platform.machine()
  what = f"{name}, {jax.device_count()} devices of {jax.process_count()} processes"
  lines = [f"# {what}, {today}: benchmarks/calibrate.py", "[machine]"]
  for field, value in constants.items():
    lines.append(f"{field} = " + (f'"{value}"' if field == "chip" else f"{value:.4g}"))
  return "\n".join(lines)


def _chip(dtype: str, sizes: Sizes) -> dict[str, Any]:
  """Return the constants of one device."""
  chip = chip_of(jax.devices()[0])
  known = rates_of(chip).constants if chip else {}
  programs = _programs(dtype, sizes)
  cluster.barrier("calibrate")
  seconds = in_turns({n: p.call for n, p in programs.items()}, sizes.turns)
  took = medians(seconds)
  alone = {name: max(took[name] - took["empty"], 1e-9) for name in took}
  rates = {name: program.work / alone[name] for name, program in programs.items()}
  found: dict[str, Any] = {"chip": chip} if chip else {}
  if "cycles" in known:  # TPU compilers report cycles.
    estimated = sum(costs(m)[1] for m in modules(programs["matmul"].text))
    found["cycles"] = alone["matmul"] * known["clock"].value / estimated
  else:
    published = {n: c.value for n, c in known.items() if c.kind == "published"}
    peak = published.get(f"peak_{dtype}", rates["matmul"])
    bandwidth = published.get("bandwidth", rates["memory"])
    if peak == rates["matmul"]:  # CPUs compute bfloat16 in float32.
      found |= {"peak_float32": peak, "peak_bfloat16": peak}
    if bandwidth == rates["memory"]:
      found["bandwidth"] = bandwidth
    found["matmul"] = min(rates["matmul"] / peak, 1.0)
    found["convolution"] = rates["convolution"] / peak
    found["memory"] = min(rates["memory"] / bandwidth, 1.0)
  spread = [statistics.pstdev(s) / statistics.mean(s) for s in seconds.values()]
  return found | {"jitter": min(statistics.median(spread), 0.99), "host": took["empty"]}


class _Program(NamedTuple):
  call: Callable[[], Any]
  work: float  # FLOPs, or bytes
  text: str


def _programs(dtype: str, sizes: Sizes) -> dict[str, _Program]:
  """Return the programs to time, by the share of a peak that each determines."""
  n, rows, pixels = sizes.product, sizes.images, sizes.images * _SIDE**2
  images = rows, _SIDE, _SIDE, _CHANNELS
  kernel = _KERNEL, _KERNEL, _CHANNELS, _CHANNELS
  flops = {"matmul": 2.0 * n**3, "convolution": 2.0 * pixels * np.prod(kernel)}
  traffic = 2.0 * jnp.dtype(dtype).itemsize * sizes.floats

  def convolve(x, w):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)

  def program(function, work, *shapes):
    values = [jnp.ones(shape, dtype) for shape in shapes]
    compiled = jax.jit(function).lower(*values).compile()
    return _Program(lambda: compiled(*values), work, compiled.as_text() or "")

  return {
    "empty": program(lambda x: x, 0.0, (1,)),
    "matmul": program(jnp.matmul, flops["matmul"], (n, n), (n, n)),
    "convolution": program(convolve, flops["convolution"], images, kernel),
    "memory": program(lambda x: x + 1, traffic, (sizes.floats,)),
  }


def _links(sizes: Sizes) -> dict[str, Any]:
  """Return the constants of links inside a process, which counts as a node, and between them."""
  mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("network", "node"))
  links, _ = measure_links(mesh, sizes.payloads, "float32", _ROUNDS)
  found = {}
  for name, link in links.items():
    found |= {f"{name}_link": 1 / max(link.beta, 1e-15), f"{name}_alpha": link.alpha}
  return found | ({"link_share": 1.0} if found else {})


def chip_of(device: Any) -> str:
  """Return a device's name in `--chips`; "" if it has none."""
  if device.platform == "cpu":
    return "cpu"
  words = device.device_kind.lower()
  kinds = {name: chip_kind(name).lower() for name in known_chips()}
  matching = [name for name, kind in kinds.items() if kind and kind in words]
  return max(matching, key=len, default="")


def main() -> None:
  """Measure in all processes that were started, and print the table."""
  with cluster.open_session():
    constants = calibrate()
    if cluster.is_leader():
      print(as_toml(constants))


if __name__ == "__main__":
  main()
