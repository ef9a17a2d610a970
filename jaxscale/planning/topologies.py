"""Accelerators by name, to compile for them without having them.

    v5e-16      one slice of 16 TPU v5e chips, 4 x 4
    2xv5e-8     two slices of 8, joined by the data-centre network
    h100-16     16 GPUs, 8 in a host
    2xh100-4    two hosts of 4

Names count chips (Google's own names of v5p count cores, of which a chip has two). The compilers
are in the packages `libtpu` and `jax-cuda13-plugin` (or 12), and need no hardware. Memory and
communication of a compiled program are exact; the program does not tell its time.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError


class Chip(NamedTuple):
  """Kind of accelerator.

  Attributes:
    platform: "tpu", "cuda" or "cpu".
    memory: the bytes of memory; for a TPU with two devices, those of one device.
    limit: the bytes of the memory that a program may take; for GPUs, see `fits.limit_of`.
    shapes: the shapes of TPU slices, by the number of chips.
    cores: the number of devices per chip.
    options: the options of the topology, other than its name and slices.
  """

  platform: str
  memory: int
  limit: int
  shapes: dict[int, str]
  cores: int = 1
  options: tuple[tuple[str, Any], ...] = ()


class Chips(NamedTuple):
  """Accelerators of one kind, in order.

  Attributes:
    name: the requested name.
    chip: the data of the accelerator.
    devices: the devices for `mesh.make_mesh` or `build.experiment`; for CPUs at most as many
      as JAX simulates.
    kind: the kind in the name, such as "h100" in "2xh100-4".
    count: the requested number of devices; 0 stands for the number of `devices`.
  """

  name: str
  chip: Chip
  devices: list[Any]
  kind: str = ""
  count: int = 0


# Shapes of slices that Google offers: cloud.google.com/tpu/docs/{v5e,v6e,v5p}.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16"
_CUBE = {math.prod(map(int, shape.split("x"))): shape for shape in _CUBES.split()}
# Up to 32 x 32 chips of TPU v2 and v3, doi:10.1145/3360307; v4: arXiv:2304.01433.
_PODS = {n: shape for n, shape in _FLAT.items() if n >= 4} | {512: "16x32", 1024: "32x32"}
_GB, _GIB = 10**9, 2**30
# TPUs: the memory is from the same pages; the limit is the "available HBM" in the error with
# which libtpu 0.0.51 refuses programs that need more.
# GPUs: device_memory_size in XLA's descriptions (below). Runs take 90 % (`gpu_settings`).
# CPUs: the whole memory of this machine, as each process may take it.
_CPU_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CHIPS = {
  "v5e": Chip("tpu", 16 * _GB, int(15.75 * _GIB), _FLAT),
  "v6e": Chip("tpu", 32 * _GB, int(31.24 * _GIB), _FLAT),
  "v5p": Chip("tpu", 95 * _GB, int(95.73 * _GIB), _CUBE),
  # A JAX device is a core of v3, but a whole chip of v4 ("megacore").
  "v4": Chip("tpu", 32 * _GB, int(31.75 * _GIB), _CUBE, 1, (("chip_config_name", "megacore"),)),
  "v3": Chip("tpu", 16 * _GB, int(15.75 * _GIB), _PODS, cores=2),
  "cpu": Chip("cpu", _CPU_MEMORY, _CPU_MEMORY, {}),
  "knl": Chip("cpu", 112 * _GIB, 112 * _GIB, {}),  # 16 GB of it are on the chip.
}
_GPUS = {"h100": 84_942_979_072, "h200": 151_397_597_184, "b200": 191_514_411_008}
# Sizes from the vendors' data sheets.
_GPUS |= {"a100": 80 * _GIB, "v100": 16 * _GIB, "p100": 16 * _GIB, "mi300x": 192 * _GIB}
CHIPS |= {name: Chip("cuda", memory, memory * 9 // 10, {}) for name, memory in _GPUS.items()}
GPUS_PER_HOST = 8
# From openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb, h200.txtpb and
# b200.txtpb: name, memory bandwidth (bytes/s), multiprocessors, L2 cache (bytes), clock (GHz)
# and major compute capability, in gpu.txtpb's order of placeholders.
_PLACEHOLDERS = "NAME", "BANDWIDTH", "CORES", "CACHE", "CLOCK", "MAJOR"
TARGETS = {
  "h100": ("NVIDIA H100 80GB HBM3", 3_352_320_000_000, 132, 52_428_800, 1.98, 9),
  "h200": ("NVIDIA H200 141GB HBM3e", 4_800_000_000_000, 132, 52_428_800, 1.98, 9),
  "b200": ("NVIDIA B200", 7_672_320_000_000, 148, 132_644_864, 1.965, 10),
}


def find_chips(name: str) -> Chips:
  """Return the accelerators of a name, which need not be present.

  Args:
    name: the name, as in the module's docstring.

  Raises:
    ConfigError: the name is invalid, or the package that compiles for it is missing.

  Example:
    >>> len(find_chips("v5e-16").devices)                          # doctest: +SKIP
    16
  """
  groups, kind, count = _parse(name)
  chip = CHIPS[kind]
  if chip.platform == "cpu":
    return _simulated(name, kind, groups * count)
  _check_installed(name, chip)
  from jax.experimental import topologies  # Imports JAX only after the name is checked.

  if chip.platform == "tpu":
    # Do not query a TPU for its slice, as other processes may hold it.
    alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= alone | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} | dict(os.environ)
    options: dict[str, Any] = {"topology_name": f"{kind}:{chip.shapes[count]}"}
    options |= chip.options
    if groups > 1:
      options["num_slices"] = groups
  else:
    here = min(count, GPUS_PER_HOST)
    hosts = groups * count // here
    options = {"target_config": target_config(kind), "topology": f"1x{hosts}x{here}"}
  try:
    found = topologies.get_topology_desc(platform=chip.platform, **options)
  except NotImplementedError:  # JAX dropped the plugin, as the hardware is missing.
    advice = "set JAX_PLATFORMS=cpu before importing jax"
    raise ConfigError(f"--chips={name}: JAX looked for a GPU and found none; {advice}") from None
  return Chips(name, chip, list(found.devices), kind, len(found.devices))


def compiler(platform: str) -> str:
  """Return the package, with version, that compiles for a platform; memory depends on it.

  Example:
    >>> compiler("cpu") == f"jaxlib {importlib.metadata.version('jaxlib')}"
    True
  """
  names = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
  for name in names.get(platform, ()):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      return f"{name} {importlib.metadata.version(name)}"
  return f"jaxlib {importlib.metadata.version('jaxlib')}"


def _simulated(name: str, kind: str, count: int) -> Chips:
  """Return simulated CPUs, at most as many as JAX simulates, as only their number matters."""
  import jax

  devices = jax.devices("cpu")
  usable = max(n for n in range(1, len(devices) + 1) if count % n == 0)
  return Chips(name, CHIPS[kind], devices[:usable], kind, count)


def target_config(kind: str) -> str:
  """Return XLA's description of a GPU; for one that is not in `TARGETS`, an H100's."""
  text = Path(__file__).with_name("gpu.txtpb").read_text("utf-8")
  values = zip(_PLACEHOLDERS, TARGETS.get(kind, TARGETS["h100"]), strict=True)
  for name, value in [("MEMORY", CHIPS[kind].memory), *values]:
    text = text.replace(name, str(value))
  return text


def kind_of(name: str) -> str:
  """Return the kind of chip of a name, without loading its compiler.

  Raises:
    ConfigError: the name is invalid.

  Example:
    >>> kind_of("2xh100-4")
    'h100'
  """
  return _parse(name)[1]


def num_hosts(name: str) -> int:
  """Return the number of hosts of GPUs by name.

  Raises:
    ConfigError: the name is invalid.

  Example:
    >>> num_hosts("2xh100-4"), num_hosts("h100-8"), num_hosts("h100-64")
    (2, 1, 8)
  """
  groups, _, count = _parse(name)
  return groups * -(-count // GPUS_PER_HOST)


def _parse(name: str) -> tuple[int, str, int]:
  """Return (groups, kind, chips per group)."""
  form = re.fullmatch(r"(?:(\d{1,6})x)?([a-z]+\d*[a-z]*)-(\d{1,6})", name, re.ASCII)
  if form is None or form[2] not in CHIPS:
    expected = f"KIND-COUNT, e.g. v5e-16 or 2xv5e-8, a kind of {', '.join(CHIPS)}"
    raise ConfigError(f"--chips={name}: use {expected}")
  groups, kind, count = int(form[1] or 1), form[2], int(form[3])
  shapes = CHIPS[kind].shapes
  if shapes and count not in shapes:
    known = ", ".join(map(str, shapes))
    raise ConfigError(f"--chips={name}: {kind} has slices of {known} chips; use one of these")
  if CHIPS[kind].platform == "cuda" and count > GPUS_PER_HOST and count % GPUS_PER_HOST:
    advice = f"use a multiple of that, or 2x{kind}-4 for two hosts of 4"
    raise ConfigError(f"--chips={name}: hosts have {GPUS_PER_HOST} GPUs, {advice}")
  if groups < 1 or count < 1:
    raise ConfigError(f"--chips={name}: use at least one chip")
  return groups, kind, count


def _check_installed(name: str, chip: Chip) -> None:
  modules, packages = ["libtpu"], "libtpu"
  if chip.platform == "cuda":
    modules = ["jax_cuda12_plugin", "jax_cuda13_plugin"]
    packages = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13"
  if not any(map(importlib.util.find_spec, modules)):
    advice = f"run pip install {packages} (the hardware is not needed; use a separate "
    advice += "environment, as JAX looks for the hardware at every start)"
    raise ConfigError(f"--chips={name}: its compiler is not installed; {advice}")


def gib(num_bytes: float) -> str:
  """Format a number of bytes in GiB.

  Example:
    >>> gib(3 * 2**30)
    '3.00 GiB'
  """
  return f"{num_bytes / _GIB:.2f} GiB" if math.isfinite(num_bytes) else "?"
