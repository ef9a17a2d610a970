"""Constants of a machine: rates of its chips and of its links.

chips.toml has the constants of known chips with their sources. The table [machine] of a site's
file (`jobs.site`) overrides them, by the same names.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from jaxscale.collectives.planner import Link
from jaxscale.config.validation import nearest, settings
from jaxscale.errors import ConfigError
from jaxscale.metrics.chips import peak_flops

_Share = Annotated[float | None, "in (0, 1]"]
_Positive = Annotated[float | None, "> 0"]
_NotNegative = Annotated[float | None, ">= 0"]
Corner = Literal["low", "expected", "high"]  # of speed, so "low" is the slowest
CORNERS: tuple[Corner, ...] = ("low", "expected", "high")


@settings
class Machine:
  """Chips, links and prices of a site, where they differ from chips.toml.

  Attributes:
    per_node: the number of chips of a node, or of a TPU slice.
    per_host: the number of devices per host of a TPU slice; elsewhere a host is a node.
    peak_bfloat16: the FLOP/s of a chip in matrix products, also of float16.
    peak_float32: the FLOP/s of a chip in matrix products of float32, by TF32 or one pass of
      bfloat16 if it has them.
    peak_full_float32: the same with JAX's precision "highest", as in SOAP; unset, `peak_float32`.
    bandwidth: the memory bandwidth of a chip in bytes/s.
    units: the number of multiprocessors of a chip, or of cores.
    clock: the clock rate of a TPU in cycles/s.
    cycles: the cycles that a program takes, as a multiple of the compiler's estimate.
    matmul: the share of the peak that large matrix products reach.
    convolution: the share of the peak that large convolutions reach; algorithms with fewer
      multiplications can exceed 1.
    convolution_float32: the share of the peak that large float32 convolutions reach, if it
      differs from `convolution`.
    attention: the share of the peak that fused attention reaches.
    memory: the share of the bandwidth that elementwise kernels reach.
    launch: the time in seconds of the shortest kernel.
    half_waves: the number of waves of tiles at which a product runs at half its rate.
    half_depth: the length of the summed dim at which a product runs at half its rate.
    node_link: the bytes/s that a chip sends to others of its node.
    node_alpha: the time in seconds of an empty message within a node.
    network_link: the bytes/s that a chip sends to other nodes.
    network_alpha: the time in seconds of an empty message between nodes.
    link_share: the share of a link's rate that collectives reach.
    contention: the time in seconds that computation loses per second of simultaneous
      communication.
    jitter: the standard deviation of a chip's step time, as a share of the step time.
    host: the time in seconds between two steps.
    input_rate: the number of examples/s that a host can load; None sets no limit.
    save_rate: the bytes/s of writing a checkpoint, over all nodes; None means no time.
    start: the time in seconds from the start of a job to its first step, with compilation.
    mtbf_hours: the mean time in hours between failures of one host; None means no failures.
    watts: the power in watts of a chip, with its share of the node.
    price_chip_hour: the price of a chip-hour, in the site's currency.
    price_kwh: the price of a kWh of energy.
    chip: the kind of chip that was measured, as in `--chips`; "" if none was.
  """

  per_node: Annotated[int | None, ">= 1"] = None
  per_host: Annotated[int | None, ">= 1"] = None
  peak_bfloat16: _Positive = None
  peak_float32: _Positive = None
  peak_full_float32: _Positive = None
  bandwidth: _Positive = None
  units: Annotated[int | None, ">= 1"] = None
  clock: _Positive = None
  cycles: _Positive = None
  matmul: _Share = None
  convolution: _Positive = None
  convolution_float32: _Positive = None
  attention: _Share = None
  memory: _Share = None
  launch: _NotNegative = None
  half_waves: _NotNegative = None
  half_depth: _NotNegative = None
  node_link: _Positive = None
  node_alpha: _NotNegative = None
  network_link: _Positive = None
  network_alpha: _NotNegative = None
  link_share: _Share = None
  contention: Annotated[float | None, "in [0, 1)"] = None
  jitter: Annotated[float | None, "in [0, 1)"] = None
  host: _NotNegative = None
  input_rate: _Positive = None
  save_rate: _Positive = None
  start: _NotNegative = None
  mtbf_hours: _Positive = None
  watts: _Positive = None
  price_chip_hour: _NotNegative = None
  price_kwh: _NotNegative = None
  chip: str = ""


_COSTS = ("input_rate", "save_rate", "mtbf_hours", "watts", "price_chip_hour", "price_kwh", "chip")


class Constant(NamedTuple):
  """Number with its uncertainty and source.

  Attributes:
    value: the expected value.
    low: the value if the machine is slower.
    high: the value if the machine is faster.
    kind: "published", "measured", "assumed", or "site" for the site's file.
    source: the source of the number; "" if there is none.
  """

  value: float
  low: float
  high: float
  kind: str
  source: str = ""


class Rates(NamedTuple):
  """Constants by name, and the site's additions.

  Attributes:
    chip: the name of the chip in chips.toml.
    title: the display name of the chip.
    constants: the constants by the names of `Machine`.
    machine: the table of the site's file.
  """

  chip: str
  title: str
  constants: dict[str, Constant]
  machine: Machine

  @property
  def per_node(self) -> int:
    """The number of devices per node."""
    return int(self.constants["per_node"].value)

  @property
  def is_calibrated(self) -> bool:
    """True if the site has measured this chip and the constants that matter most."""
    asked = ("cycles",) if "cycles" in self.constants else ("matmul", "memory")
    measured = vars(self.machine)
    if self.machine.chip not in ("", self.chip):
      return False
    return all(measured[name] is not None for name in (*asked, "network_link"))

  def at(self, corner: Corner) -> dict[str, float]:
    """Return every constant at a corner."""
    field = "value" if corner == "expected" else corner
    return {name: getattr(constant, field) for name, constant in self.constants.items()}


def hosts(devices: int, rates: Mapping[str, float]) -> int:
  """Return the number of hosts for a number of devices; hosts load data, and can fail.

  Args:
    devices: the number of devices over all slices or nodes.
    rates: the rates, from `Rates.at` or a stored plan.

  Example:
    >>> v5e, h100 = (rates_of(chip).at("expected") for chip in ("v5e", "h100"))
    >>> hosts(8, v5e), hosts(256, v5e), hosts(256, h100)
    (1, 64, 32)
  """
  per_host = rates.get("per_host", rates["per_node"])
  is_one = devices <= rates.get("largest_host", per_host)
  return 1 if is_one else -(-devices // int(per_host))


def links(rates: dict[str, float]) -> tuple[Link, Link]:
  """Return the cost of sending inside a node, and between nodes.

  Args:
    rates: the rates, from `Rates.at`.

  Example:
    >>> node, network = links(rates_of("h100").at("expected"))
    >>> round(1e-9 / network.beta, 1)  # GB/s
    37.5
  """

  def link(name: str) -> Link:
    return Link(rates[f"{name}_alpha"], 1 / (rates["link_share"] * rates[f"{name}_link"]))

  return link("node"), link("network")


@functools.cache
def _tables() -> dict[str, dict]:
  return tomllib.loads((Path(__file__).parent / "chips.toml").read_text("utf-8"))


def _with_likes(name: str) -> dict:
  """Return a table, with what it lacks from the table that it is `like`."""
  table = _tables()[name]
  return (_with_likes(table["like"]) if "like" in table else {}) | table


def known_chips() -> list[str]:
  """Return the names of the chips with known constants.

  Example:
    >>> "h100" in known_chips(), "gpu" in known_chips()
    (True, False)
  """
  return [name for name, table in _tables().items() if "title" in table]


def chip_kind(chip: str) -> str:
  """Return the words of a chip's `jax.Device.device_kind`; "" for CPUs.

  Example:
    >>> chip_kind("h100"), chip_kind("knl")
    ('H100', '')
  """
  return _tables().get(chip, {}).get("device_kind", "")


def rates_of(chip: str, machine: Machine | None = None) -> Rates:
  """Return the constants of a chip, with some replaced by a site's.

  Args:
    chip: a name from `known_chips`.
    machine: the table [machine] of a site's file; None if there is none.

  Raises:
    ConfigError: the chip is unknown.

  Example:
    >>> rates = rates_of("h100", Machine(network_link=25e9))
    >>> rates.constants["network_link"].kind
    'site'
    >>> rates.constants["peak_bfloat16"].kind
    'published'
  """
  if chip not in known_chips():
    raise ConfigError(f"chip {chip!r}: unknown, {nearest(chip, known_chips())}")
  merged = _with_likes(chip)
  tables = ((n, c) for n, c in merged.items() if isinstance(c, dict))
  constants = {n: Constant(**({"low": c["value"], "high": c["value"]} | c)) for n, c in tables}
  if peak := peak_flops(merged.get("device_kind", "")):
    source = "the vendor's data sheet, dense (metrics/chips.py)"
    constants["peak_bfloat16"] = Constant(peak, peak, peak, "published", source)
  machine = machine or Machine()
  for field in dataclasses.fields(machine):
    value = getattr(machine, field.name)
    if value is not None and field.name not in _COSTS:
      constants[field.name] = Constant(value, value, value, "site")
  # On TPUs, JAX's default precision multiplies float32 in one pass of bfloat16.
  constants.setdefault("peak_float32", constants["peak_bfloat16"])
  constants.setdefault("peak_full_float32", constants["peak_float32"])
  return Rates(chip, merged["title"], constants, machine)
