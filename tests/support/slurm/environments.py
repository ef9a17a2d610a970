"""The environments that Slurm really gives to tasks, as JSON files.

`PYTHONPATH=tests python -m support.slurm.environments` starts clusters and writes
tests/data/cluster/recorded/, one file per kind of launch: the command and, in rank
order, each task's host and variables (all of Slurm's, and those by which it says which
GPUs are a task's). Ids, ports and paths are replaced, so that two recordings agree.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from support.paths import DATA, ROOT
from support.slurm.cluster import SlurmCluster

RECORDED = DATA / "cluster" / "recorded"

# What a task runs: it writes what it sees to the file of its step and rank.
_TASK = """
import json, os, pathlib, socket, sys
names = "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES"
env = {k: v for k, v in os.environ.items() if k.startswith("SLURM") or k in names}
seen = {"host": socket.gethostname(), "env": env}
rank = int(env.get("SLURM_PROCID", 0))
task = env.get("SLURM_ARRAY_TASK_ID", "0")
name = f"{sys.argv[1]}-{int(task):03}-{rank:03}-{os.getpid()}"
pathlib.Path(os.environ["RECORD_TO"], name).write_text(json.dumps(seen))
"""

# name: (what a user types, "srun …", "salloc …", or "sbatch OPTIONS / BODY").
# SEEN is the task above; SEEN_a and SEEN_b are two different ones.
CPU = {
  "srun_2_nodes_4_tasks": "srun -N2 -n4 SEEN",
  "srun_1_task": "srun -n1 SEEN",
  "srun_1_task_per_node": "srun -N4 --ntasks-per-node=1 SEEN",
  "srun_2_tasks_per_node": "srun -N2 --ntasks-per-node=2 SEEN",
  "srun_uneven": "srun -N3 -n4 SEEN",
  "srun_cyclic": "srun -N2 -n4 --distribution=cyclic SEEN",
  "srun_gap_in_nodes": "srun -N2 -n2 --nodelist=n2,n4 SEEN",
  "srun_cpus_per_task": "srun -N2 -n2 -c2 SEEN",
  "srun_nested": "srun -N2 -n2 --overcommit sh -c"
  " '[ $SLURM_PROCID = 1 ] || srun --overlap -N2 -n4 -O SEEN'",
  "sbatch_body": "sbatch -N2 --ntasks-per-node=2 / SEEN",
  "sbatch_body_without_counts": "sbatch / SEEN",
  "sbatch_srun": "sbatch -N2 --ntasks-per-node=2 / srun SEEN",
  "sbatch_smaller_step": "sbatch -N4 -n8 / srun -N2 -n2 --relative=2 SEEN",
  "sbatch_two_steps": "sbatch -N2 -n4 / srun --overlap -N2 -n2 SEEN_a &"
  " srun --overlap -N2 -n2 SEEN_b & wait",
  "sbatch_array": "sbatch --array=3-5:2 -N2 / srun -N2 -n2 SEEN",
  "sbatch_requeued": "sbatch -N2 --requeue / if [ -z $SLURM_RESTART_COUNT ]; then"
  " scontrol requeue $SLURM_JOB_ID; sleep 60; fi; srun -N2 -n2 SEEN",
  "sbatch_heterogeneous": "sbatch -N1 -n1 : -N2 -n2 / srun SEEN_a : SEEN_b",
  "salloc_shell": "salloc -N2 -n4 SEEN",
  "salloc_srun": "salloc -N2 -n4 srun SEEN",
  "ssh": "ssh n1 SEEN",
}
GPU = {
  "gpus_per_task": "srun -N2 -n4 --ntasks-per-node=2 --gpus-per-task=1 SEEN",
  "gpus_per_task_2": "srun -N2 -n4 --ntasks-per-node=2 --gpus-per-task=2 SEEN",
  "gpus_per_task_unbound": "srun -N2 -n4 --ntasks-per-node=2 --gpus-per-task=1"
  " --gpu-bind=none SEEN",
  "gpus_per_node": "srun -N2 -n8 --ntasks-per-node=4 --gpus-per-node=4 SEEN",
  "gpus_per_node_bound": "srun -N2 -n8 --ntasks-per-node=4 --gpus-per-node=4"
  " --gpu-bind=single:1 SEEN",
  "gpus_per_node_1_task": "srun -N2 -n2 --gpus-per-node=4 SEEN",
  "gpus_part_of_node": "sbatch -N1 -n2 --gpus=2 / srun --exact -n1 --gpus=1 SEEN_a &"
  " srun --exact -n1 --gpus=1 SEEN_b & wait",
  "gpus_oversubscribed": "srun -N1 -n4 --gpus-per-node=2 SEEN",
  "gpus_by_gres": "srun -N2 -n4 --ntasks-per-node=2 --gres=gpu:2 SEEN",
  "gpus_uneven": "srun -N2 -n3 --gpus=3 --gpus-per-task=1 --ntasks-per-node=2 SEEN",
  "gpus_sbatch_srun": "sbatch -N2 --ntasks-per-node=4 --gpus-per-task=1 / srun SEEN",
  "gpus_sbatch_body": "sbatch -N1 -n1 --gpus=2 / SEEN",
}


CASES = CPU | GPU

# Of one launch each time, and nothing to be found out from: what stands for them.
_OF_A_RUN = {
  "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.10",
  "SLURM_PRIO_PROCESS": "0",  # the nice value of whoever submits, sbatch(1)
  "SLURM_SRUN_COMM_HOST": "10.0.0.10",
  "SLURM_SRUN_COMM_PORT": "40001",
  "SLURM_STEP_LAUNCHER_PORT": "40001",
  "SLURM_TASK_PID": "1234",
  "SLURM_WORKING_CLUSTER": "tests:10.0.0.10:6817:9728:109",
}


def _launch(slurm: SlurmCluster, case: str, to: Path) -> None:
  """Run a command of the tables, to the end of its job."""
  script = slurm.folder / "task.py"
  script.write_text(_TASK)

  def told(match: re.Match[str]) -> str:
    return f"{sys.executable} {script} {match[0]}"

  command = re.sub(r"SEEN\w*", told, CASES[case])
  if command.startswith("ssh n1 "):
    slurm.run(*shlex.split(command)[2:], host="n1", RECORD_TO=str(to))
  elif command.startswith("sbatch "):
    options, body = command.removeprefix("sbatch ").split("/ ", 1)
    job = slurm.submit(body, *options.split(), RECORD_TO=str(to))
    slurm.wait_for(job, "COMPLETED")  # of an array this is the last task
  else:
    slurm.run(*shlex.split(command), RECORD_TO=str(to))


def _plain(env: dict[str, str], folder: Path) -> dict[str, str]:
  """An environment without what is of this machine or of one run."""
  env = {k: v for k, v in env.items() if k != "SLURM_CONF"}  # that is the fixture's
  env |= {k: v for k, v in _OF_A_RUN.items() if k in env}
  paths = {str(ROOT): "/home/ada/jaxscale", str(folder): "/home/ada/jobs"}
  for real, plain in paths.items():
    env = {k: v.replace(real, plain) for k, v in env.items()}
  # The script's own name has the time in it.
  env = {k: re.sub(r"\b\d{10,}\.sh", "job.sh", v) for k, v in env.items()}
  return dict(sorted(env.items()))


def record(case: str) -> dict[str, Any]:
  """Run a launch of the tables on a fresh cluster: what its tasks saw."""
  gpus = case in GPU
  with SlurmCluster(4, 4 if gpus else 2, 4 * gpus, extra="FirstJobId=4242") as slurm:
    to = slurm.folder / "seen"
    to.mkdir()
    _launch(slurm, case, to)
    files = sorted(to.iterdir())
    seen = [json.loads(p.read_text()) for p in files]
    tasks = [{"host": task["host"], "env": _plain(task["env"], slurm.folder)} for task in seen]
    version = slurm.run("srun", "--version").stdout.split()[-1]
  for task, path in zip(tasks, files, strict=True):
    if "_" in path.name:  # one of two steps
      task["step"] = path.name.split("-")[0].removeprefix("SEEN_")
  return {"slurm": version, "command": CASES[case], "tasks": tasks}


if __name__ == "__main__":
  RECORDED.mkdir(parents=True, exist_ok=True)
  for _case in sys.argv[1:] or CASES:
    (RECORDED / f"{_case}.json").write_text(json.dumps(record(_case), indent=1) + "\n")
    print(_case)
