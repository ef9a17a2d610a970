"""Accelerators that are not here, by name, to compile for them ahead of time.

    v5e-16      one slice of 16 TPU v5e chips, 4 x 4
    2xv5e-8     two slices of 8, joined by the data-centre network
    h100-16     16 GPUs, 8 in a host
    2xh100-4    two hosts of 4

Names count chips (Google's own of v5p count its cores, of which a chip has two).
Compilers come with the packages of the accelerators, `libtpu` and
`jax-cuda12-plugin`; neither needs the hardware. What such a program says is exact of
memory and of what is communicated; it says nothing of seconds.
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
  """A kind of accelerator.

  Attributes:
    platform: "tpu", "cuda" or "cpu".
    memory: bytes that it has; of a TPU that is two devices, those of one.
    limit: bytes that a program may take of them.
    shapes: of a TPU's slices, by the number of chips.
    cores: devices that a chip is.
    options: of the topology, other than its name and slices.
  """

  platform: str
  memory: int
  limit: int
  shapes: dict[int, str]
  cores: int = 1
  options: tuple[tuple[str, Any], ...] = ()


class Chips(NamedTuple):
  """Accelerators by name, in their order.

  Attributes:
    name: that was asked for.
    chip: what each is.
    devices: for `mesh.make_mesh` or `build.experiment`; of CPUs as many as JAX
      simulates, at most.
    kind: the name of the chip.
    count: of devices that were asked for; 0: those there are.
  """

  name: str
  chip: Chip
  devices: list[Any]
  kind: str = ""
  count: int = 0


# Chips of a slice, as Google sells them: cloud.google.com/tpu/docs/{v5e,v6e,v5p}.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16"
_CUBE = {math.prod(map(int, shape.split("x"))): shape for shape in _CUBES.split()}
# Up to 32 x 32 chips of TPU v2 and v3, doi:10.1145/3360307; v4: arXiv:2304.01433.
_PODS = {n: shape for n, shape in _FLAT.items() if n >= 4} | {512: "16x32", 1024: "32x32"}
_GB, _GIB = 10**9, 2**30
# TPUs: memory is of the same pages; the limit is the "available HBM" of the error with
# which libtpu 0.0.51 refuses programs that need more.
# GPUs: device_memory_size in XLA's descriptions (below). JAX takes 75 % of it unless
# XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
# (docs.jax.dev/en/latest/gpu_memory_allocation.html).
# Of the processors of this machine: all that it has, as each process may take it.
_CPU_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CHIPS = {
  "v5e": Chip("tpu", 16 * _GB, int(15.75 * _GIB), _FLAT),
  "v6e": Chip("tpu", 32 * _GB, int(31.24 * _GIB), _FLAT),
  "v5p": Chip("tpu", 95 * _GB, int(95.73 * _GIB), _CUBE),
  # One that JAX calls a device is a core of v3, a whole chip of v4 ("megacore").
  "v4": Chip("tpu", 32 * _GB, int(31.75 * _GIB), _CUBE, 1, (("chip_config_name", "megacore"),)),
  "v3": Chip("tpu", 16 * _GB, int(15.75 * _GIB), _PODS, cores=2),
  "cpu": Chip("cpu", _CPU_MEMORY, _CPU_MEMORY, {}),
  "knl": Chip("cpu", 112 * _GIB, 112 * _GIB, {}),  # 16 GB of it on the chip
}
_GPUS = {"h100": 84_942_979_072, "h200": 151_397_597_184}
# Sizes of their makers' data sheets.
_GPUS |= {"a100": 80 * _GIB, "v100": 16 * _GIB, "p100": 16 * _GIB}
CHIPS |= {name: Chip("cuda", memory, memory * 3 // 4, {}) for name, memory in _GPUS.items()}
GPUS_PER_HOST = 8
# A Hopper GPU, from openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb
# and h200.txtpb, which differ in the name, the memory and its bandwidth in bytes/s.
# They are in hopper.txtpb.
_BANDWIDTH = {
  "h100": ("NVIDIA H100 80GB HBM3", 3_352_320_000_000),
  "h200": ("NVIDIA H200 141GB HBM3e", 4_800_000_000_000),
}


def find_chips(name: str) -> Chips:
  """The accelerators of a name, without having them.

  Args:
    name: as in the module's docstring.

  Raises:
    ConfigError: no such name, or the package that compiles for them is missing.

  Example:
    >>> len(find_chips("v5e-16").devices)                          # doctest: +SKIP
    16
  """
  groups, kind, count = _parse(name)
  chip = CHIPS[kind]
  _check_installed(name, chip)
  if chip.platform == "cpu":
    return _simulated(name, kind, groups * count)
  from jax.experimental import topologies  # JAX: only once there is something to ask

  if chip.platform == "tpu":
    # No TPU is asked about the slice it is in, and other processes may have one.
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
  except NotImplementedError:  # JAX has given the plugin up: there is no such hardware
    advice = "set JAX_PLATFORMS=cpu before it is imported"
    raise ConfigError(f"--chips={name}: JAX looked for a GPU and found none; {advice}") from None
  return Chips(name, chip, list(found.devices), kind, len(found.devices))


def compiler(platform: str) -> str:
  """The package that compiles for a platform, and its version: memory hangs on it.

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
  """CPUs: no more than JAX simulates, since all that differs is how many there are."""
  import jax

  devices = jax.devices("cpu")
  usable = max(n for n in range(1, len(devices) + 1) if count % n == 0)
  return Chips(name, CHIPS[kind], devices[:usable], kind, count)


def target_config(kind: str) -> str:
  """The description of a GPU for XLA; of those before Hopper, an H100's."""
  name, bandwidth = _BANDWIDTH.get(kind, _BANDWIDTH["h100"])
  text = Path(__file__).with_name("hopper.txtpb").read_text("utf-8")
  text = text.replace("MEMORY", str(CHIPS[kind].memory)).replace("NAME", name)
  return text.replace("BANDWIDTH", str(bandwidth))


def kind_of(name: str) -> str:
  """The kind of chip of a name, without its compiler.

  Raises:
    ConfigError: no such name.

  Example:
    >>> kind_of("2xh100-4")
    'h100'
  """
  return _parse(name)[1]


def _parse(name: str) -> tuple[int, str, int]:
  """(groups, kind, chips in a group)."""
  form = re.fullmatch(r"(?:(\d{1,6})x)?([a-z]+\d*[a-z]*)-(\d{1,6})", name, re.ASCII)
  if form is None or form[2] not in CHIPS:
    wanted = f"KIND-COUNT, e.g. v5e-16 or 2xv5e-8, a kind of {', '.join(CHIPS)}"
    raise ConfigError(f"--chips={name}: give {wanted}")
  groups, kind, count = int(form[1] or 1), form[2], int(form[3])
  shapes = CHIPS[kind].shapes
  if shapes and count not in shapes:
    known = ", ".join(map(str, shapes))
    raise ConfigError(f"--chips={name}: {kind} has slices of {known} chips")
  if CHIPS[kind].platform == "cuda" and count > GPUS_PER_HOST and count % GPUS_PER_HOST:
    advice = f"give a multiple of them, or 2x{kind}-4 for two hosts of 4"
    raise ConfigError(f"--chips={name}: hosts have {GPUS_PER_HOST} GPUs, {advice}")
  if groups < 1 or count < 1:
    raise ConfigError(f"--chips={name}: give at least one chip")
  return groups, kind, count


def _check_installed(name: str, chip: Chip) -> None:
  if chip.platform == "cpu":
    return
  modules, packages = ["libtpu"], "libtpu"
  if chip.platform == "cuda":
    modules = ["jax_cuda12_plugin", "jax_cuda13_plugin"]
    packages = "jax-cuda12-plugin jax-cuda12-pjrt nvidia-cudnn-cu12"
  if not any(map(importlib.util.find_spec, modules)):
    advice = f"pip install {packages} (no such hardware is needed; best in an "
    advice += "environment of its own, as JAX looks for the hardware at every start)"
    raise ConfigError(f"--chips={name}: its compiler is not installed; {advice}")


def gib(num_bytes: float) -> str:
  """As people read it.

  Example:
    >>> gib(3 * 2**30)
    '3.00 GiB'
  """
  return f"{num_bytes / _GIB:.2f} GiB" if math.isfinite(num_bytes) else "?"
