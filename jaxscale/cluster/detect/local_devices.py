"""Which of the GPUs that this process sees are its own.

JAX (0.10.2, jax/_src/clusters/cluster.py) gives a task of Slurm the GPU numbered
SLURM_LOCALID. That is right only where every task of a node sees all its GPUs and
there is one task a GPU: not with --gpus-per-task (each task sees its own, numbered
from 0: jax#16788, #23452, #28194), not with one process a node (7 of 8 GPUs idle),
not with more tasks than GPUs (jax#29669).

What Slurm sets in each case was recorded on a real Slurm with four pretended GPUs a
node (tests/data/cluster): srun sets CUDA_VISIBLE_DEVICES anew in each task, so whatever
is narrower than Slurm's count of the run's GPUs on the node, SLURM_GPUS_ON_NODE, was
narrowed for this task alone, by Slurm or by a wrapper script.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import subprocess

from jaxscale.cluster.detect.launch import Env, Launch, number
from jaxscale.errors import ConfigError
from jaxscale.files import whole_number

IDS = "JAX_LOCAL_DEVICE_IDS"  # JAX's own way to say it, jax/_src/distributed.py
_HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Of --ntasks-per-gpu: srun(1), and what 22.05 sets for it.
SHARING = ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES")


def local_device_ids(env: Env, num_visible: int, launch: Launch) -> list[int] | None:
  """The GPUs of this process, numbered from 0 among those that it sees.

  For `jax.distributed.initialize`. Where it is None, give JAX
  `cluster_detection_method="deactivate"` as well, or it goes back to SLURM_LOCALID.

  Args:
    env: the environment variables.
    num_visible: GPUs that this process can use, from `visible_gpus`.
    launch: from `detect`.

  Returns:
    None on CPU or TPU, and where all that is visible may be used.

  Raises:
    ConfigError: there are more processes than GPUs on this node, they cannot be
      shared out evenly, or JAX_LOCAL_DEVICE_IDS names one that is not there.

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
  if _is_own(env, num_visible):
    return everything
  if num_visible < count:
    fix = f"start one process per GPU (--ntasks-per-node={num_visible})"
    fix += f", or set {IDS} if they are to share one on purpose"
    raise ConfigError(f"{count} processes on this node, but {_gpus(num_visible)}: {fix}")
  if num_visible % count:
    fitting = [str(n) for n in range(1, num_visible + 1) if num_visible % n == 0]
    fix = f"start {' or '.join(fitting)} per node (--ntasks-per-node), or set {IDS}"
    gpus = _gpus(num_visible)
    raise ConfigError(f"{count} processes on this node cannot share {gpus} evenly: {fix}")
  each = num_visible // count
  return everything[index * each : (index + 1) * each]


def visible_gpus(env: Env = os.environ, *, device_root: str = "/dev") -> int:
  """How many GPUs JAX would find in this process, found without JAX.

  JAX must be given its GPUs before it looks, and looking takes seconds. So: none if
  JAX_PLATFORMS leaves them out. Else what CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES
  and HIP_VISIBLE_DEVICES let through: Slurm sets the first two, and a process sees
  no more than the narrowest. Without them, the device files that this process may
  open: /dev/nvidia0, … and, with /dev/kfd, /dev/dri/renderD*. Device control
  groups leave the files of foreign GPUs in place but deny access(2), so those do
  not count. Where there is a driver but no such file (WSL: /dev/dxg), `nvidia-smi
  -L` is asked, which takes seconds when the driver is not kept loaded.

  Args:
    env: the environment variables.
    device_root: where the device files are.

  Example:
    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"})
    2
  """
  platforms = env.get("JAX_PLATFORMS", "")
  if platforms and not re.search(r"\b(cuda|rocm|gpu)\b", platforms):
    return 0
  if listed := [_count(env[name]) for name in _HIDING if name in env]:
    return min(listed)
  if nvidia := sum(map(_may_open, glob.glob(f"{device_root}/nvidia[0-9]*"))):
    return nvidia
  if os.path.exists(f"{device_root}/kfd"):
    return sum(map(_may_open, glob.glob(f"{device_root}/dri/renderD*")))
  return _nvidia_smi() if os.path.exists(f"{device_root}/dxg") else 0


def _is_own(env: Env, num_visible: int) -> bool:
  """Whether what this process sees was cut out for it alone."""
  # Or "a100:2".
  per_task = re.search(r"\b(\d{1,9})$", env.get("SLURM_GPUS_PER_TASK", ""))
  is_shared = num_visible == 1 and any(map(env.get, SHARING))
  if is_shared or (per_task and num_visible <= int(per_task[1])):
    return True
  if (node := number(env, "SLURM_GPUS_ON_NODE")) is not None:
    return num_visible < node
  # Without Slurm's count only a wrapper script can have left a single one.
  return num_visible == 1 and any(name in env for name in _HIDING)


def _count(text: str) -> int:
  """Devices in a list; CUDA ends it at the first that is none, such as -1.

  Of MIG instances a process can use one only (NVIDIA MIG User Guide, "CUDA Device
  Enumeration").
  """
  is_device = re.compile(r"\s*(\d+|(GPU|MIG)-[\w/-]+)\s*").fullmatch
  found = list(itertools.takewhile(is_device, text.split(",")))
  return 1 if found and found[0].strip().startswith("MIG-") else len(found)


def _chosen(text: str, num_visible: int) -> list[int]:
  pieces = [piece.strip() for piece in text.split(",")]
  found = [number for p in pieces if (number := whole_number(p)) is not None]
  if len(found) < len(pieces) or max(found) >= num_visible:
    why = f"with commas (this process sees {_gpus(num_visible)})"
    raise ConfigError(f"{IDS}={text}: give numbers from 0 to {num_visible - 1}, {why}")
  if len(set(pieces)) < len(pieces):
    raise ConfigError(f"{IDS}={text}: a GPU is named twice; name each once")
  return found


def _gpus(count: int) -> str:
  return "1 GPU" if count == 1 else f"{count} GPUs"


def _may_open(path: str) -> bool:
  return os.access(path, os.R_OK | os.W_OK)


def _nvidia_smi() -> int:
  try:
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(["nvidia-smi", "-L"], timeout=10, **options)
  except (OSError, subprocess.TimeoutExpired):
    return 0
  return len(re.findall(r"^GPU \d+:", done.stdout, flags=re.M))
