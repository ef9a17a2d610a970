"""Starts on which JAX's own detection is wrong; ours is right by test_detect.py.

Each is a trap that a recorded or reported start walks into: `jax` is what
`jax.distributed.initialize()` would use. When a newer JAX gets one right, its test
fails here and can go.
"""

import contextlib
import os

import pytest
from jax._src import clusters

from support.launches import MPI, STARTS, STEP, found, tasks
from support.tables import table, words

START = {path.stem: path for path in STARTS}


def jax_says(env, monkeypatch):
  """Host, count, rank and devices by JAX: `initialize()` up to its first socket."""
  for name in list(os.environ):
    if name.startswith(("SLURM", "OMPI", "PMI", "JAX_", "KUBERNETES", "TPU")):
      monkeypatch.delenv(name)
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  detected = clusters.ClusterEnv.auto_detect_unset_distributed_params
  address, count, index, devices = detected(None, None, None, None, None, 1)
  return address and address.rsplit(":", 1), count, index, devices


HOSTS = table("""
n[7] | n7] | 127.0.0.1
rack[1-2]n[1-4] | rack1 | rack1n1
x1000c[0-1]s[0-7]b0n0 | x1000c0 | x1000c0s0b0n0
node[1-2]-ib | node1 | node1-ib
""")


@pytest.mark.parametrize("nodes, wrong, right", HOSTS)
def test_names_of_hosts(nodes, wrong, right, monkeypatch):
  env = STEP | {"SLURM_STEP_NODELIST": nodes}
  assert jax_says(env, monkeypatch)[0][0] == wrong
  assert found(env).host == right


def test_two_steps_of_a_job_share_a_port(monkeypatch):
  other = STEP | {"SLURM_STEP_ID": "4"}
  far = STEP | {"SLURM_JOB_ID": str(17 + 4096)}
  again = STEP | {"SLURM_RESTART_COUNT": "1"}
  assert len({jax_says(env, monkeypatch)[0][1] for env in (STEP, other, far)}) == 1
  assert len({found(env).job for env in (STEP, other, far, again)}) == 4


# It finds nothing where there is a mistake, waits for processes that nobody has started,
# takes another host or the ranks of mpirun's daemons.
MISUNDERSTOOD = words("""
  sbatch_body sbatch_from_a_step interactive_step arbitrary jax_30073_ssh_into_the_job
  openmpi_5 mpich_in_slurm
""")


@pytest.mark.parametrize("name", MISUNDERSTOOD)
def test_what_jax_misunderstands(name, tmp_path, monkeypatch):
  answers, known = [], []
  for env, task in tasks(START[name], tmp_path):
    launch = task.get("launch", {"host": "error"})
    known.append([launch.get(key) for key in ("host", "num_processes", "process_id")])
    with contextlib.suppress(RuntimeError):  # jax 0.12 asks for mpi4py
      address, *numbers = jax_says(env, monkeypatch)[:3]
      answers.append([address and address[0], *numbers])
  assert answers != known


# Processes that share GPUs, or leave some unused, or take what is not there.
GPUS = words("""
  gpus_per_task_1 gpus_per_task_2 gpus_per_node_one_process gpus_two_tasks_four gpu_bind_single
  gpu_bind_map gpus_shared_on_purpose jax_16788_one_process_eight_gpus
  jax_28194_gpus_per_task_cgroup gpus_by_a_wrapper lumi_one_process_a_node
  gpus_oversubscribed jax_29669_perlmutter_oversubscribed
""")


@pytest.mark.parametrize("name", GPUS)
def test_whose_gpu_is_whose(name, tmp_path, monkeypatch):
  starts = [*tasks(START[name], tmp_path)]
  by_jax = [jax_says(env, monkeypatch)[3] for env, _ in starts]
  assert by_jax != [task.get("devices") for _, task in starts]


def test_open_mpi_4_does_not_take_mpiruns_host(monkeypatch):
  assert jax_says(MPI, monkeypatch)[0][0] == "10.0.0.250"
  assert found(MPI, ask_mpi=lambda launch: "n1").host == "n1"
