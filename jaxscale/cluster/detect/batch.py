"""Launch detection in jobs of Flux, PBS and other schedulers.

Flux gives each task a number, flux-environment(7), but not the host of task 0. The other
schedulers start only the script, and mpirun starts the ranks (mpi.py).
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cluster.launch import LOOPBACK, Env, Launch, number
from jaxscale.files import readable_text

# For the variable of a job's ID: the scheduler, the variable of the host file, and the
# command that starts a process per host.
_SCHEDULERS = {
  "FLUX_JOB_ID": ("Flux", "", "`flux run`"),
  "PBS_JOBID": ("PBS", "PBS_NODEFILE", "mpiexec"),
  "LSB_JOBID": ("LSF", "LSB_DJOB_HOSTFILE", "mpirun"),
  "COBALT_JOBID": ("Cobalt", "COBALT_NODEFILE", "mpirun"),
  "OAR_JOB_ID": ("OAR", "OAR_NODEFILE", "mpirun"),
  "JOB_ID": ("Grid Engine", "PE_HOSTFILE", "mpirun"),
}


def detect_flux(env: Env) -> Launch | None:
  """Identify this task of `flux run`; on several nodes the host of task 0 is unknown."""
  rank, size = number(env, "FLUX_TASK_RANK"), number(env, "FLUX_JOB_SIZE")
  if rank is None or size is None:
    return None
  is_one_node = number(env, "FLUX_JOB_NNODES") == 1
  local = (number(env, "FLUX_TASK_LOCAL_ID"), size) if is_one_node else (None, None)
  first = LOOPBACK if is_one_node and size > 1 else None
  return Launch("flux", rank, size, first, *local, f"flux-{env.get('FLUX_JOB_ID')}")


def detect_script(env: Env) -> Launch | None:
  """Return one process with a note if its job has several hosts; else None."""
  for variable, (name, file, starter) in _SCHEDULERS.items():
    if not (job := env.get(variable)):
      continue
    lines = readable_text(Path(env[file])).splitlines() if env.get(file) else []
    hosts = len({line.split()[0] for line in lines if line.strip()})
    hosts = hosts or number(env, "FLUX_JOB_NNODES") or 1
    if hosts > 1:
      note = f"{name} job {job} has {hosts} hosts, but no launcher started this process:"
      note += f" runs as one process; start it with {starter}, or set JAXSCALE_PROCESS_ID"
      return Launch("single", local_id=0, local_size=1, note=note)
  return None
