"""Environment variables that GPU vendors recommend, set where GPUs are found.

JAX, XLA, CUDA and NCCL read these variables when they start, so they are set before.
`TABLE` has the variables, their purpose and their sources. A variable that the user has
set keeps its value, and a related variable may also prevent a setting (`unless`). XLA
flags are not used, because XLA aborts on an unknown flag while JAX ignores an unknown
variable. NCCL finds InfiniBand, NVLink between nodes and the right RoCE address without
any setting.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple

from jaxscale.cluster.detect.fabric import Fabric, find_fabric, nvidia_models
from jaxscale.cluster.detect.local_devices import IDS
from jaxscale.cluster.environment import has_gpu_plugin
from jaxscale.cluster.launch import Env, Launch
from jaxscale.cluster.schedulers import SCHEDULERS
from jaxscale.errors import invalid

LEVEL = "JAX_OPTIMIZATION_LEVEL"
# All processes must agree on these, which decide on the program and NCCL's network.
SHARED = (LEVEL, "NCCL_NET")
FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_OFF = "disable with --config.gpu_settings=False"
_applied: dict[str, str] = {}  # variables that this process has set


class Hardware(NamedTuple):
  """The GPUs and the network of a process.

  Attributes:
    gpus: the number of GPUs that the process sees.
    models: the models of NVIDIA's GPUs on the node.
    is_alone: True if no other process computes on the same GPUs.
    has_peers: True if the run has other GPUs.
    has_nodes: True if the run has other nodes.
    fabric: the network of the node.
    is_amd: True if the node has AMD's driver and no GPU from NVIDIA.
  """

  gpus: int
  models: tuple[str, ...] = ()
  is_alone: bool = True
  has_peers: bool = False
  has_nodes: bool = False
  fabric: Fabric = Fabric("ethernet")
  is_amd: bool = False

  @property
  def is_hopper(self) -> bool:
    """True if all GPUs are of the generation of the H100."""
    hopper = re.compile(r"\bG?H(20|100|200|800)\b")
    return bool(self.models) and all(map(hopper.search, self.models))

  @property
  def has_plugin(self) -> bool:
    """True if NCCL finds aws-ofi-nccl."""
    return self.fabric.has_plugin

  @property
  def is_slingshot(self) -> bool:
    """True if other nodes are reached over Slingshot."""
    return self.has_nodes and self.fabric.kind == "slingshot"

  @property
  def is_mixed(self) -> bool:
    """True if the node has both InfiniBand and RDMA adapters on Ethernet."""
    fabric = self.fabric
    return self.has_nodes and fabric.kind == "infiniband" and bool(fabric.others)


class Row(NamedTuple):
  """A variable to set.

  Attributes:
    name: the name of the variable.
    value: the value, in which CARDS stands for the network's adapters.
    when: properties of `Hardware` that must all be true.
    reason: the reason, in a few words for the log.
    unless: a regular expression of NAME=VALUE. If a variable of the environment matches,
      the user has already decided, and nothing is set.
  """

  name: str
  value: str
  when: str
  reason: str
  unless: str = r"$^"


# Sources. Memory, level and connections: NVIDIA JAX-Toolbox, docs/GPU_performance.md,
# and for the level openxla.org/xla/effort_levels. Within a node the level is not raised: in the
# step of an 8B model, compiled for H100, O1 makes a reduce-scatter synchronous, which exposes
# more communication on 8 GPUs and less on 64 (docs/accelerators.md). JAX takes 75 % of the
# memory by default (docs.jax.dev, "GPU memory allocation"). One connection suits Hopper and
# slows down Blackwell. AMD: ROCm/MAD, scripts/jax-maxtext/env_scripts. Slingshot: HPE's
# shs-ccl-docs, ccl_env.sh, without
# FI_CXI_RDZV_PROTO=alt_read, for which srun must have --network=disable_rdzv_get.
# NCCL_IB_HCA: NCCL's user guide; by default NCCL uses every adapter with RDMA.
# The level would override these flags of the user.
_FLAGS = r"XLA_FLAGS=.*(latency_hiding|pipelin|combine_threshold|double_buffering)"
_SLINGSHOT = """NCCL_SOCKET_IFNAME=CARDS NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB
  FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1 FI_CXI_DEFAULT_CQ_SIZE=131072
  FI_CXI_DEFAULT_TX_SIZE=2048 FI_CXI_RX_MATCH_MODE=hybrid"""
_AMD = "GPU_MAX_HW_QUEUES=2 HIP_FORCE_DEV_KERNARG=1 HSA_FORCE_FINE_GRAIN_PCIE=1"
_HPE, _HOPPER = "HPE's settings for Slingshot", "Hopper: kernels start in program order"
_MEMORY, _OWN_MEMORY = "JAX takes 75 % by default", r"XLA_(PYTHON_)?CLIENT_\w+="


def _pairs(text: str) -> list[list[str]]:
  return [word.split("=") for word in text.split()]


TABLE = (
  Row(FRACTION[0], "0.9", "is_alone", _MEMORY, _OWN_MEMORY),
  Row(LEVEL, "O1", "has_nodes", "overlaps collectives with computation", _FLAGS),
  Row("CUDA_DEVICE_MAX_CONNECTIONS", "1", "has_peers is_hopper", _HOPPER),
  Row("NCCL_IB_HCA", "=CARDS", "is_mixed", "InfiniBand adapters only, not Ethernet"),
  Row("NCCL_NET", "AWS Libfabric", "is_slingshot has_plugin", _HPE, "NCCL_NET_PLUGIN="),
  *(Row(name, value, "is_slingshot", _HPE) for name, value in _pairs(_SLINGSHOT)),
  *(Row(name, value, "is_amd", "AMD's settings for JAX") for name, value in _pairs(_AMD)),
)


class Choice(NamedTuple):
  """The variables to set for a process.

  Attributes:
    rows: rows of the table with their values.
    kept: names of variables that keep the user's value.
    missing: a line about missing software; "" if nothing is missing.
  """

  rows: tuple[tuple[Row, str], ...] = ()
  kept: tuple[str, ...] = ()
  missing: str = ""

  @property
  def values(self) -> dict[str, str]:
    """Values to set, by name."""
    return {row.name: value for row, value in self.rows}


def choose(hardware: Hardware, env: Env) -> Choice:
  """Choose the variables for a process, except those that the user has set.

  Example:
    >>> choose(Hardware(gpus=1), {}).values
    {'XLA_CLIENT_MEM_FRACTION': '0.9'}
    >>> choose(Hardware(gpus=1), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}).values
    {}
  """
  if not hardware.gpus:
    return Choice()
  rows, kept = [], []
  for row in TABLE:
    if not all(getattr(hardware, name) for name in row.when.split()):
      continue
    others = [n for n, v in env.items() if re.match(row.unless, f"{n}={v}", re.S)]
    decided = [row.name] if row.name in env else others
    kept += decided
    if not decided:
      cards = ",".join(hardware.fabric.cards) or "hsn"
      rows.append((row, row.value.replace("CARDS", cards)))
  missing, fabric = "", hardware.fabric
  needs_plugin = hardware.has_nodes and fabric.kind in ("slingshot", "efa")
  if needs_plugin and not fabric.has_plugin and not {"NCCL_NET", "NCCL_NET_PLUGIN"} & {*env}:
    name = {"slingshot": "Slingshot", "efa": "EFA"}[fabric.kind]
    missing = f"{name} without aws-ofi-nccl (the loader finds no libnccl-net.so): NCCL "
    missing += "would use TCP; load the site's module of aws-ofi-nccl"
  return Choice(tuple(rows), tuple(dict.fromkeys(kept)), missing)


def lines(choice: Choice, *, short: bool = False) -> list[str]:
  """Return log lines: variables that are set and why, kept ones, missing software.

  Args:
    choice: the result of `choose`.
    short: whether to leave out the line about missing software.

  Example:
    >>> lines(choose(Hardware(gpus=1), {}))[0].partition(";")[0]
    'GPU settings: XLA_CLIENT_MEM_FRACTION=0.9 (JAX takes 75 % by default)'
  """
  reasons: dict[str, list[str]] = {}
  for row, value in choice.rows:
    shown = f'"{value}"' if " " in value else value
    reasons.setdefault(row.reason, []).append(f"{row.name}={shown}")
  result = []
  if reasons or choice.kept:
    parts = [f"{' '.join(names)} ({problem})" for problem, names in reasons.items()]
    kept = f"; kept as you set them: {', '.join(choice.kept)}" if choice.kept else ""
    result = [f"GPU settings: {', '.join(parts) or 'none'}{kept}; {_OFF}"]
  is_missing = bool(choice.missing) and not short
  return result + [f"GPU settings: {choice.missing}"] * is_missing


def hardware_of(
  launch: Launch, gpus: int, gpu_ids: Iterable[int] | None, env: Env = os.environ, root: str = "/"
) -> Hardware:
  """Describe the GPUs and the network of this process.

  Args:
    launch: the result of `detect.detect`.
    gpus: the number of GPUs that the process sees.
    gpu_ids: the GPUs that it uses among these; None means all of them.
    env: the environment variables.
    root: the root of the file system, for tests.
  """
  several, local_size = launch.num_processes > 1, launch.local_size
  own = gpus if gpu_ids is None else len([*gpu_ids])
  if launch.nodes:
    has_nodes = len({*launch.nodes}) > 1
  else:  # without a list of nodes, assume that there are several
    has_nodes = several and (local_size is None or local_size < launch.num_processes)
  # GPUs that the user lists may be the same in several processes.
  sharing = IDS, *(name for s in SCHEDULERS.values() for name in s.GPU_SHARING)
  is_alone = not (several and any(map(env.get, sharing)))
  fabric, models = find_fabric(env, root), nvidia_models(root)
  is_amd = not models and os.path.exists(os.path.join(root, "dev/kfd"))
  return Hardware(gpus, models, is_alone, several or own > 1, has_nodes, fabric, is_amd)


def apply(choice: Choice, env: MutableMapping[str, str] = os.environ) -> None:
  """Set the chosen variables; call this before JAX's first use of a GPU.

  Args:
    choice: the result of `choose`.
    env: the environment variables.
  """
  values = choice.values
  jax = sys.modules.get("jax")
  if LEVEL in values and jax is not None:  # JAX has already read its variables
    name = "jax_optimization_level"
    if getattr(jax.config, name, None) in (None, "UNKNOWN"):
      jax.config.update(name, values[LEVEL])
    else:
      del values[LEVEL]  # set by `jax.config.update`
  env.update(values)
  _applied.update(values)


def choose_here(launch: Launch, gpus: int, gpu_ids: Iterable[int] | None = None) -> Choice:
  """Choose the variables for this process; none if JAX cannot use its GPUs.

  The arguments are those of `hardware_of`.
  """
  if not gpus or not has_gpu_plugin():
    return Choice()
  return choose(hardware_of(launch, gpus, gpu_ids), own())


def applied() -> dict[str, str]:
  """Return the variables that this process has set, by name."""
  return dict(_applied)


def memory_fraction(choice: Choice, env: Env = os.environ) -> float:
  """Return the fraction of a GPU's memory that JAX takes.

  Args:
    choice: the result of `choose`, which sets the fraction unless the user has.
    env: the environment variables.

  Raises:
    ConfigError: the fraction that the user has set is not in (0, 1].

  Example:
    >>> memory_fraction(choose(Hardware(gpus=1), {}), {})
    0.9
    >>> memory_fraction(Choice(), {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"})
    0.5
  """
  given = {name: env[name] for name in FRACTION if name in env} | choice.values
  for name in FRACTION:
    if name in given:
      with contextlib.suppress(ValueError):
        if 0 < (fraction := float(given[name])) <= 1:
          return fraction
      raise invalid(name, given[name], "is no fraction of the memory", "set it to e.g. 0.9")
  return 0.75  # docs.jax.dev, "GPU memory allocation"


def own(env: Env = os.environ) -> dict[str, Any]:
  """Return the environment without the variables that this process has set."""
  return {n: v for n, v in env.items() if _applied.get(n) != v}


def shared(env: Env = os.environ) -> dict[str, str]:
  """Return the variables on which all processes must agree, with their values."""
  return {name: env.get(name, "unset") for name in SHARED}
