"""The executor `slurm`: the sbatch script of a run, and calls of sbatch, squeue and scancel.

The parts of the script in bash are in `bash/`. In addition to `srun`, the script survives
the signals that announce the end, so that it sees the exit codes of the tasks. It requeues
the job if a restart may help, and records every start and end in the run's folder, because
Slurm forgets old jobs.

Signals. Without `B:` in `--signal`, Slurm signals the tasks and not the script. With `B:`
it signals only the script (sbatch(1)), which forwards the signal to the tasks by `scancel
--signal` (scancel(1)). SIGTERM, at the time limit or from `scancel`, goes to both, so the
script catches it and does not forward it.

Spare nodes. With `sbatch --no-kill` the script keeps its allocation when a node dies: Slurm
removes the node and ends the steps that ran there (sbatch(1)). Observed with Slurm 22.05:

- The srun of a running step returns only when Slurm marks the node as down, after
  SlurmdTimeout (slurm.conf(5), 300 s by default) and about 10 s for pings. A srun that
  cannot start its step fails within seconds, while Slurm still shows the node as good. So
  the script tests the nodes itself.
- SLURM_JOB_NODELIST and similar variables still have the dead node; squeue does not.
- The cores of the lost step on the other nodes are never freed ("unable to update job's
  core use information due to job resizing"), so the next step would wait forever without
  --overlap.
- The job does not end when the script's node is lost, and would keep its other nodes until
  the time limit. So a task on a different node watches the script's node and requeues the
  job, and the script's node is the last one that trains.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale.errors import ConfigError, invalid
from jaxscale.files import whole_number
from jaxscale.jobs import spec as specs
from jaxscale.jobs.spec import FINAL_CODES, RESTARTED_CODES, SIGNAL_CODES, JobSpec, QueueEntry

SCRIPT = "job.sbatch"
# Variables that describe the cluster. All other SLURM_ variables describe the job of this
# process (such as a notebook's), and sbatch would read them as options.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# Fields of squeue(1), --Format; a colon sets the width, since long values are truncated.
_FIELDS = ("JobArrayID", "State", "NumNodes", "TimeLeft", "RestartCnt", "Reason", "TimeLimit")
_WIDTH = 128
# Errors of Slurm 22.05 if its commands are installed and there is no cluster.
_NO_CLUSTER = ("Could not establish a configuration source", "Unable to contact slurm controller")
_ELSEWHERE = {"sbatch": "submit on a Slurm cluster, or use --executor local"}

# Words in the parts of the script that are replaced by patterns of exit codes.
_CODES = {"FINAL": FINAL_CODES, "RESTARTED": RESTARTED_CODES, "SIGNALS": SIGNAL_CODES}

# Variables that a container's image must not override.
_OWN_VARIABLES = "PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,JAXSCALE_REQUEUE,JAXSCALE_SECRET"
_SITE_OPTIONS = "mem time partition account qos constraint reservation exclude signal"


def is_available() -> bool:
  """Return whether this machine can submit to Slurm."""
  return shutil.which("sbatch") is not None


def render(spec: JobSpec) -> str:
  """Render the sbatch script of a run.

  Raises:
    ConfigError: Slurm does not accept a path or an option.
  """
  for path in (spec.folder, spec.cwd):
    if re.search(r'[\\"\n]', path):
      refused = "a backslash, a double quote or a line break; use a different directory"
      raise ConfigError(f"{path}: Slurm does not accept {refused}")
  parts = [_header(spec), specs.setup_script(spec), _part("secret"), _commands(spec)]
  # srun returns the highest exit code. This may be the code of tasks that srun ended by
  # SIGTERM because a different task had failed first. srun prints all codes, and `finish`
  # reads them.
  parts += [_part("events"), _start(spec), *map(_part, ("may_restart", "finish", "step"))]
  # If a signal ends a task, srun returns 128 plus its number: SIGUSR1 and SIGUSR2 without
  # `B:`, or SIGTERM. The doctor itself fails with exit code 2 only. The preflight runs
  # without --kill-on-bad-exit, with which srun would end the other nodes by SIGTERM and
  # return 143 instead of the first exit code (seen with Slurm 22.05).
  parts += [_part("preflight")] if spec.preflight else []
  train = _part("spares") if spec.spares else "train\n"
  return "\n".join([*parts, _part("train"), train, "finish\n"])


def submit(spec: JobSpec, tasks: Sequence[int] | None, after: Path | None) -> str:
  """Queue the script of a run; `after` is ignored, since Slurm has its own queue.

  Raises:
    ConfigError: Slurm refuses the job; the error has Slurm's message.
  """
  only = (f"--array={array([*tasks], spec.at_most)}",) if tasks else ()
  printed = _slurm("sbatch", "--parsable", *only, str(Path(spec.folder, SCRIPT)))
  return printed.strip().splitlines()[-1].partition(";")[0]


def queue(runs: Mapping[str, JobSpec]) -> dict[str, QueueEntry]:
  """Return all jobs of this user that Slurm knows, including those of `runs`, by number.

  Slurm forgets a job MinJobAge seconds after its end, slurm.conf(5).

  Raises:
    ConfigError: Slurm does not answer.
  """
  if not runs or not is_available():
    return {}
  form = "--Format=" + ",".join(f"{name}:{_WIDTH}" for name in _FIELDS)
  text = _slurm("squeue", "--me", "--array", "--noheader", "--states=all", form)
  return dict(map(parse_line, filter(str.strip, text.splitlines())))


def parse_line(line: str) -> tuple[str, QueueEntry]:
  """Parse a line of squeue, which has columns of a fixed width."""
  cells = [line[i * _WIDTH : (i + 1) * _WIDTH].strip() for i in range(len(_FIELDS))]
  job, state, nodes, left, restarts, reason, limit = cells
  number, again = whole_number(nodes) or 0, whole_number(restarts) or 0
  left = "" if limit == "UNLIMITED" else left  # else Slurm shows the rest of a year
  return job, QueueEntry(state, number, left, again, reason)


def cancel(spec: JobSpec, job: str) -> None:
  """End a job, queued or running: SIGTERM, and SIGKILL after Slurm's KillWait.

  Raises:
    ConfigError: Slurm refuses the cancellation, or the job has a different script than the run.
  """
  # %o is the path of the script, on a line for each task of an array.
  scripts = _slurm("squeue", "--me", "--noheader", "--states=all", f"--jobs={job}", "--format=%o")
  for script in {*scripts.splitlines()}:
    folder, name = os.path.split(script)
    if name != SCRIPT or not os.path.isdir(folder) or not os.path.samefile(folder, spec.folder):
      problem = f"records job {job}, whose script is {script}"
      raise invalid(spec.folder, ..., problem, f"end it by `scancel {job}` if it is of this run")
  _slurm("scancel", job)


def array(tasks: range | list[int], at_most: int) -> str:
  """Format the value of sbatch's --array: tasks, and how many run at the same time.

  Example:
    >>> array(range(6), 2), array([1, 4], 0)
    ('0-5%2', '1,4')
  """
  whole = isinstance(tasks, range) and len(tasks) > 1
  text = f"0-{len(tasks) - 1}" if whole else ",".join(map(str, tasks))
  return text + (f"%{at_most}" if at_most else "")


def _part(name: str) -> str:
  """Return a part of the script with the exit codes of `spec`."""
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
  # Modules need a login shell, which defines `module`.
  shell = "#!/bin/bash -l" if site.modules else "#!/bin/bash"
  made_by = spec.made_by.replace("\n", " ")
  lines = [shell, f"# {spec.name}, made by {made_by}"]
  for option in options:
    if re.search(r'["\n]', option):
      raise ConfigError(f"{option}: sbatch accepts no double quote or line break; remove it")
    # In #SBATCH lines a double quote quotes, and # begins a comment.
    is_plain = re.fullmatch(r"[\w=,.:/%@+\-\[\]&|*]+", option)
    lines.append(f"#SBATCH {option}" if is_plain else f'#SBATCH "{option}"')
  return "\n".join(lines) + "\n"


def _output(spec: JobSpec, rank: str) -> str:
  """Return `spec.log_file` in Slurm's patterns; a restarted job appends to its files."""
  folder = spec.folder.replace("%", "%%")
  return f"{folder}/logs/{'%A_%a' if spec.trials else '%j'}.{rank}.out"


def _commands(spec: JobSpec) -> str:
  """Return the commands as bash arrays, whose words are not split or quoted again."""
  site = spec.site
  srun = ["srun", "--kill-on-bad-exit=1"]
  if site.cpus_per_task:  # since Slurm 22.05 srun does not inherit it from the job
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
  # Slurm counts requeues only, so the moves to spare nodes are counted in the events.
  start = (_part("count_moves") if spec.spares else "") + 'record start 0 ""\n'
  if not spec.trials:
    return f'task=0\nworkdir="$run/train"\n{start}'
  lines = [
    "# Each job of an array has its own number; Slurm also knows it as ARRAY_TASK.",
    "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
    "task=$SLURM_ARRAY_TASK_ID",
    'workdir="$run/trials/$task"',
    "case $task in",
  ]
  for i, trial in enumerate(spec.trials):
    lines.append(f"  {i}) config+=({shlex.join(specs.as_options(trial))}) ;;")
  return "\n".join([*lines, "esac", start])


def _slurm(*command: str) -> str:
  """Run a command and return its output; its errors become a ConfigError of one line."""
  ours = os.environ.items()
  advice = _ELSEWHERE.get(command[0], "run this on a Slurm cluster")
  env = {k: v for k, v in ours if not k.startswith("SLURM_") or k in _KEPT}
  try:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    if done.returncode == 0:
      return done.stdout
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    message = "; ".join(dict.fromkeys(x.partition("error: ")[2] or x for x in lines))
    if any(words in message for words in _NO_CLUSTER):
      message = f"cannot reach Slurm ({message}); {advice}"
  except FileNotFoundError:
    message = f"not found; {advice}"
  except subprocess.TimeoutExpired:
    message = "Slurm has not answered within 60 s; try again later"
  raise ConfigError(f"{command[0]}: {message}")
