"""Under an MPI's mpirun: ranks by variables, the host of rank 0 by asking.

No MPI says in a variable where rank 0 runs: OMPI_MCA_orte_hnp_uri, which JAX reads,
names the host of mpirun (a login node, perhaps) and is gone in Open MPI 5. On one
node it does not matter. On several, mpi4py is asked if it is there, else the first
host of the scheduler's list, where mpirun puts rank 0 unless told otherwise.

Variables: Open MPI, docs/tuning-apps/environment-var; MPICH and Intel MPI, as their
mpiexec.hydra sets them (recorded, tests/data/cluster); HPE Cray's PALS, mpiexec(1).
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from pathlib import Path
from typing import NamedTuple

from jaxscale.cluster.detect.launch import LOOPBACK, Host, Launch, number
from jaxscale.errors import ConfigError


class _Family(NamedTuple):
  kind: str
  rank: str
  size: str
  local_rank: str
  local_size: str
  job: tuple[str, ...]  # the same in all ranks, another in the next mpirun


_FAMILIES = (
  _Family(
    "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
  ),
  _Family(
    "mvapich", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", (),
  ),
  _Family(
    "pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE",
    ("PALS_APID",),
  ),
  _Family(
    "hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    ("I_MPI_HYDRA_UUID",),
  ),
)  # fmt: skip
_SCHEDULERS_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def detect(host: Host) -> Launch | None:
  """Who this process is under mpirun, None if an MPI did not start it.

  Of several nodes the host of process 0 is not known yet: see `with_host_of_rank_0`.
  """
  env = host.env
  for family in _FAMILIES:
    rank, size = number(env, family.rank), number(env, family.size)
    if rank is None or size is None:
      continue
    # PMI_RANK of `srun --mpi=pmi2` and of Cray: Slurm's own variables say more.
    by_srun = "SLURM_STEP_NODELIST" in env and "MPI_LOCALRANKID" not in env
    if family.kind == "hydra" and by_srun:
      continue
    if not rank < size:
      raise ConfigError(f"{family.rank}={rank}, {family.size}={size}: no rank of it")
    local_rank = number(env, family.local_rank)
    local_size = number(env, family.local_size)
    if local_rank is None or local_size is None:  # Cray MPICH's PMI calls them so
      local_rank = number(env, "PMI_LOCAL_RANK")
      local_size = number(env, "PMI_LOCAL_SIZE")
    restarts = number(env, "SLURM_RESTART_COUNT") or 0
    # A name of this mpirun; MPICH gives none, then the scheduler's or its size.
    names = (*family.job, "PMI_JOBID", *_SCHEDULERS_JOB)
    name = next((env[n] for n in names if env.get(n)), f"{env.get('USER', '')}{size}")
    job = f"{family.kind}-{name}" + (f"-r{restarts}" if restarts else "")
    at = LOOPBACK if local_size == size > 1 else None
    return Launch(family.kind, rank, size, at, local_rank, local_size, job, restarts)
  return None


def with_host_of_rank_0(host: Host, found: Launch) -> Launch:
  """What `detect` has found on several nodes, with the host of rank 0.

  Raises:
    ConfigError: nothing says it.
  """
  if name := host.ask_mpi(found):
    return found._replace(host=name)
  if name := _first_scheduled(host):
    note = f"takes {name}, the first host of the job, for that of MPI's rank 0"
    return found._replace(host=name, note=note)
  raise ConfigError(
    "JAXSCALE_COORDINATOR: not set, and mpirun does not say on which host rank 0 "
    "runs: set it to host:port of that host, or install mpi4py"
  )


def ask_mpi4py(launch: Launch) -> str | None:
  """The host name of rank 0 by a broadcast; None if mpi4py is not there.

  MPI is started for it and, unless somebody had started it before, ended at once:
  a process that leaves by `os._exit` would otherwise end its mpirun in error.

  Raises:
    ConfigError: mpi4py belongs to another MPI than the mpirun of this run.
  """
  if importlib.util.find_spec("mpi4py") is None:
    return None
  # No dependency of ours: by name, so that nobody misses it who needs no MPI.
  try:
    importlib.import_module("mpi4py").rc.initialize = False
    MPI = importlib.import_module("mpi4py.MPI")
  except (ImportError, RuntimeError):  # it finds no MPI library
    return None
  ours = not MPI.Is_initialized()
  if ours:
    MPI.Init()
  world = MPI.COMM_WORLD
  size = world.Get_size()
  host = socket.gethostname() if world.Get_rank() == 0 else None
  host = world.bcast(host, root=0)
  if ours:
    MPI.Finalize()
  if size != launch.num_processes:
    raise ConfigError(
      f"mpi4py sees {size} of {launch.num_processes} processes: it was built for "
      "another MPI than this mpirun; set JAXSCALE_COORDINATOR=host:port instead"
    )
  return host


def _first_scheduled(host: Host) -> str | None:
  if nodes := host.env.get("SLURM_JOB_NODELIST"):
    return host.expand(nodes)[0]
  try:
    lines = Path(host.env["PBS_NODEFILE"]).read_text().split()
  except (KeyError, OSError):
    return None
  return lines[0] if lines else None
