"""Variables on which JAX's own detection is wrong and ours right.

Each is a trap that a recorded or reported start walks into: `jax` is what
`jax.distributed.initialize()` would use. When a newer JAX gets one right, its test
fails here and can go.
"""

import contextlib
import json
import os

import pytest
from jax._src import clusters

from jaxscale.cluster.detect.local_devices import local_device_ids, visible_gpus
from support.launches import MPI, STARTS, STEP, found, tasks

START = {path.stem: path for path in STARTS}


def jax_says(env, monkeypatch):
  """Host, count, rank and devices by JAX: `initialize()` up to its first socket."""
  for name in list(os.environ):
    if name.startswith(("SLURM", "OMPI", "PMI", "JAX_", "KUBERNETES", "TPU")):
      monkeypatch.delenv(name)
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
    None, None, None, None, None, 1
  )
  return address and address.rsplit(":", 1), count, index, devices


def every(name, tmp_path):
  return [env for env, _ in tasks(START[name], tmp_path)]


def own(env):
  return local_device_ids(env, visible_gpus(env, device_root="/none"), found(env))


@pytest.mark.parametrize(
  ("nodes", "wrong", "right"),
  [
    ("n[7]", "n7]", "127.0.0.1"),
    ("rack[1-2]n[1-4]", "rack1", "rack1n1"),
    ("x1000c[0-1]s[0-7]b0n0", "x1000c0", "x1000c0s0b0n0"),
    ("node[1-2]-ib", "node1", "node1-ib"),
  ],
)
def test_names_of_hosts(nodes, wrong, right, monkeypatch):
  env = STEP | {"SLURM_STEP_NODELIST": nodes}
  assert jax_says(env, monkeypatch)[0][0] == wrong
  assert found(env).host == right


def test_two_steps_of_a_job_share_a_port(monkeypatch):
  other = STEP | {"SLURM_STEP_ID": "4"}
  assert jax_says(STEP, monkeypatch)[0] == jax_says(other, monkeypatch)[0]
  far = STEP | {"SLURM_JOB_ID": str(17 + 4096)}
  assert jax_says(STEP, monkeypatch)[0] == jax_says(far, monkeypatch)[0]
  again = STEP | {"SLURM_RESTART_COUNT": "1"}
  assert len({found(env).job for env in (STEP, other, far, again)}) == 4


def test_a_batch_script_is_reported_so(tmp_path, monkeypatch):
  (env,) = every("sbatch_body", tmp_path)
  assert jax_says(env, monkeypatch) == (None, None, None, None)  # "should be defined"
  with pytest.raises(ValueError, match="start it with srun"):
    found(env)


def test_a_script_submitted_from_a_step_waits_for_nobody(tmp_path, monkeypatch):
  (env,) = every("sbatch_from_a_step", tmp_path)
  # It runs on n1; JAX would wait for three processes at n2.
  assert env["SLURMD_NODENAME"] == "n1"
  address, count, _, _ = jax_says(env, monkeypatch)
  assert (address[0], count) == ("n2", 3)
  with pytest.raises(ValueError, match="start it with srun"):
    found(env)


def test_an_interactive_step_waits_for_nobody(tmp_path, monkeypatch):
  (env,) = every("interactive_step", tmp_path)
  assert jax_says(env, monkeypatch)[1] == 2  # there is one shell
  assert found(env).num_processes == 1


def test_an_arbitrary_distribution_finds_rank_0(tmp_path, monkeypatch):
  envs = every("arbitrary", tmp_path)
  assert envs[0]["SLURM_PROCID"] == "0" and envs[0]["SLURMD_NODENAME"] == "n3"
  assert {jax_says(env, monkeypatch)[0][0] for env in envs} == {"n1"}
  assert {found(env).host for env in envs} == {"n3"}


@pytest.mark.parametrize(
  "name",
  [
    "gpus_per_task_1",
    "gpus_per_task_2",
    "gpus_per_node_one_process",
    "gpus_two_tasks_four",
    "gpu_bind_single",
    "gpu_bind_map",
    "gpus_shared_on_purpose",
    "jax_16788_one_process_eight_gpus",
    "jax_28194_gpus_per_task_cgroup",
    "gpus_by_a_wrapper",
    "lumi_one_process_a_node",
  ],
)
def test_whose_gpu_is_whose(name, tmp_path, monkeypatch):
  envs = every(name, tmp_path)
  visible = [visible_gpus(env, device_root="/none") for env in envs]
  by_jax = [jax_says(env, monkeypatch)[3] for env in envs]
  missing = any(max(ids) >= n for ids, n in zip(by_jax, visible, strict=True))
  step = json.loads(START[name].read_text())["tasks"]
  used = sum(map(len, by_jax))
  assert missing or used < sum(len(task["devices"]) for task in step)
  assert [own(env) for env in envs] == [task["devices"] for task in step]


def test_more_tasks_than_gpus_are_reported(tmp_path, monkeypatch):
  for name in ("gpus_oversubscribed", "jax_29669_perlmutter_oversubscribed"):
    env = every(name, tmp_path)[-1]
    beyond = jax_says(env, monkeypatch)[3]
    assert beyond[0] >= visible_gpus(env)  # CUDA: "invalid device ordinal"
    with pytest.raises(ValueError, match="processes on this node, but"):
      own(env)


def test_ssh_into_a_job_is_one_process(tmp_path, monkeypatch):
  """jax#30073; 0.10.2 finds nothing, and `initialize()` is an error."""
  (env,) = every("jax_30073_ssh_into_the_job", tmp_path)
  assert jax_says(env, monkeypatch)[0] is None
  assert found(env).num_processes == 1 and "a shell in Slurm job" in found(env).note


def test_open_mpi_5_is_found(tmp_path, monkeypatch):
  for env in every("openmpi_5", tmp_path):
    with contextlib.suppress(RuntimeError):  # jax 0.12 asks for mpi4py
      assert jax_says(env, monkeypatch)[0] is None
    assert found(env).kind == "openmpi"


def test_open_mpi_4_does_not_take_mpiruns_host(monkeypatch):
  assert jax_says(MPI, monkeypatch)[0][0] == "10.0.0.250"
  assert found(MPI, ask_mpi=lambda launch: "n1").host == "n1"


def test_mpich_in_a_slurm_job_is_not_slurms(tmp_path, monkeypatch):
  envs = every("mpich_in_slurm", tmp_path)
  ranks = [jax_says(env, monkeypatch)[2] for env in envs]
  assert ranks == [0, 0, 0, 1]  # those of mpirun's daemons
  assert [found(env).process_id for env in envs] == [0, 1, 2, 3]
