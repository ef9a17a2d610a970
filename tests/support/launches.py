"""Recorded environments of tasks, as launchers set them."""

import contextlib
import json
from unittest import mock

from jaxscale.cluster.detect import detect
from jaxscale.cluster.schedulers import nodelist
from support.paths import DATA

STARTS = sorted((DATA / "cluster").glob("*.json"))
SUBDOMAIN = "jaxpods.default.svc.cluster.local"


# What a detector asks of this machine, by the name of the question in tests.
QUESTIONS = {
  "expand": "jaxscale.cluster.schedulers.slurm.hostnames",
  "fqdn": "jaxscale.cluster.detect.pods.socket.getfqdn",
  "at_terminal": "jaxscale.cluster.schedulers.slurm.os.isatty",
  "ask_mpi": "jaxscale.cluster.detect.mpi.ask_mpi4py",
  "has_tpu": "jaxscale.cluster.detect.pods.on_cloud_tpu",
}


def found(env, **asked):
  """Call `detect` without a look at this machine."""
  fqdn = f"{env.get('HOSTNAME')}.{SUBDOMAIN}"
  quiet = dict(fqdn=lambda: fqdn, has_tpu=lambda env: False, at_terminal=lambda _: False)
  usual = dict(expand=nodelist.expand, ask_mpi=lambda launch: None)
  with contextlib.ExitStack() as stack:
    for name, answer in {**quiet, **usual, **asked}.items():
      stack.enter_context(mock.patch(QUESTIONS[name], answer))
    return detect(env)


def tasks(path, tmp_path):
  """Return the environments of a start, with the expected results."""
  start = json.loads(path.read_text())
  for name, text in start.get("files", {}).items():
    (tmp_path / name).write_text(text)
  for task in start["tasks"]:
    env = start["env"] | task["env"]
    yield {k: v.replace("{files}", str(tmp_path)) for k, v in env.items()}, task


def variables(text):
  """Return an environment from words `NAME=value`."""
  return dict(word.split("=", 1) for word in text.split())


STEP = variables("""
  SLURM_JOB_ID=17 SLURM_STEP_ID=3 SLURM_STEP_NODELIST=n[3-4] SLURM_NTASKS=4 SLURM_NODEID=1
  SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=2 SLURM_LOCALID=0
  SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_TASKS_PER_NODE=2(x2)
""")
# mpirun ran on the login node: JAX would take the last one for the host of rank 0.
MPI = variables("""
  OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4
  OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
  OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.0.0.250:34911
""")
