"""Assignment of the visible GPUs to the processes of a node.

JAX (0.10.2, jax/_src/clusters/cluster.py) gives a Slurm task the GPU numbered
SLURM_LOCALID. This is right only if every task of a node sees all GPUs and there is one
task per GPU. It is wrong with --gpus-per-task (each task sees its own GPUs, numbered from
0: jax#16788, #23452, #28194), with one process per node (7 of 8 GPUs idle), and with more
tasks than GPUs (jax#29669).

Slurm's variables in each case were recorded on a real Slurm with four simulated GPUs per
node (tests/data/cluster). srun sets CUDA_VISIBLE_DEVICES anew in each task. So if a task
sees fewer GPUs than SLURM_GPUS_ON_NODE, Slurm or a wrapper script has selected them for
this task.
"""

from __future__ import annotations

import glob
import itertools
import os
import re

from jaxscale.cluster import schedulers
from jaxscale.cluster.launch import Env, Launch
from jaxscale.errors import ConfigError
from jaxscale.files import output_of, whole_number

IDS = "JAX_LOCAL_DEVICE_IDS"  # JAX's own variable, jax/_src/distributed.py
HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def local_device_ids(env: Env, num_visible: int, launch: Launch) -> list[int] | None:
  """Return the GPUs of this process, numbered from 0 among the visible ones.

  The result is for `jax.distributed.initialize`. If it is None, also pass
  `cluster_detection_method="deactivate"`, or JAX uses SLURM_LOCALID.

  Args:
    env: the environment variables.
    num_visible: the number of GPUs that this process can use, from `visible_gpus`.
    launch: the result of `detect`.

  Returns:
    The numbers; None on CPU or TPU, and if the process may use all visible GPUs.

  Raises:
    ConfigError: the node has more processes than GPUs, the GPUs cannot be divided evenly,
      or JAX_LOCAL_DEVICE_IDS has a number out of range.

  Example:
    >>> launch = Launch("slurm", 1, 4, "n1", local_id=1, local_size=2)
    >>> local_device_ids({}, 8, launch)  # two processes on a node with 8 GPUs
    [4, 5, 6, 7]
  """
  if num_visible == 0 or launch.kind == "tpu":
    return None
  if env.get(IDS):
    return _chosen(env[IDS], num_visible)
  everything = list(range(num_visible))
  index, count = launch.local_id, launch.local_size
  if launch.num_processes == 1 or count is None or index is None:
    return None
  is_local = launch.kind == "local"  # its processes see all GPUs of the one that started them
  if not is_local and _is_own(env, num_visible):
    return everything
  option = "--processes-per-node" if is_local else "--ntasks-per-node"
  if num_visible < count:
    fix = f"start one process per GPU ({option}={num_visible})"
    fix += f", or set {IDS} to share a GPU on purpose"
    raise ConfigError(f"{count} processes on this node, but {_gpus(num_visible)}: {fix}")
  if num_visible % count:
    fitting = [str(n) for n in range(1, num_visible + 1) if num_visible % n == 0]
    fix = f"start {' or '.join(fitting)} per node ({option}), or set {IDS}"
    gpus = _gpus(num_visible)
    raise ConfigError(f"{count} processes on this node cannot share {gpus} evenly: {fix}")
  each = num_visible // count
  return everything[index * each : (index + 1) * each]


def visible_gpus(env: Env = os.environ, *, device_root: str = "/dev") -> int:
  """Count the GPUs that JAX would find in this process, without JAX.

  JAX needs its GPU numbers before it initializes, and initialization takes seconds. The
  count is 0 if JAX_PLATFORMS excludes GPUs. Otherwise it is the smallest number in
  CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES, of which Slurm sets
  the first two. Without these variables, the device files that this process may open are
  counted: /dev/nvidia0, … and, with /dev/kfd, /dev/dri/renderD*. Device control groups
  leave the files of other jobs' GPUs in place but deny access(2), so these do not count.
  If there is a driver but no such file (WSL: /dev/dxg), `nvidia-smi -L` is called, which
  takes seconds when the driver is not kept loaded.

  Args:
    env: the environment variables.
    device_root: the directory of the device files.

  Example:
    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"})
    2
  """
  platforms = env.get("JAX_PLATFORMS", "")
  if platforms and not re.search(r"\b(cuda|rocm|gpu)\b", platforms):
    return 0
  if listed := [_count(env[name]) for name in HIDING if name in env]:
    return min(listed)
  if nvidia := sum(map(may_open, glob.glob(f"{device_root}/nvidia[0-9]*"))):
    return nvidia
  if os.path.exists(f"{device_root}/kfd"):
    return sum(map(may_open, glob.glob(f"{device_root}/dri/renderD*")))
  return _nvidia_smi() if os.path.exists(f"{device_root}/dxg") else 0


def _is_own(env: Env, num_visible: int) -> bool:
  """Return whether the visible GPUs were selected for this process only."""
  if (is_own := schedulers.ask(lambda s: s.has_own_gpus(env, num_visible))) is not None:
    return is_own
  # Without a scheduler's count, only a wrapper script can have selected a single GPU.
  return num_visible == 1 and any(name in env for name in HIDING)


def _count(text: str) -> int:
  """Count the devices in a list; CUDA ignores those after an invalid one, such as -1.

  A process can use only one MIG instance (NVIDIA MIG User Guide, "CUDA Device
  Enumeration").
  """
  is_device = re.compile(r"\s*(\d+|(GPU|MIG)-[\w/-]+)\s*").fullmatch
  devices = list(itertools.takewhile(is_device, text.split(",")))
  return 1 if devices and devices[0].strip().startswith("MIG-") else len(devices)


def _chosen(text: str, num_visible: int) -> list[int]:
  pieces = [piece.strip() for piece in text.split(",")]
  numbers = [number for p in pieces if (number := whole_number(p)) is not None]
  if len(numbers) < len(pieces) or max(numbers) >= num_visible:
    problem = f"with commas (this process sees {_gpus(num_visible)})"
    raise ConfigError(f"{IDS}={text}: give numbers from 0 to {num_visible - 1}, {problem}")
  if len(set(pieces)) < len(pieces):
    raise ConfigError(f"{IDS}={text}: a GPU is listed twice; list each once")
  return numbers


def _gpus(count: int) -> str:
  return "1 GPU" if count == 1 else f"{count} GPUs"


def may_open(path: str) -> bool:
  """Return whether this process may use a device file."""
  return os.access(path, os.R_OK | os.W_OK)


def _nvidia_smi() -> int:
  listed = output_of("nvidia-smi", "-L", timeout_s=10) or ""
  return len(re.findall(r"^GPU \d+:", listed, flags=re.M))
