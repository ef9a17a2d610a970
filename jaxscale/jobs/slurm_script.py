"""The sbatch script of a run, as text: a pure function of its spec.

Its parts of bash are in `bash/`. The script does, in addition to `srun`, what Slurm
leaves to it. It outlives the signals that announce the end, so that it sees how the
tasks ended; it requeues the job where a restart helps; and it records every start and
end in the run's folder, for the time when Slurm has forgotten the job.

Signals. Without `B:` in `--signal`, Slurm signals the tasks and not this script; with
it, the script alone (sbatch(1)), which forwards the signal by `scancel --signal`, which
goes to the tasks and not to the script (scancel(1)). SIGTERM, at the time limit or from
`scancel`, goes to both, so it is caught here and not forwarded.

Spare nodes. sbatch --no-kill leaves the allocation to the script: Slurm removes a dead
node from it and ends the steps that ran there (sbatch(1)). Observed with Slurm 22.05:

- The srun of a running step returns once Slurm calls the node down, not before,
  whatever the other tasks do: SlurmdTimeout (slurm.conf(5), 300 s by default) and some
  10 s for the pings. One that cannot start its step fails within seconds, while Slurm
  still calls the node good: so the nodes are asked.
- SLURM_JOB_NODELIST and the like keep the dead node; squeue does not have it.
- What the lost step used on the other nodes is never freed ("unable to update job's
  core use information due to job resizing"): the next step waits forever without
  --overlap.
- The job does not end when the node of its script is lost, and would keep its other
  nodes until the time limit. So a task on another node checks from time to time, and
  requeues the job; and the script's node is the spare that trains last.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from jaxscale.errors import ConfigError
from jaxscale.jobs import spec as specs
from jaxscale.jobs.spec import FINAL_CODES, RESTARTED_CODES, SIGNAL_CODES, JobSpec

# What stands for exit codes in the parts of the script, as patterns of bash.
_CODES = {"FINAL": FINAL_CODES, "RESTARTED": RESTARTED_CODES, "SIGNALS": SIGNAL_CODES}

# That a container's image must not overrule.
_OWN_VARIABLES = "PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,JAXSCALE_REQUEUE,JAXSCALE_SECRET"
_SITE_OPTIONS = "mem time partition account qos constraint reservation exclude signal"


def render(spec: JobSpec) -> str:
  """The script.

  Raises:
    ConfigError: a path or option that Slurm cannot take.
  """
  for path in (spec.folder, spec.cwd):
    if re.search(r'[\\"\n]', path):
      refused = "a backslash, a double quote or a line break"
      raise ConfigError(f"{path}: Slurm takes no path with {refused}")
  parts = [_header(spec), specs.setup_script(spec), _part("secret"), _commands(spec)]
  # srun returns the highest code, which is that of the tasks that it ended by SIGTERM
  # because another one had failed before they knew of each other. It prints them all,
  # and `finish` reads them.
  parts += [_part("events"), _start(spec), *map(_part, ("may_restart", "finish", "step"))]
  # For tasks that died of a signal srun returns 128 and its number: SIGUSR1 and SIGUSR2
  # without `B:`, SIGTERM. The doctor itself exits with 2 and nothing else.
  # --kill-on-bad-exit would end the other nodes by SIGTERM, and srun returns 143 then,
  # whatever the exit code of the first one (seen with Slurm 22.05).
  parts += [_part("preflight")] if spec.preflight else []
  train = _part("spares") if spec.spares else "train\n"
  return "\n".join([*parts, _part("train"), train, "finish\n"])


def _part(name: str) -> str:
  """Return a part of the script, whose exit codes are those of `spec`."""
  text = Path(__file__).with_name("bash").joinpath(f"{name}.sh").read_text("utf-8")
  for word, codes in _CODES.items():
    text = text.replace(word, "|".join(map(str, codes)))
  return text


def _header(spec: JobSpec) -> str:
  site = spec.site
  given = {
    "job-name": spec.name,
    "nodes": spec.nodes + spec.spares,
    "ntasks-per-node": site.tasks,
    "gpus-per-node": site.gpus_per_node,
    "cpus-per-task": site.cpus_per_task,
    **{name: getattr(site, name) for name in _SITE_OPTIONS.split()},
    "array": array(spec.tasks, spec.at_most) if spec.trials else None,
    "chdir": spec.cwd,
    "output": _output(spec, "batch"),
    "open-mode": "append",
  }
  options = [f"--{name}={value}" for name, value in given.items() if value]
  options += ["--requeue" if spec.requeue else "--no-requeue"]
  options += [*(["--no-kill"] if spec.spares else []), *site.sbatch]
  # A login shell where there are modules: it is what defines `module`.
  shell = "#!/bin/bash -l" if site.modules else "#!/bin/bash"
  made_by = spec.made_by.replace("\n", " ")
  lines = [shell, f"# {spec.name}, made by {made_by}"]
  for option in options:
    if re.search(r'["\n]', option):
      raise ConfigError(f"{option}: sbatch takes no double quote or line break")
    # A double quote quotes there, and # begins a comment.
    is_plain = re.fullmatch(r"[\w=,.:/%@+\-\[\]&|*]+", option)
    lines.append(f"#SBATCH {option}" if is_plain else f'#SBATCH "{option}"')
  return "\n".join(lines) + "\n"


def array(tasks: range | list[int], at_most: int) -> str:
  """The tasks of an array and how many run at a time, as sbatch has it.

  Example:
    >>> array(range(6), 2), array([1, 4], 0)
    ('0-5%2', '1,4')
  """
  whole = isinstance(tasks, range) and len(tasks) > 1
  text = f"0-{len(tasks) - 1}" if whole else ",".join(map(str, tasks))
  return text + (f"%{at_most}" if at_most else "")


def _output(spec: JobSpec, rank: str) -> str:
  """`spec.log_file` in Slurm's patterns; a restarted job appends to its files."""
  folder = spec.folder.replace("%", "%%")
  return f"{folder}/logs/{'%A_%a' if spec.trials else '%j'}.{rank}.out"


def _commands(spec: JobSpec) -> str:
  """Arrays of bash, whose words are never split or quoted again."""
  site = spec.site
  srun = ["srun", "--kill-on-bad-exit=1"]
  if site.cpus_per_task:  # srun no longer takes it from the job: Slurm 22.05
    srun.append(f"--cpus-per-task={site.cpus_per_task}")
  srun += site.srun
  if site.container and site.container.kind == "pyxis":
    mounts = [m if ":" in m else f"{m}:{m}" for m in specs.container_mounts(spec)]
    srun += [
      f"--container-image={site.container.image}",
      f"--container-mounts={','.join(mounts)}",
      f"--container-workdir={spec.cwd}",
      f"--container-env={_OWN_VARIABLES}",
      *site.container.options,
    ]
  arrays = {
    "srun": srun,
    "files": [f"--output={_output(spec, '%t')}", "--open-mode=append"],
    "python": specs.python_command(spec),
    "config": spec.train_options(),
  }
  lines = [f"{name}=({shlex.join(words)})" for name, words in arrays.items()]
  lines.append(f"max_restarts={spec.requeue}")
  if spec.spares:
    lines += [f"train_nodes={spec.nodes}", f"tasks_per_node={spec.site.tasks}"]
  return "\n".join(lines) + "\n"


def _start(spec: JobSpec) -> str:
  # Slurm counts requeues only; the events have the moves to spare nodes.
  start = (_part("count_moves") if spec.spares else "") + 'record start 0 ""\n'
  if not spec.trials:
    return f'task=0\nworkdir="$run/train"\n{start}'
  lines = [
    "# A job of an array has a number of its own; its name for Slurm is ARRAY_TASK.",
    "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
    "task=$SLURM_ARRAY_TASK_ID",
    'workdir="$run/trials/$task"',
    "case $task in",
  ]
  for i, trial in enumerate(spec.trials):
    lines.append(f"  {i}) config+=({shlex.join(specs.as_options(trial))}) ;;")
  return "\n".join([*lines, "esac", start])
