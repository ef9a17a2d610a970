"""Environment variables for GPUs: what their makers recommend, where GPUs are found.

JAX, XLA, CUDA and NCCL read them when they start, so they are chosen before. `TABLE`
has each with what it is for and who recommends it. A variable that the user has set
stays, and so does what he has decided by another one (`unless`). No XLA flag is among
them: XLA ends a process at a flag that it does not know, JAX ignores a variable that
it does not. What needs no setting is not here: NCCL finds InfiniBand, NVLink between
nodes and the right RoCE address by itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple

from jaxscale.cluster.detect.fabric import Fabric
from jaxscale.cluster.detect.launch import Env, Launch

LEVEL = "JAX_OPTIMIZATION_LEVEL"
# All processes must have the same of these: the compiled program, and NCCL's network.
SHARED = (LEVEL, "NCCL_NET")
_OFF = "off by --config.gpu_settings=False"
_applied: dict[str, str] = {}  # by this process


class Place(NamedTuple):
  """Where a process runs.

  Attributes:
    gpus: that it sees.
    models: of NVIDIA's GPUs here.
    is_shared: whether other processes may compute on its GPUs as well.
    has_peers: whether the run has other GPUs, here or elsewhere.
    has_nodes: whether the run has other nodes.
    fabric: of its node.
  """

  gpus: int
  models: tuple[str, ...] = ()
  is_shared: bool = False
  has_peers: bool = False
  has_nodes: bool = False
  fabric: Fabric = Fabric("ethernet")

  @property
  def is_hopper(self) -> bool:
    """Whether all GPUs are of the generation of the H100."""
    hopper = re.compile(r"\bG?H(20|100|200|800)\b")
    return bool(self.models) and all(map(hopper.search, self.models))

  @property
  def is_alone(self) -> bool:
    """Whether no other process uses the same GPUs."""
    return not self.is_shared

  @property
  def is_amd(self) -> bool:
    """Whether no GPU is one of NVIDIA's."""
    return not self.models

  @property
  def has_plugin(self) -> bool:
    """Whether NCCL finds aws-ofi-nccl."""
    return self.fabric.has_plugin

  @property
  def is_slingshot(self) -> bool:
    """Whether other nodes are reached over Slingshot."""
    return self.has_nodes and self.fabric.kind == "slingshot"

  @property
  def is_mixed(self) -> bool:
    """Whether InfiniBand has adapters on an Ethernet next to it."""
    fabric = self.fabric
    return self.has_nodes and fabric.kind == "infiniband" and bool(fabric.others)


class Row(NamedTuple):
  """A variable.

  Attributes:
    name: of the variable.
    value: it gets this, with the network's adapters in place of CARDS.
    when: properties of the `Place`, all of which it must have.
    why: in a few words, for the log.
    unless: a regular expression of NAME=VALUE; a variable of the environment that
      it fits decides the same, and nothing is set.
  """

  name: str
  value: str
  when: str
  why: str
  unless: str = r"$^"


# Sources. Memory, level and connections: NVIDIA JAX-Toolbox, docs/GPU_performance.md,
# and for the level openxla.org/xla/effort_levels. JAX takes 75 % of the memory
# otherwise (docs.jax.dev, "GPU memory allocation"). One connection is for Hopper, and
# harms Blackwell. Slingshot: HPE's shs-ccl-docs, ccl_env.sh, without
# FI_CXI_RDZV_PROTO=alt_read, for which srun must have --network=disable_rdzv_get.
# NCCL_IB_HCA: NCCL's user guide; it would otherwise use every adapter that has RDMA.
# The level would overrule what these flags turn off.
_FLAGS = r"XLA_FLAGS=.*(latency_hiding|pipelin|combine_threshold|double_buffering)"
_SLINGSHOT = """NCCL_SOCKET_IFNAME=CARDS NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB
  FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1 FI_CXI_DEFAULT_CQ_SIZE=131072
  FI_CXI_DEFAULT_TX_SIZE=2048 FI_CXI_RX_MATCH_MODE=hybrid"""
_PAIRS = (pair.split("=") for pair in _SLINGSHOT.split())
_HPE, _HOPPER = "Slingshot, by HPE", "Hopper: kernels start in their order"
_MEMORY, _OWN_MEMORY = "JAX takes 75 % by default", r"XLA_(PYTHON_)?CLIENT_\w+="
TABLE = (
  Row("XLA_CLIENT_MEM_FRACTION", "0.9", "is_alone", _MEMORY, _OWN_MEMORY),
  Row(LEVEL, "O1", "has_peers", "collectives behind computation", _FLAGS),
  Row("CUDA_DEVICE_MAX_CONNECTIONS", "1", "has_peers is_hopper", _HOPPER),
  Row("NCCL_IB_HCA", "=CARDS", "is_mixed", "InfiniBand, not the Ethernet next to it"),
  Row("NCCL_NET", "AWS Libfabric", "is_slingshot has_plugin", _HPE, "NCCL_NET_PLUGIN="),
  *(Row(name, value, "is_slingshot", _HPE) for name, value in _PAIRS),
  Row("HSA_FORCE_FINE_GRAIN_PCIE", "1", "is_slingshot is_amd", _HPE),
)


class Choice(NamedTuple):
  """What is set in a place.

  Attributes:
    rows: with the values to set.
    kept: names of variables that stay as the user has set them.
    missing: what the place lacks, a line; "": nothing.
  """

  rows: tuple[tuple[Row, str], ...] = ()
  kept: tuple[str, ...] = ()
  missing: str = ""

  @property
  def values(self) -> dict[str, str]:
    """What is set, by name."""
    return {row.name: value for row, value in self.rows}


def choose(place: Place, env: Env) -> Choice:
  """What fits a place, but for what its user has set.

  Example:
    >>> choose(Place(gpus=1), {}).values
    {'XLA_CLIENT_MEM_FRACTION': '0.9'}
    >>> choose(Place(gpus=1), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}).values
    {}
  """
  if not place.gpus:
    return Choice()
  rows, kept = [], []
  for row in TABLE:
    if not all(getattr(place, name) for name in row.when.split()):
      continue
    others = [n for n, v in env.items() if re.match(row.unless, f"{n}={v}", re.S)]
    decided = [row.name] if row.name in env else others
    kept += decided
    if not decided:
      cards = ",".join(place.fabric.cards) or "hsn"
      rows.append((row, row.value.replace("CARDS", cards)))
  missing, fabric = "", place.fabric
  needs_plugin = place.has_nodes and fabric.kind in ("slingshot", "efa")
  if needs_plugin and not fabric.has_plugin and not {"NCCL_NET", "NCCL_NET_PLUGIN"} & {*env}:
    name = {"slingshot": "Slingshot", "efa": "EFA"}[fabric.kind]
    missing = f"{name} without aws-ofi-nccl (the loader finds no libnccl-net.so): NCCL "
    missing += "would use TCP; load the site's module of it"
  return Choice(tuple(rows), tuple(dict.fromkeys(kept)), missing)


def lines(choice: Choice, *, short: bool = False) -> list[str]:
  """For the log: what is set and why, what stays, what is missing.

  Args:
    choice: by `choose`.
    short: leave out what is missing.

  Example:
    >>> lines(choose(Place(gpus=1), {}))[0].partition(";")[0]
    'GPU settings: XLA_CLIENT_MEM_FRACTION=0.9 (JAX takes 75 % by default)'
  """
  reasons: dict[str, list[str]] = {}
  for row, value in choice.rows:
    shown = f'"{value}"' if " " in value else value
    reasons.setdefault(row.why, []).append(f"{row.name}={shown}")
  found = []
  if reasons or choice.kept:
    parts = [f"{' '.join(names)} ({why})" for why, names in reasons.items()]
    kept = f"; as you have set them: {', '.join(choice.kept)}" if choice.kept else ""
    found = [f"GPU settings: {', '.join(parts) or 'none'}{kept}; {_OFF}"]
  is_missing = bool(choice.missing) and not short
  return found + [f"GPU settings: {choice.missing}"] * is_missing


def place_of(
  launch: Launch,
  gpus: int,
  gpu_ids: Iterable[int] | None = None,
  env: Env = os.environ,
  root: str = "/",
) -> Place:
  """Where this process runs.

  Args:
    launch: by `detect.detect`.
    gpus: that it sees.
    gpu_ids: of those, its own; None: all.
    env: the environment variables.
    root: of the file system.
  """
  from jaxscale.cluster.detect.fabric import find_fabric, nvidia_models
  from jaxscale.cluster.detect.local_devices import IDS, SHARING

  if not gpus:
    return Place(0)
  several, here = launch.num_processes > 1, launch.local_size
  own = gpus if gpu_ids is None else len([*gpu_ids])
  if launch.nodes:
    has_nodes = len({*launch.nodes}) > 1
  else:  # where nobody knows, the processes may be anywhere
    has_nodes = several and (here is None or here < launch.num_processes)
  # Named by hand, GPUs may be the same in several processes.
  is_shared = several and any(map(env.get, (IDS, *SHARING)))
  fabric = find_fabric(env, root)
  peers = several or own > 1
  return Place(gpus, nvidia_models(root), is_shared, peers, has_nodes, fabric)


def apply(choice: Choice, env: MutableMapping[str, str] = os.environ) -> None:
  """Set what was chosen; before JAX's first use of a GPU.

  Args:
    choice: by `choose`.
    env: the environment variables.
  """
  values = choice.values
  jax = sys.modules.get("jax")
  if LEVEL in values and jax is not None:  # which has read its variables by now
    name = "jax_optimization_level"
    if getattr(jax.config, name, None) in (None, "UNKNOWN"):
      jax.config.update(name, values[LEVEL])
    else:
      del values[LEVEL]  # set by `jax.config.update`
  env.update(values)
  _applied.update(values)


def choose_here(launch: Launch, gpus: int, gpu_ids: Iterable[int] | None = None) -> Choice:
  """What fits this process; nothing where JAX cannot use its GPUs.

  The arguments are those of `place_of`.
  """
  from jaxscale.cluster.environment import has_gpu_plugin

  if not gpus or not has_gpu_plugin():
    return Choice()
  return choose(place_of(launch, gpus, gpu_ids), own())


def applied() -> dict[str, str]:
  """What this process has set, by name."""
  return dict(_applied)


def own(env: Env = os.environ) -> dict[str, Any]:
  """The environment without what this process has set."""
  return {n: v for n, v in env.items() if _applied.get(n) != v}


def shared(env: Env = os.environ) -> dict[str, str]:
  """The variables that all processes must have alike, with their values."""
  return {name: env.get(name, "unset") for name in SHARED}
