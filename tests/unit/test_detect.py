"""Detection in environments recorded on a real Slurm, under real MPIs, or documented.

tests/data/cluster/*.json has one start each: how it was obtained, the variables of its
tasks, and what must come out. Where it was recorded, ranks, hosts and who shares a
node were taken from where the tasks ran (SLURMD_NODENAME), not from what we read.
"""

import importlib.machinery
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.cluster.detect import LAUNCHERS, Launch, mpi
from jaxscale.cluster.detect.local_devices import local_device_ids, visible_gpus
from jaxscale.cluster.launch import number
from jaxscale.cluster.schedulers import slurm
from jaxscale.errors import ConfigError
from support.errors import config_error
from support.launches import MPI, STARTS, STEP, found, tasks
from support.tables import assignments, columns, table


@pytest.mark.parametrize("path", STARTS, ids=lambda p: p.stem)
def test_every_start_is_understood(path, tmp_path):
  for env, task in tasks(path, tmp_path):
    if "error" in task:
      with config_error(task["error"]):
        found(env)
      continue
    launch = found(env)
    assert {k: getattr(launch, k) for k in task["launch"]} == task["launch"]
    assert launch.note.startswith(task.get("note", "")), launch.note
    assert bool(launch.note) == ("note" in task), launch.note


@pytest.mark.parametrize("path", STARTS, ids=lambda p: p.stem)
def test_every_process_has_its_gpus(path, tmp_path):
  for env, task in tasks(path, tmp_path):
    if "error" in task:
      continue
    visible = visible_gpus(env, device_root=str(tmp_path))  # no device files
    if "devices_error" in task:
      with pytest.raises(ConfigError, match=task["devices_error"]):
        local_device_ids(env, visible, found(env))
    else:
      assert local_device_ids(env, visible, found(env)) == task["devices"]


EXPLICIT = assignments(
  "JAXSCALE_COORDINATOR=n1:7000 JAXSCALE_NUM_PROCESSES=4 JAXSCALE_PROCESS_ID=2"
)


def test_the_user_overrules_the_launcher():
  body = {k: STEP[k] for k in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS")}
  launch = found(body | EXPLICIT)
  assert launch[:4] == ("explicit", 2, 4, "n1") and launch.port == 7000
  assert launch.local_id is None
  # Ranks copied from Slurm: who shares the node is still known.
  assert found(STEP | EXPLICIT)[4:6] == (0, 2)
  assert found(STEP | EXPLICIT | {"JAXSCALE_PROCESS_ID": "1"})[4:6] == (None, None)
  alone = found(body | {"JAXSCALE_NUM_PROCESSES": "1"})
  assert alone[:4] == ("single", 0, 1, None)
  moved = found(STEP | {"JAXSCALE_COORDINATOR": "[fe80::1]:7000"})
  assert moved[:4] == ("slurm", 2, 4, "fe80::1") and moved.port == 7000


def test_a_step_has_its_own_number_of_tasks():
  assert found(STEP | {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8"})[1:3] == (2, 4)
  old = {k: v for k, v in STEP.items() if "STEP_NUM" not in k and "TASKS_PER" not in k}
  assert found(old)[1:6] == (2, 4, "n3", 0, None)
  assert found(old | {"SLURM_NTASKS_PER_NODE": "2"}).local_size == 2


def test_the_name_of_a_run_can_be_given():
  for env in (EXPLICIT, STEP, {}, {"KUBERNETES_SERVICE_HOST": "x"}):
    assert found(env | {"JAXSCALE_JOB": "tuesday"}).job == "tuesday"


CONTRADICTIONS = table(r"""
JAXSCALE_PROCESS_ID=0 | JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES: not
EXPLICIT JAXSCALE_PROCESS_ID=4 | JAXSCALE_PROCESS_ID=4, .*: give an ID from 0 to
EXPLICIT JAXSCALE_PROCESS_ID=² | give an ID from 0 to
EXPLICIT JAXSCALE_COORDINATOR=n1 | JAXSCALE_COORDINATOR=n1: give host
EXPLICIT JAXSCALE_COORDINATOR=n1:0 | give host:port
EXPLICIT JAXSCALE_COORDINATOR=n1:99999 | give host:port
STEP JAXSCALE_NUM_PROCESSES=8 | JAXSCALE_NUM_PROCESSES=8: slurm has set 4
STEP JAXSCALE_PROCESS_ID=0 | JAXSCALE_PROCESS_ID=0: slurm has set 2
STEP SLURM_PROCID=x | SLURM_PROCID=x: not a whole number; correct or unset it
STEP SLURM_PROCID=4 | SLURM_PROCID=4 of SLURM_STEP_NUM_TASKS=4
STEP SLURM_STEP_NODELIST=n[3- | node list 'n\[3-'
STEP SLURM_TASKS_PER_NODE=2(y2) | tasks per node '2\(y2\)' are invalid; write them as in
STEP SLURM_DISTRIBUTION=arbitrary SLURM_HOSTFILE=/no | =/no does not have the host of rank 0; set
OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4 | OMPI_COMM_WORLD_RANK=4, OMPI_COMM_WORLD_SIZE=4
RANK=2 WORLD_SIZE=2 | RANK=2 is not less than WORLD_SIZE=2; start it
TPU_WORKER_ID=2 TPU_WORKER_HOSTNAMES=a,b | TPU_WORKER_ID=2: out of range, since .* lists 2 hosts
""")


@pytest.mark.parametrize("env, error", CONTRADICTIONS)
def test_what_contradicts_itself_is_one_line(env, error):
  start = {"EXPLICIT": EXPLICIT, "STEP": STEP}.get(env.split()[0], {})
  changes = assignments(env.removeprefix("EXPLICIT").removeprefix("STEP"))
  with config_error(match=error):
    found(start | changes)


def test_mpi_over_nodes_asks_mpi():
  asked, env = [], MPI | {"SLURM_JOB_ID": "7"}
  launch = found(env, ask_mpi=lambda launch: asked.append(launch) or "n9")
  assert launch[:6] == ("openmpi", 3, 4, "n9", 1, 2) and len(asked) == 1
  with pytest.raises(ConfigError, match="mpirun does not report the host of rank 0"):
    found(MPI)
  again = found(env | {"SLURM_RESTART_COUNT": "2"}, ask_mpi=lambda launch: "n9")
  assert again.restarts == 2 and again.job == f"{launch.job}-r2"
  told = found(MPI | {"JAXSCALE_COORDINATOR": "n2:99"}, ask_mpi=asked.append)
  assert (told.host, told.port, len(asked)) == ("n2", 99, 1)


def world(size, rank, initialized):
  """Return a fake MPI with so many ranks, and a record of the calls to it."""

  def bcast(host, root):
    assert root == 0 and (host is None) == (rank != 0)
    log.append("bcast")
    return "n9"

  log = []
  comm = types.SimpleNamespace(Get_size=lambda: size, Get_rank=lambda: rank, bcast=bcast)
  calls = dict(Init=lambda: log.append("init"), Finalize=lambda: log.append("finalize"))
  calls["Is_initialized"] = lambda: initialized
  return types.SimpleNamespace(COMM_WORLD=comm, log=log, **calls)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("initialized", [True, False])
def test_mpi4py_is_asked_and_left(rank, initialized, monkeypatch):
  package, mpi4py = types.ModuleType("mpi4py"), world(4, rank, initialized)
  package.rc = types.SimpleNamespace()
  package.__spec__ = importlib.machinery.ModuleSpec("mpi4py", None)
  monkeypatch.setitem(sys.modules, "mpi4py", package)
  monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi4py)
  assert mpi.ask_mpi4py(Launch("openmpi", rank, 4)) == "n9"
  assert mpi4py.log == (["bcast"] if initialized else ["init", "bcast", "finalize"])
  with pytest.raises(ConfigError, match="mpi4py sees 4 of 8 processes"):
    mpi.ask_mpi4py(Launch("openmpi", rank, 8))


def test_slurm_knows_addresses_that_no_resolver_knows(scontrol, tmp_path, monkeypatch):
  scontrol('echo "NodeName=$4 CPUTot=4 NodeAddr=10.0.0.7 NodeHostName=x Version=22.05.8"')
  assert slurm.node_address(STEP, "n1") == "10.0.0.7"
  scontrol("echo no such node >&2; exit 1")
  assert slurm.node_address(STEP, "n1") is None
  monkeypatch.setenv("PATH", str(tmp_path))
  assert slurm.node_address(STEP, "n1") is None


def test_a_pod_without_a_subdomain_cannot_be_found():
  env = assignments("KUBERNETES_SERVICE_HOST=x JOB_COMPLETION_INDEX=1 HOSTNAME=train-1")
  env |= {"JAXSCALE_NUM_PROCESSES": "2"}
  with pytest.raises(ConfigError, match="a headless service"):
    found(env, fqdn=lambda: "train-1")
  with pytest.raises(ConfigError, match="JAXSCALE_NUM_PROCESSES=2: this is pod 2"):
    found(env | {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"})


def test_without_variables_a_process_is_one_and_a_tpu_vm_left_to_jax():
  assert found({}, has_tpu=lambda env: False)[:3] == ("single", 0, 1)
  assert found({}, has_tpu=lambda env: True)[:4] == ("tpu", 0, 0, None)


def test_the_shell_of_srun_pty_gets_advice(tmp_path):
  (start,) = (p for p in STARTS if p.stem == "srun_pty_shell")
  ((env, _),) = tasks(start, tmp_path)
  note = found(env, at_terminal=lambda _: True).note
  assert note.startswith("started by srun --pty") and "NUM_PROCESSES=1" in note


def test_a_launcher_of_another_kind_is_one_function(monkeypatch):
  def lsf(env):
    rank, count = (number(env, f"JSM_NAMESPACE_{n}") for n in ("RANK", "SIZE"))
    if rank is None or count is None:
      return None
    first = env["LSB_MCPU_HOSTS"].split()[0]
    return Launch("lsf", rank, count, first, job=f"lsf-{env['LSB_JOBID']}")

  monkeypatch.setattr("jaxscale.cluster.detect.LAUNCHERS", (*LAUNCHERS, lsf))
  env = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "LSB_JOBID": "9"}
  launch = found(env | {"LSB_MCPU_HOSTS": "batch 1 n1 42"})
  assert launch[:4] == ("lsf", 1, 2, "batch") and launch.job == "lsf-9"
  assert found({})[:3] == ("single", 0, 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_tasks_per_node_come_back(counts):
  short, last = [], None
  for n in counts:
    if short and last == n:
      short[-1][1] += 1
    else:
      short.append([n, 1])
    last = n
  text = ",".join(f"{n}(x{k})" if k > 1 else str(n) for n, k in short)
  assert slurm.tasks_per_node(text) == counts


def launch(index, count):
  return Launch("slurm", index, 8, "n1", index, count)


SHARES = [(8, 8, 1), (8, 2, 4), (6, 3, 2), (1, 1, 1)]


@pytest.mark.parametrize("visible, count, each", SHARES)
def test_gpus_are_shared_out(visible, count, each):
  for i in range(count):
    ids = [*range(i * each, (i + 1) * each)]
    assert local_device_ids({}, visible, launch(i, count)) == ids


UNSHARED = columns(int, int, str)("""
1 | 2 | 2 processes on this node, but 1 GPU: start one process per GPU
4 | 8 | 8 processes on this node, but 4 GPUs: .*--ntasks-per-node=4
4 | 3 | 3 processes on this node cannot share 4 GPUs evenly: start 1 or 2 or 4
""")


@pytest.mark.parametrize("visible, count, error", UNSHARED)
def test_gpus_that_cannot_be_shared_out(visible, count, error):
  with pytest.raises(ConfigError, match=error):
    local_device_ids({}, visible, launch(0, count))
  on_purpose = {"JAX_LOCAL_DEVICE_IDS": "0"}
  assert local_device_ids(on_purpose, visible, launch(0, count)) == [0]


def test_gpus_that_are_bound_to_a_task_are_its_own():
  bound = {"SLURM_GPUS_PER_TASK": "a100:2"}
  assert local_device_ids(bound, 2, launch(1, 2)) == [0, 1]
  assert local_device_ids(bound, 4, launch(1, 2)) == [2, 3]  # --gpu-bind=none
  shared = {"SLURM_NTASKS_PER_TRES": "2", "SLURM_GPUS_ON_NODE": "1"}
  assert local_device_ids(shared, 1, launch(1, 2)) == [0]
  assert local_device_ids({}, 2, launch(1, 2)) == [1]
  assert local_device_ids({"SLURM_GPUS_ON_NODE": "8"}, 2, launch(1, 2)) == [0, 1]


def test_chosen_gpus_must_be_there():
  for text in ("4", "x", "0,", "-1"):
    with pytest.raises(ConfigError, match=f"JAX_LOCAL_DEVICE_IDS={text}: give numbers"):
      local_device_ids({"JAX_LOCAL_DEVICE_IDS": text}, 4, launch(0, 1))
  with pytest.raises(ConfigError, match="listed twice"):
    local_device_ids({"JAX_LOCAL_DEVICE_IDS": "1,1"}, 4, launch(0, 1))
  assert local_device_ids({"JAX_LOCAL_DEVICE_IDS": "2, 0"}, 4, launch(0, 1)) == [2, 0]


VISIBLE = columns(assignments, int)("""
CUDA_VISIBLE_DEVICES=0,1,5 | 3
CUDA_VISIBLE_DEVICES= | 0
CUDA_VISIBLE_DEVICES=-1 | 0
CUDA_VISIBLE_DEVICES=0,-1,2 | 1
CUDA_VISIBLE_DEVICES=NoDevFiles | 0
CUDA_VISIBLE_DEVICES=GPU-8932f937-d72c,GPU-1b | 2
CUDA_VISIBLE_DEVICES=MIG-GPU-8932/1/0,MIG-GPU-8932/2/0 | 1
ROCR_VISIBLE_DEVICES=0,1,2,3 HIP_VISIBLE_DEVICES=1 | 1
CUDA_VISIBLE_DEVICES=0,1 JAX_PLATFORMS=cpu | 0
CUDA_VISIBLE_DEVICES=0,1 JAX_PLATFORMS=cuda,cpu | 2
 | 4
JAX_PLATFORMS=tpu | 0
""")


@pytest.mark.parametrize("env, count", VISIBLE)
def test_visible_gpus_are_counted(env, count, tmp_path):
  for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia13", "nvidiactl", "nvidia-uvm"):
    (tmp_path / name).touch()
  assert visible_gpus(env, device_root=str(tmp_path)) == count


def test_amd_gpus_are_counted(tmp_path):
  (tmp_path / "dri").mkdir()
  for name in ("card0", "renderD128", "renderD129"):
    (tmp_path / "dri" / name).touch()
  assert visible_gpus({}, device_root=str(tmp_path)) == 0  # a display, no ROCm
  (tmp_path / "kfd").touch()
  assert visible_gpus({}, device_root=str(tmp_path)) == 2


def test_cpu_and_tpu_processes_have_no_gpus():
  assert local_device_ids({}, 0, launch(3, 8)) is None
  assert local_device_ids({}, 4, Launch("tpu", 0, 4, "a")) is None
  assert local_device_ids({}, 4, Launch("explicit", 0, 2, "a")) is None
