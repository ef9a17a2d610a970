"""Numbers of processes that `jaxscale train` starts, and how they find each other."""

import os
import sys

import pytest

from jaxscale import cli
from jaxscale.cluster import local_launch
from jaxscale.cluster.detect import Launch, detect, local_device_ids
from jaxscale.cluster.local_launch import choose_count, variables
from jaxscale.jobs import job_handle
from support.errors import config_error

EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
MPI = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
MPI |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
CASES = [
  (None, {}, 1),
  (None, EIGHT, 8),
  (None, EIGHT | {"JAX_PLATFORMS": "cpu"}, 1),
  (None, EIGHT | {"JAX_PLATFORMS": "cpu,cuda"}, 1),
  (None, {"CUDA_VISIBLE_DEVICES": "3"}, 1),
  (None, EIGHT | {"JAXSCALE_NUM_PROCESSES": "1"}, 1),
  (None, EIGHT | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, 1),
  # A launcher has started this process: alone, or as one of several.
  (None, EIGHT | SLURM, 1),
  (None, EIGHT | MPI, 1),
  (None, EIGHT | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, 1),
  (None, EIGHT | POD, 8),
  (None, EIGHT | POD | {"JOB_COMPLETION_INDEX": "0"}, 1),
  (None, EIGHT | variables(2)[0], 1),
  (2, {}, 2),
  (2, EIGHT, 2),
  (1, EIGHT, 1),
  (8, EIGHT | SLURM, 8),
  (2, variables(2)[1], 1),
]


@pytest.mark.parametrize("asked, env, count", CASES)
def test_counts(asked, env, count, monkeypatch):
  monkeypatch.setattr(local_launch, "has_gpu_plugin", lambda: True)
  assert choose_count(asked, env) == count


def test_gpus_that_jax_cannot_use_do_not_count(monkeypatch):
  monkeypatch.setattr(local_launch, "has_gpu_plugin", lambda: False)
  assert choose_count(None, EIGHT) == 1


@pytest.mark.parametrize(
  "asked, env, line",
  [
    (4, MPI, "--processes-per-node=4 but openmpi has started this process as one of several"),
    (3, EIGHT, "3 processes on this node cannot share 8 GPUs evenly: start 1 or 2 or 4 or 8"),
    (9, EIGHT, "8 GPUs: start one process per GPU (--processes-per-node=8)"),
  ],
)
def test_counts_that_cannot_be(asked, env, line, monkeypatch):
  monkeypatch.setattr(local_launch, "has_gpu_plugin", lambda: True)
  with config_error(line):
    choose_count(asked, env)


def test_each_process_has_its_gpus(monkeypatch):
  """Also in a Slurm task that sees fewer GPUs than the node has: they are of all its processes."""
  slurm = SLURM | {"SLURM_GPUS_ON_NODE": "8"}
  for rank, own in enumerate(variables(2)):
    launch = detect(slurm | own)
    assert launch == Launch("local", rank, 2, "127.0.0.1", rank, 2, job="local")
    assert local_device_ids(slurm | own, 4, launch) == [[0, 1], [2, 3]][rank]


def test_a_start_has_its_own_secret_and_one_process_none():
  first, second = (variables(2)[0]["JAXSCALE_SECRET"] for _ in range(2))
  assert first != second and len(first) == 64
  assert variables(1) == [{"JAXSCALE_NUM_PROCESSES": "1"}]
  assert detect(variables(1)[0] | {"JAXSCALE_NUM_PROCESSES": "1"}).kind == "single"


def test_a_process_whose_launcher_has_ended_ends(monkeypatch):
  killed = []
  monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
  monkeypatch.setattr(local_launch.ctypes, "CDLL", lambda _: local_launch.ctypes)
  monkeypatch.setattr(local_launch.ctypes, "prctl", lambda *_: 0, raising=False)
  local_launch.end_with_launcher({})
  local_launch.end_with_launcher({"JAXSCALE_LAUNCHER_PID": str(os.getppid())})
  assert not killed
  local_launch.end_with_launcher({"JAXSCALE_LAUNCHER_PID": "1234567"})
  assert killed == [(os.getpid(), 15)]


@pytest.mark.parametrize("options, count", [({}, 8), ({"nodes": 2}, 2), ({"tasks_per_node": 1}, 1)])
def test_the_local_executor_counts_gpus(options, count, monkeypatch, tmp_path):
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EIGHT["CUDA_VISIBLE_DEVICES"])
  monkeypatch.setattr(local_launch, "has_gpu_plugin", lambda: True)
  options |= {"executor": "local", "runs": str(tmp_path)}
  made = job_handle.prepare("configs/digits.py", **options)
  assert made.spec.processes == count


@pytest.mark.parametrize("program, is_safe", [("jaxscale", True), ("python -m jaxscale", False)])
def test_processes_import_from_the_current_folder_no_more_than_their_parent(
  program, is_safe, monkeypatch
):
  """A numpy.py there may be of another user; `python -m jaxscale` may be of a source tree."""
  started = []
  monkeypatch.setattr(local_launch, "run", lambda command, count: started.append(command))
  words = ["train", "--config", "configs/digits.py", "--processes-per-node=2"]
  assert cli.main(words, program=program) == 0
  (command,) = started
  is_safe |= sys.flags.safe_path
  assert command == [sys.executable, *["-P"] * is_safe, "-m", "jaxscale", *words]
