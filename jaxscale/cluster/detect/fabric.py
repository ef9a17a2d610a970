"""The GPUs' models, and the network that joins their nodes, read from files.

Nothing is loaded and nobody is asked: JAX and NCCL look only once they have started,
and what is chosen for them has to be there before.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from jaxscale.cluster.detect.launch import Env
from jaxscale.files import readable_text

_AMAZON = "0x1d0f"  # PCI vendor of EFA, as of all of Amazon's devices
# What aws-ofi-nccl installs: NCCL and RCCL ask the loader for these names.
_PLUGINS = ("libnccl-net", "librccl-net")


class Fabric(NamedTuple):
  """A node's network.

  Attributes:
    kind: the fastest that it has.
    cards: Slingshot's interfaces, InfiniBand's adapters that have a link; else ().
    others: adapters that have a link and speak RDMA over Ethernet.
    has_plugin: whether the loader would find an NCCL plugin for libfabric.
  """

  kind: Literal["slingshot", "efa", "infiniband", "ethernet"]
  cards: tuple[str, ...] = ()
  others: tuple[str, ...] = ()
  has_plugin: bool = False


def find_fabric(env: Env = os.environ, root: str = "/") -> Fabric:
  """The network of this node.

  Slingshot has network interfaces hsn0, hsn1, … and devices of the class cxi; EFA and
  InfiniBand are of the class infiniband, the one with Amazon's PCI vendor, the other
  with ports whose `link_layer` is InfiniBand (Linux, Documentation/ABI/stable/
  sysfs-class-infiniband).

  Args:
    env: the environment variables; of LD_LIBRARY_PATH.
    root: of the file system.

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
  if infiniband:
    return Fabric("infiniband", infiniband, ethernet, has_plugin)
  return Fabric("ethernet", (), ethernet, has_plugin)


def nvidia_models(root: str = "/") -> tuple[str, ...]:
  """The models of NVIDIA's GPUs in this node, as its driver has them, each once.

  Args:
    root: of the file system.
  """
  found = set()
  for path in glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information")):
    if model := re.search(r"^Model:\s*(.+?)\s*$", readable_text(Path(path)), re.M):
      found.add(model[1])
  return tuple(sorted(found))


def _has_plugin(env: Env, root: str) -> bool:
  """In a folder of LD_LIBRARY_PATH, or in the loader's cache."""
  folders = filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))
  paths = (os.path.join(glob.escape(f), f"{p}*.so*") for f in folders for p in _PLUGINS)
  cache = readable_text(Path(root, "etc/ld.so.cache"))
  return any(map(glob.glob, paths)) or any(name in cache for name in _PLUGINS)


def _names(root: str, pattern: str) -> list[str]:
  return [os.path.basename(path) for path in glob.glob(os.path.join(root, pattern))]


def _natural(name: str) -> list[tuple[int, str]]:
  """hsn2 before hsn10."""
  parts = re.findall(r"[0-9]{1,9}|[^0-9]+", name)
  return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
