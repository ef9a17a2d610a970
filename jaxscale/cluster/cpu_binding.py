"""Binding of a process to CPU cores: those beside its GPUs, shared with the node's other processes.

A process that runs on the other socket reaches its GPU and its memory through the link between
the sockets. The kernel places a page on the NUMA node of the core that first writes it (Linux,
Documentation/admin-guide/mm/numa_memory_policy), so binding a process to cores also places its
memory. Binding also limits the threads of XLA and of the input pipeline to the process's share.

All paths are those of Linux's Documentation/ABI/testing/sysfs-bus-pci, stable/sysfs-devices-node
and stable/sysfs-devices-system-cpu, and of NVIDIA's driver ("The /proc file system interface").
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxscale.cluster.detect.fabric import nvidia_models
from jaxscale.cluster.launch import Env
from jaxscale.cluster.schedulers import nodelist
from jaxscale.errors import ConfigError
from jaxscale.files import readable_text, whole_number

# A process needs cores for its input and for the threads of NCCL or gloo, too. With fewer for
# each, the processes of a node share all cores.
_LEAST_CORES = 2


class Cpus(NamedTuple):
  """CPUs of a process before it is bound, as lists in Linux's format, "0-3,8".

  Attributes:
    allowed: the CPUs that it may run on.
    near: the CPUs of the NUMA nodes of its GPUs; "" without GPUs, or if they are unknown.
    where: a description of these nodes and GPUs, for the log.
  """

  allowed: str
  near: str = ""
  where: str = ""

  @property
  def usable(self) -> str:
    """The allowed CPUs near the GPUs; all allowed ones if there are none."""
    allowed = parse_cpus(self.allowed)
    return format_cpus(allowed & parse_cpus(self.near) or allowed)


class Binding(NamedTuple):
  """The CPUs to bind a process to, or None to leave it; and a line for the log, or ""."""

  cpus: frozenset[int] | None
  line: str


def find_cpus(num_gpus: int, gpu_ids: Sequence[int] | None, env: Env, root: str = "/") -> Cpus:
  """Describe the CPUs of this process.

  Args:
    num_gpus: the number of GPUs that the process sees.
    gpu_ids: the GPUs that it uses among these; None means all of them.
    env: the environment variables.
    root: the root of the file system, for tests.
  """
  allowed = format_cpus(os.sched_getaffinity(0))
  devices = gpu_devices(env, root) if num_gpus else []
  ids = range(num_gpus) if gpu_ids is None else gpu_ids
  if not ids or len(devices) != num_gpus:
    return Cpus(allowed)
  nodes, near = set(), set()
  for device in (devices[i] for i in ids):
    node = whole_number(readable_text(device / "numa_node").strip())
    cpus = parse_cpus(readable_text(device / "local_cpulist"))
    if node is None or not cpus:  # -1 on a machine with a single node
      return Cpus(allowed)
    nodes.add(node)
    near |= cpus
  gpus = f"GPU{'s' * (len(ids) > 1)} {format_cpus(ids)}"
  where = f"NUMA node{'s' * (len(nodes) > 1)} {format_cpus(nodes)}, beside {gpus}"
  return Cpus(allowed, format_cpus(near), where)


def gpu_devices(env: Env, root: str = "/") -> list[Path]:
  """Return the PCI devices of the visible GPUs in the order of CUDA or HIP; [] if unknown.

  CUDA counts GPUs of one model in the order of their PCI addresses, and those of several
  models by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
  """
  found: list[tuple[Path, str]] = []
  for file in sorted(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information"))):
    text = readable_text(Path(file))
    minor, uuid = (re.search(rf"^{n}:\s*(\S+)", text, re.M) for n in ("Device Minor", "GPU UUID"))
    if minor is None or os.access(os.path.join(root, f"dev/nvidia{minor[1]}"), os.R_OK | os.W_OK):
      device = Path(root, "sys/bus/pci/devices", Path(file).parent.name)
      found.append((device, uuid[1] if uuid else ""))
  if len(nvidia_models(root)) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
    return []
  names = ("CUDA_VISIBLE_DEVICES",)
  if not found:
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", *names)
    nodes = glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/properties"))
    for file in sorted(nodes, key=lambda path: int(Path(path).parent.name)):
      minor = re.search(r"^drm_render_minor ([1-9]\d*)$", readable_text(Path(file)), re.M)
      if minor and os.access(os.path.join(root, f"dev/dri/renderD{minor[1]}"), os.R_OK | os.W_OK):
        found.append((Path(root, f"sys/class/drm/renderD{minor[1]}/device"), ""))
  for listed in (env[name] for name in names if name in env):
    found = _selected(found, listed)
  return [device for device, _ in found]


def _selected(found: Sequence[tuple[Path, str]], listed: str) -> list[tuple[Path, str]]:
  """Return the devices that a list of numbers or UUIDs selects; [] if it has others."""
  result = []
  for text in map(str.strip, listed.split(",")):
    index = whole_number(text)
    matches = [each for i, each in enumerate(found) if index == i or (text and each[1] == text)]
    result += matches
    if not matches:
      return []
  return result


def choose(cpus: Cpus, share: tuple[int, int] = (0, 1), root: str = "/") -> Binding:
  """Choose the CPUs of a process: its share of `cpus.usable`.

  Args:
    cpus: the CPUs of the process.
    share: the index of the process among the node's processes of this run with the same
      usable CPUs, and their number. Processes that someone has bound apart have different
      ones, and keep them.
    root: the root of the file system, for tests.

  Example:
    >>> choose(Cpus("0-7", "0-3", "NUMA node 0, beside GPU 0"), root="/nowhere").line
    'CPUs: 0-3 of NUMA node 0, beside GPU 0'
  """
  allowed, usable = parse_cpus(cpus.allowed), parse_cpus(cpus.usable)
  if cpus.near and not allowed & parse_cpus(cpus.near):
    problem = f"this process may run on {cpus.allowed} only, as its launcher or taskset has set"
    return Binding(None, f"CPUs: not those of {cpus.where} ({cpus.near}): {problem}")
  cores, (index, count) = cores_of(usable, root), share
  if is_divided := count > 1 and len(cores) >= _LEAST_CORES * count:
    cores = cores[len(cores) * index // count : len(cores) * (index + 1) // count]
  chosen = frozenset(itertools.chain(*cores))
  if chosen == allowed:
    return Binding(None, "")
  divided = f", a share of 1/{count}" if is_divided else ""
  return Binding(chosen, f"CPUs: {format_cpus(chosen)} of {cpus.where or cpus.usable}{divided}")


def cores_of(cpus: Collection[int], root: str = "/") -> list[list[int]]:
  """Group CPUs by core, with the hyper-threads of a core together, ordered by NUMA node.

  Example:
    >>> cores_of({0, 1, 5}, root="/nowhere")
    [[0], [1], [5]]
  """
  node_of = {}
  for path in glob.glob(os.path.join(root, "sys/devices/system/node/node*/cpulist")):
    node = whole_number(Path(path).parent.name.removeprefix("node"))
    node_of |= dict.fromkeys(parse_cpus(readable_text(Path(path))), node)
  cores: dict[tuple[int, int], list[int]] = {}
  for cpu in sorted(cpus):
    file = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = min(parse_cpus(readable_text(file)), default=cpu)
    cores.setdefault((node_of.get(first) or 0, first), []).append(cpu)
  return [cores[key] for key in sorted(cores)]


def bind(cpus: Collection[int]) -> None:
  """Bind all threads of this process, except those that were bound differently before."""
  before = os.sched_getaffinity(0)
  for thread in map(int, os.listdir("/proc/self/task")):
    with contextlib.suppress(OSError):  # The thread may have ended by now.
      if os.sched_getaffinity(thread) == before:
        os.sched_setaffinity(thread, cpus)


def parse_cpus(text: str) -> set[int]:
  """Parse a list in Linux's format; a malformed one is empty.

  Example:
    >>> parse_cpus("0-2,8"), parse_cpus("x")
    ({0, 1, 2, 8}, set())
  """
  with contextlib.suppress(ConfigError):
    return {*map(int, nodelist.expand(f"[{text.strip()}]"))}
  return set()


def format_cpus(cpus: Collection[int]) -> str:
  """Write a list in Linux's format.

  Example:
    >>> format_cpus({0, 1, 2, 8})
    '0-2,8'
  """
  parts = []
  for _, group in itertools.groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0]):
    run = [cpu for _, cpu in group]
    parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
  return ",".join(parts)
