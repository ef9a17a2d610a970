"""Launch detection under PyTorch's torchrun and launchers with the same variables.

The variables are those of "torchrun (Elastic Launch)", "Environment Variables", in
PyTorch's documentation. DeepSpeed, Accelerate and Kubeflow's PyTorchJob also set them.
"""

from __future__ import annotations

from jaxscale.cluster.launch import Env, Launch, number
from jaxscale.errors import invalid

_REMEDY = "start it with torchrun, or unset RANK and WORLD_SIZE"


def detect_agent(env: Env) -> Launch | None:
  """Identify this process under torchrun, which srun or mpirun may have started."""
  return detect(env) if "TORCHELASTIC_RUN_ID" in env else None


def detect(env: Env) -> Launch | None:
  """Identify this process by RANK and WORLD_SIZE; None if they are not set.

  Raises:
    ConfigError: the variables are incomplete or contradict each other.
  """
  rank, size = number(env, "RANK"), number(env, "WORLD_SIZE")
  if rank is None or size is None:
    return None
  if not rank < size:
    raise invalid("RANK", rank, f"is not less than WORLD_SIZE={size}", _REMEDY)
  run, restarts = (env.get("TORCHELASTIC_RUN_ID"), number(env, "TORCHELASTIC_RESTART_COUNT"))
  if size == 1 and run is None:
    return None
  if not (address := env.get("MASTER_ADDR")) and size > 1:
    raise invalid("MASTER_ADDR", ..., f"is not set, but WORLD_SIZE={size} is", _REMEDY)
  port = number(env, "MASTER_PORT")
  again = f"-r{restarts}" if restarts else ""
  job = f"torchrun-{run or ''}-{address}:{port}{again}"
  # torchrun's agent itself may listen on MASTER_PORT.
  is_taken = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
  local = number(env, "LOCAL_RANK"), number(env, "LOCAL_WORLD_SIZE")
  note = "" if run else f"one run of {size} processes, by RANK and WORLD_SIZE as of torchrun"
  launch = Launch("torchrun", rank, size, None, *local, job, restarts or 0, note)
  if size == 1:
    return launch
  return launch._replace(host=address, port=None if is_taken else port)
