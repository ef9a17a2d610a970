"""Launch detection under mpirun: ranks from variables, and the host of rank 0.

No MPI has a variable with the host of rank 0. OMPI_MCA_orte_hnp_uri, which JAX reads, has
the host of mpirun, which may be a login node, and does not exist in Open MPI 5. On
several nodes mpi4py finds the host if it is installed. Otherwise it is the first host of
the scheduler's list, where mpirun puts rank 0 by default.

Sources of the variables: Open MPI, docs/tuning-apps/environment-var; MPICH and Intel MPI,
as their mpiexec.hydra sets them (recorded, tests/data/cluster); HPE Cray's PALS,
mpiexec(1).
"""

from __future__ import annotations

import importlib
import socket
from pathlib import Path

from jaxscale.cluster import schedulers
from jaxscale.cluster.launch import LOOPBACK, Env, Launch, number
from jaxscale.errors import ConfigError
from jaxscale.files import readable_text

# For each kind, the variables of the rank, the size, the local rank and the local size.
# The others are equal in all ranks of an mpirun and differ in the next one.
_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_OMPI, _MV2 = ([f"{mpi}_COMM_WORLD_{n}" for n in _NAMES] for mpi in ("OMPI", "MV2"))
_FAMILIES = {
  "openmpi": [*_OMPI, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
  "mvapich": _MV2,
  "pals": ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"],
  "hydra": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "I_MPI_HYDRA_UUID"],
}
_SCHEDULERS_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def detect(env: Env) -> Launch | None:
  """Identify this process under mpirun; None if no MPI has started it.

  On several nodes the host of process 0 is still unknown; see `with_host_of_rank_0`.
  """
  for kind, variables in _FAMILIES.items():
    rank, size, local_rank, local_size = (number(env, name) for name in variables[:4])
    if rank is None or size is None:
      continue
    # `srun --mpi=pmi2`, Cray and Flux also set PMI_RANK, but have better variables.
    by_scheduler = {"SLURM_STEP_NODELIST", "FLUX_TASK_RANK"} & env.keys()
    if kind == "hydra" and by_scheduler and "MPI_LOCALRANKID" not in env:
      continue
    if not rank < size:
      of_rank, of_size = variables[:2]
      raise ConfigError(f"{of_rank}={rank}, {of_size}={size}: give a rank less than the size")
    if local_rank is None or local_size is None:  # the names in Cray MPICH's PMI
      local_rank = number(env, "PMI_LOCAL_RANK")
      local_size = number(env, "PMI_LOCAL_SIZE")
    batch_job = schedulers.current_job(env)
    restarts = batch_job.restarts if batch_job else 0
    # A name of this mpirun; for MPICH, which sets none, the scheduler's job or the size.
    names = (*variables[4:], "PMI_JOBID", *_SCHEDULERS_JOB)
    name = next((env[n] for n in names if env.get(n)), f"{env.get('USER', '')}{size}")
    job = f"{kind}-{name}" + (f"-r{restarts}" if restarts else "")
    at = LOOPBACK if local_size == size > 1 else None
    return Launch(kind, rank, size, at, local_rank, local_size, job, restarts)
  return None


def with_host_of_rank_0(env: Env, launch: Launch) -> Launch:
  """Add the host of rank 0 to a launch on several nodes.

  Raises:
    ConfigError: neither MPI nor a scheduler's list has the host.
  """
  if name := ask_mpi4py(launch):
    return launch._replace(host=name)
  if hosts := schedulers.ask(lambda scheduler: scheduler.hosts(env)):
    name = hosts[0]
  elif file := env.get("PBS_NODEFILE"):
    name = next(iter(readable_text(Path(file)).split()), None)
  if name:
    note = f"MPI's rank 0 is assumed to run on {name}, the first host of the job"
    return launch._replace(host=name, note=note)
  starter = "Flux (`flux hostlist` has its hosts)" if launch.kind == "flux" else "mpirun"
  problem = f"not set, and {starter} does not report the host of rank 0"
  fix = "set it to host:port of that host, or install mpi4py"
  raise ConfigError(f"JAXSCALE_COORDINATOR: {problem}; {fix}")


def ask_mpi4py(launch: Launch) -> str | None:
  """Return the host name of rank 0 by a broadcast; None if mpi4py is not installed.

  This initializes MPI and, unless MPI was already initialized, finalizes it at once. A
  process that exits by `os._exit` would otherwise make mpirun fail.

  Raises:
    ConfigError: mpi4py was built for a different MPI than the mpirun of this run.
  """
  # Imported by name, since mpi4py is an optional package.
  try:
    importlib.import_module("mpi4py").rc.initialize = False
    MPI = importlib.import_module("mpi4py.MPI")
  except (ImportError, RuntimeError):  # not installed, or without an MPI library
    return None
  if ours := not MPI.Is_initialized():
    MPI.Init()
  world = MPI.COMM_WORLD
  size = world.Get_size()
  host = socket.gethostname() if world.Get_rank() == 0 else None
  host = world.bcast(host, root=0)
  if ours:
    MPI.Finalize()
  if size != launch.num_processes:
    problem = "it was built for a different MPI than this mpirun"
    fix = "set JAXSCALE_COORDINATOR=host:port instead"
    raise ConfigError(f"mpi4py sees {size} of {launch.num_processes} processes: {problem}; {fix}")
  return host
