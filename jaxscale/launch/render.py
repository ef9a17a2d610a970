"""The sbatch script of a run, as text: a pure function of what the run is.

What the script does beside `srun` is what Slurm leaves to it. It outlives the
signals that warn of the end, so that it can see how the tasks ended; it asks for
another start if that is of use; and it keeps a diary of starts and ends in the
run's folder, for the time when Slurm has forgotten the job.

Signals. Without `B:` in `--signal`, Slurm signals the tasks and not this script;
with it, the script alone (sbatch(1)), which hands the signal on by `scancel
--signal`, which goes to the tasks and not to the script (scancel(1)). SIGTERM, at the
time limit or of `scancel`, goes to both, so it is caught here and not handed on.
"""

from __future__ import annotations

import re
from shlex import quote

from jaxscale.errors import ConfigError
from jaxscale.launch import spares, spec
from jaxscale.launch.spec import Run

# How a job that ended goes on (exits.py, DESIGN.md §8). Any other code is a crash:
# it is worth another start if a newer checkpoint is there than before.
STARTED_AGAIN = (85, 86)  # saved on request; hung
NOT_STARTED_AGAIN = (0, 2, 93, 130)  # done; the user's; no progress; Ctrl-C


def render(run: Run) -> str:
  """The script.

  Args:
    run: what to run; nothing else is read, of this machine or its files.

  Raises:
    ConfigError: a path that Slurm cannot be given.
  """
  for path in (run.folder, run.cwd):
    if re.search(r'[\\"\n]', path):
      raise ConfigError(
        f"{path}: Slurm takes no path with a backslash, a double quote or a line break"
      )
  parts = [_header(run), _setup(run), _commands(run), _DIARY, _start(run), _AGAIN]
  parts += [_finish(run), _STEP]
  if run.preflight:
    parts.append(_PREFLIGHT)
  return "\n".join([*parts, _train(run), "finish\n"])


def render_process(run: Run) -> str:
  """What the local executor starts every process by: `bash process.sh MODULE …`.

  Raises:
    ConfigError: a container that only Slurm can start.
  """
  if run.site.container and run.site.container.kind == "pyxis":
    raise ConfigError(
      "Site.container.kind='pyxis': a plugin of Slurm, use 'apptainer' here"
    )
  python = " ".join(map(quote, _words(run)["python"]))
  head = f"#!/bin/bash\n# A process of {run.name}, started by the local executor.\n"
  return f'{head}{_setup(run)}\nexec {python} -m "$@"\n'


def _header(run: Run) -> str:
  site = run.site
  given = {
    "job-name": run.name,
    "nodes": run.nodes + run.spares,
    "ntasks-per-node": site.tasks,
    "gpus-per-node": site.gpus_per_node,
    "cpus-per-task": site.cpus_per_task,
    **{name: getattr(site, name) for name in (
      "mem", "time", "partition", "account", "qos", "constraint", "reservation",
      "exclude", "signal",
    )},
    "array": array(run.tasks, run.at_most) if run.trials else None,
    "chdir": run.cwd,
    "output": pattern(run, "batch"),
    "open-mode": "append",
  }  # fmt: skip
  lines = [f"--{name}={value}" for name, value in given.items() if value]
  lines += ["--requeue" if run.requeue else "--no-requeue"]
  lines += [*(["--no-kill"] if run.spares else []), *site.sbatch]
  # A login shell where there are modules: it is what defines `module`.
  shell = "#!/bin/bash -l" if site.modules else "#!/bin/bash"
  made_by = run.made_by.replace("\n", " ")
  head = [shell, f"# {run.name}, made by {made_by}"]
  return "\n".join(head + [f"#SBATCH {_batch_quote(line)}" for line in lines]) + "\n"


def _batch_quote(option: str) -> str:
  """An option in a #SBATCH line, where " quotes and # begins a comment."""
  if re.search(r'["\n]', option):
    raise ConfigError(f"{option}: sbatch takes no double quote or line break")
  if re.fullmatch(r"[\w=,.:/%@+\-\[\]&|*]+", option):
    return option
  return f'"{option}"'


def array(tasks: range | list[int], at_most: int) -> str:
  """The tasks of an array and how many run at a time, as sbatch has it.

  Example:
    >>> array(range(6), 2), array([1, 4], 0)
    ('0-5%2', '1,4')
  """
  whole = isinstance(tasks, range) and len(tasks) > 1
  text = f"0-{len(tasks) - 1}" if whole else ",".join(map(str, tasks))
  return text + (f"%{at_most}" if at_most else "")


def pattern(run: Run, rank: str = "%t") -> str:
  """Where output goes, in Slurm's patterns: a file a rank, and one of the script.

  Started again, a job keeps its number, and the files are appended to.
  """
  folder = run.folder.replace("%", "%%")
  return f"{folder}/logs/{'%A_%a' if run.trials else '%j'}.{rank}.out"


def _setup(run: Run) -> str:
  site = run.site
  lines = [
    "# What the job needs to be there; a line that fails ends it.",
    "set -eo pipefail",
    "trap 'echo \"error: line $LINENO of $0 failed on $(hostname)\" >&2; exit 2' ERR",
    *(f"module load {quote(module)}" for module in site.modules),
    *site.setup,
    *(f"export {n}={quote(v)}" for n, _, v in (e.partition("=") for e in site.env)),
    "trap - ERR",
    "set -u +e",
    "",
    "# The copy of the code that was made when this was submitted comes first; without",
    "# PYTHONSAFEPATH that would be the current directory, which is last here.",
    f"run={quote(run.folder)}",
    'export PYTHONPATH="$run/code${PYTHONPATH:+:$PYTHONPATH}:$PWD"',
    "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1",
    "# Whoever starts the processes also starts them again, not they themselves.",
    "export JAXSCALE_REQUEUE=launcher",
  ]
  return "\n".join(lines) + "\n"


def _commands(run: Run) -> str:
  """Arrays of bash: their words are never split or quoted again."""
  lines = (f"{name}=({' '.join(map(quote, w))})" for name, w in _words(run).items())
  return "\n".join(lines) + "\n"


def _words(run: Run) -> dict[str, list[str]]:
  srun = ["srun", "--kill-on-bad-exit=1"]
  if run.site.cpus_per_task:  # srun no longer takes it from the job: Slurm 22.05
    srun.append(f"--cpus-per-task={run.site.cpus_per_task}")
  srun += run.site.srun
  python = [spec.interpreter(run)]
  if container := run.site.container:
    mounts = [run.folder, run.cwd, *container.mounts]
    if container.kind == "pyxis":
      inside = ",".join(m if ":" in m else f"{m}:{m}" for m in mounts)
      srun += [
        f"--container-image={container.image}",
        f"--container-mounts={inside}",
        f"--container-workdir={run.cwd}",
        "--container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,JAXSCALE_REQUEUE",
        *container.options,
      ]
    else:
      python = [
        *(container.kind, "exec"),
        *(["--nv"] if run.site.gpus_per_node and not container.options else []),
        *(f"--bind={mount}" for mount in mounts),
        f"--pwd={run.cwd}",
        *container.options,
        container.image,
        *python,
      ]
  return {
    "srun": srun,
    "files": [f"--output={pattern(run)}", "--open-mode=append"],
    "python": python,
    "config": ["--config", spec.config(run), *spec.options(run.overrides)],
  }


_DIARY = r"""# The diary: a line a start and a line an end, for `status`.
job=$SLURM_JOB_ID
restarts=${SLURM_RESTART_COUNT:-0}
diary() {  # EVENT CODE NEXT
  printf '{"event": "%s", "job": "%s", "restarts": %d, "nodes": %d, "hosts": "%s", ' \
    "$1" "$job" "$restarts" "$SLURM_JOB_NUM_NODES" "$SLURM_JOB_NODELIST" \
    >>"$run/events/$task.jsonl"
  printf '"code": %d, "next": "%s", "time": %d}\n' "$2" "$3" "$(date +%s)" \
    >>"$run/events/$task.jsonl"
}
"""


def _start(run: Run) -> str:
  start = (spares.COUNT if run.spares else "") + 'diary start 0 ""\n'
  if not run.trials:
    return f'task=0\nworkdir="$run/train"\n{start}'
  lines = [
    "# A job of an array has a number of its own; what is asked for is ARRAY_TASK.",
    "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
    "task=$SLURM_ARRAY_TASK_ID",
    'workdir="$run/trials/$task"',
    "case $task in",
  ]
  for i, trial in enumerate(run.trials):
    words = " ".join(map(quote, spec.options(trial)))
    lines.append(f"  {i}) config+=({words}) ;;")
  return "\n".join([*lines, "esac", start])


# What srun returns of tasks that died of a signal is 128 and its number: SIGUSR1 and
# SIGUSR2 without `B:`, SIGTERM. The doctor itself says 2 and nothing else (doctor.py).
# --kill-on-bad-exit would end the other nodes by SIGTERM, and 143 is what srun returns
# then, whatever the first one said (seen with Slurm 22.05).
_PREFLIGHT = r"""# A process a node looks whether this allocation can train. What
# was told to stop meanwhile says nothing of the nodes, and is to go on later.
nodes=$SLURM_JOB_NUM_NODES
step "${srun[@]}" --kill-on-bad-exit=0 \
  --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
  "${python[@]}" -m jaxscale.cli.doctor "${config[@]}" --workdir "$workdir"
case $code in 138|140|143) told=yes ;; esac
if [ -n "$told" ]; then
  echo "told to stop in the preflight: nothing was to be saved"
  code=85
  finish
elif [ "$code" = 2 ]; then
  echo "error: the preflight found this allocation unfit, see above" >&2
  finish
elif [ "$code" != 0 ]; then
  echo "error: the preflight itself failed, exit code $code, see above" >&2
  finish
fi
"""

_AGAIN = r"""# Whether to start again. Slurm requeues even what was cancelled. What it
# has ended shows as COMPLETING, and only the time limit says so of itself.
may_start_again() {
  local shown
  shown=$(scontrol show job "$job")
  [[ $shown == *JobState=RUNNING* || $shown == *Reason=TimeLimit* ]] &&
    [ ! -e "$run/cancelled" ]
}
newest() {  # the step of the newest checkpoint
  ls "$workdir/checkpoints" 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -n 1
}
before=$(newest)
"""

_STEP = r"""# bash must not die of the signals that tell the tasks to save. It does
# nothing about one until the command that it waits for has ended, hence the loop;
# and not `wait`, whose status bash 5.2 loses when SIGCONT and a trapped one meet.
code_file="$run/events/$task.code"
told=
step() {  # COMMAND; sets `code`, and `told` if a signal came
  rm -f "$code_file"
  trap '' TERM USR1 USR2
  (
    trap : TERM USR1 USR2
    "$@"
    echo $? >"$code_file"
  ) &
  child=$!
  trap told=yes TERM
  trap 'told=yes; scancel --signal=USR1 "$job"' USR1
  trap 'told=yes; scancel --signal=USR2 "$job"' USR2
  while kill -0 "$child" 2>/dev/null; do sleep 1; done
  code=$(cat "$code_file" || echo 137)
}
"""

_TRAIN = r"""step "${srun[@]}" "${files[@]}" "${python[@]}" -m jaxscale.train \
  "${config[@]}" --workdir "$workdir"
"""


def _train(run: Run) -> str:
  if not run.spares:
    return _TRAIN
  first = '"${srun[@]}"'
  train = _TRAIN.replace(first, f'{first} "${{where[@]}}"')
  return spares.with_spares(
    train, nodes=run.nodes, tasks=run.site.tasks, requeue=run.requeue
  )


def _finish(run: Run) -> str:
  unlucky = '[ -z "${lost-}" ] && ' if run.spares else ""  # Slurm would requeue, too
  again, never = ("|".join(map(str, c)) for c in (STARTED_AGAIN, NOT_STARTED_AGAIN))
  return rf"""finish() {{  # what becomes of the job, by `code`
  case $code in
    {again}) next=requeue ;;
    {never}) next=stop ;;
    *) {unlucky}[ "$(newest)" = "$before" ] && next=stop || next=requeue ;;
  esac
  if [ $next = requeue ]; then
    if ! may_start_again; then
      next=stop
    elif [ "$restarts" -ge {run.requeue} ]; then
      next=stop
      echo "not started again: that was start $((restarts + 1)) of {run.requeue + 1}"
    fi
  fi
  diary end "$code" "$next"
  if [ $next = requeue ]; then
    echo "exit code $code: started again from step $(newest), restart $((restarts + 1))"
    scontrol requeue "$job"
  fi
  exit "$code"
}}
"""
