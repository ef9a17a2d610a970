"""Models of the GPUs and the network between their nodes, read from files.

JAX and NCCL look for GPUs and networks after their start, but their environment variables
must be set before. So this module reads files only and loads no library.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from jaxscale.cluster.launch import Env
from jaxscale.files import readable_text

_AMAZON = "0x1d0f"  # PCI vendor of Amazon's devices, including EFA
# Libraries of aws-ofi-nccl, which NCCL and RCCL load by these names.
_PLUGINS = ("libnccl-net", "librccl-net")


class Fabric(NamedTuple):
  """The network of a node.

  Attributes:
    kind: the fastest network of the node.
    cards: Slingshot's interfaces, or InfiniBand's adapters with a link; else ().
    others: adapters with a link for RDMA over Ethernet.
    has_plugin: True if the loader would find an NCCL plugin for libfabric.
  """

  kind: Literal["slingshot", "efa", "infiniband", "ethernet"]
  cards: tuple[str, ...] = ()
  others: tuple[str, ...] = ()
  has_plugin: bool = False


def find_fabric(env: Env = os.environ, root: str = "/") -> Fabric:
  """Find the network of this node.

  Slingshot has network interfaces hsn0, hsn1, … and devices of the class cxi. EFA and
  InfiniBand have the class infiniband: EFA with Amazon's PCI vendor, InfiniBand with ports
  whose `link_layer` is InfiniBand (Linux, Documentation/ABI/stable/
  sysfs-class-infiniband).

  Args:
    env: the environment variables, of which LD_LIBRARY_PATH is read.
    root: the root of the file system, for tests.

  Example:
    >>> find_fabric({}, root="/nowhere")
    Fabric(kind='ethernet', cards=(), others=(), has_plugin=False)
  """
  hsn = sorted(_names(root, "sys/class/net/hsn[0-9]*"), key=_natural)
  has_plugin = _has_plugin(env, root)
  if hsn or _names(root, "sys/class/cxi/*"):
    return Fabric("slingshot", tuple(hsn), has_plugin=has_plugin)
  layers: dict[str, list[str]] = {"InfiniBand": [], "Ethernet": []}
  for name in sorted(_names(root, "sys/class/infiniband/*"), key=_natural):
    card = Path(root, "sys/class/infiniband", name)
    if readable_text(card / "device/vendor").strip() == _AMAZON:
      return Fabric("efa", has_plugin=has_plugin)
    ports = [p for p in sorted(card.glob("ports/*")) if "ACTIVE" in readable_text(p / "state")]
    for layer in {readable_text(p / "link_layer").strip() for p in ports} & {*layers}:
      layers[layer].append(name)
  infiniband, ethernet = (tuple(names) for names in layers.values())
  kind = "infiniband" if infiniband else "ethernet"
  return Fabric(kind, infiniband, ethernet, has_plugin)


def nvidia_models(root: str = "/") -> tuple[str, ...]:
  """Return the distinct models of NVIDIA's GPUs in this node, by their driver.

  Args:
    root: the root of the file system, for tests.
  """
  models = set()
  for path in glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information")):
    if model := re.search(r"^Model:\s*(.+?)\s*$", readable_text(Path(path)), re.M):
      models.add(model[1])
  return tuple(sorted(models))


def _has_plugin(env: Env, root: str) -> bool:
  """Return whether LD_LIBRARY_PATH or the loader's cache has an NCCL plugin."""
  folders = filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))
  paths = (os.path.join(glob.escape(f), f"{p}*.so*") for f in folders for p in _PLUGINS)
  cache = readable_text(Path(root, "etc/ld.so.cache"))
  return any(map(glob.glob, paths)) or any(name in cache for name in _PLUGINS)


def _names(root: str, pattern: str) -> list[str]:
  return [os.path.basename(path) for path in glob.glob(os.path.join(root, pattern))]


def _natural(name: str) -> list[tuple[int, str]]:
  """Sort key that puts hsn2 before hsn10."""
  parts = re.findall(r"[0-9]{1,9}|[^0-9]+", name)
  return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
