"""The sbatch script of a run, as text: a pure function of its spec.

The script does, in addition to `srun`, what Slurm leaves to it. It outlives the signals
that announce the end, so that it sees how the tasks ended; it requeues the job where a
restart helps; and it records every start and end in the run's folder, for the time when
Slurm has forgotten the job.

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

from jaxscale.errors import EXIT_PREEMPTED, ConfigError
from jaxscale.jobs import spec as specs
from jaxscale.jobs.spec import FINAL_CODES, RESTARTED_CODES, SIGNAL_CODES, JobSpec

# Exit codes as patterns of bash.
_FINAL, _RESTARTED, _SIGNALS = (
  "|".join(map(str, codes)) for codes in (FINAL_CODES, RESTARTED_CODES, SIGNAL_CODES)
)


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
  parts = [_header(spec), specs.setup_script(spec), _SECRET, _commands(spec), _EVENTS]
  parts += [_start(spec), _MAY_RESTART, _FINISH, _STEP]
  parts += [_PREFLIGHT] if spec.preflight else []
  train = _TRAIN_WITH_SPARES if spec.spares else "train\n"
  return "\n".join([*parts, _TRAIN, train, "finish\n"])


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


_SECRET = r"""# What the processes prove to each other: made afresh at each start.
JAXSCALE_SECRET=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')
export JAXSCALE_SECRET
"""

_EVENTS = r"""# One line per start and end, for `status`.
job=$SLURM_JOB_ID
restarts=${SLURM_RESTART_COUNT:-0}
record() {  # EVENT CODE NEXT
  local line='{"event": "%s", "job": "%s", "restarts": %d, "nodes": %d, "hosts": "%s", '
  line+='"code": %d, "next": "%s", "time": %d}\n'
  printf "$line" "$1" "$job" "$restarts" "$SLURM_JOB_NUM_NODES" \
    "$SLURM_JOB_NODELIST" "$2" "$3" "$(date +%s)" >>"$run/events/$task.jsonl"
}
"""


def _start(spec: JobSpec) -> str:
  start = (_COUNT_MOVES if spec.spares else "") + 'record start 0 ""\n'
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


# For tasks that died of a signal srun returns 128 and its number: SIGUSR1 and SIGUSR2
# without `B:`, SIGTERM. The doctor itself exits with 2 and nothing else.
# --kill-on-bad-exit would end the other nodes by SIGTERM, and srun returns 143 then,
# whatever the exit code of the first one (seen with Slurm 22.05).
_PREFLIGHT = r"""# One process per node checks whether this allocation can train. If a
# signal stops it, nothing is known about the nodes, and the job resumes later.
nodes=$SLURM_JOB_NUM_NODES
step "${srun[@]}" --kill-on-bad-exit=0 \
  --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
  "${python[@]}" -m jaxscale doctor "${config[@]}" --workdir "$workdir"
case $code in SIGNALS) stopped=yes ;; esac
if [ -n "$stopped" ]; then
  echo "stopped by a signal in the preflight: nothing to save"
  code=85
  finish
elif [ "$code" = 2 ]; then
  echo "error: the preflight found this allocation unfit, see above" >&2
  finish
elif [ "$code" != 0 ]; then
  echo "error: the preflight itself failed, exit code $code, see above" >&2
  finish
fi
""".replace("SIGNALS", _SIGNALS)

_MAY_RESTART = r"""# Slurm requeues even what was cancelled. A job that it has ended is
# COMPLETING, and its reason names a time limit and nothing else.
may_restart() {
  local shown tries=0
  until shown=$(scontrol show job "$job"); do
    [ $((tries += 1)) -lt 6 ] || break
    sleep 3
  done
  [ -n "$shown" ] || echo "error: not restarted: Slurm's controller does not answer"
  # `scontrol requeue` by somebody else, or a preemption: Slurm starts it again.
  [[ $shown =~ Restarts=([0-9]+) ]] &&
    [ "${BASH_REMATCH[1]}" -gt "${SLURM_RESTART_COUNT:-0}" ] && is_requeued=yes
  [[ $shown == *JobState=RUNNING* || $shown == *Reason=TimeLimit* ]] &&
    [ ! -e "$run/cancelled" ]
}
newest() {  # the step of the newest checkpoint, in the workdir or on the nodes
  local copy=$workdir/checkpoints/local.json
  {
    ls "$workdir/checkpoints"
    [ -f "$copy" ] && sed -n 's/.*"step": \([0-9]*\).*/\1/p' "$copy"
  } 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -n 1
}
before=$(newest)
is_requeued=
"""

_STEP = r"""# bash must survive the signals that ask the tasks to save. It handles none
# until the command that it waits for has ended, hence the loop; and not `wait`, whose
# status bash 5.2 loses when SIGCONT and a trapped signal coincide.
exec {codes}<> <(:)  # a pipe: a file would be empty where the disk is full
stopped=
step() {  # COMMAND; sets `code`, and `stopped` if a signal came
  log_bytes=$(stat -c %s "$log" 2>/dev/null || echo 0)
  trap '' TERM USR1 USR2
  (
    trap : TERM USR1 USR2
    "$@"
    echo $? >&"$codes"
  ) &
  child=$!
  trap stopped=yes TERM
  trap 'stopped=yes; scancel --signal=USR1 "$job"' USR1
  trap 'stopped=yes; scancel --signal=USR2 "$job"' USR2
  while kill -0 "$child" 2>/dev/null; do sleep 1; done
  read -r -t 1 -u "$codes" code || code=137
}
"""

_TRAIN = r"""train() {  # OPTIONS of srun
  step "${srun[@]}" "$@" "${files[@]}" "${python[@]}" -m jaxscale.train \
    "${config[@]}" --workdir "$workdir"
}
"""

# srun returns the highest code, which is that of the tasks that it ended by SIGTERM
# because another one had failed before they knew of each other. It prints them all.
_FINISH = (
  r"""log="$run/logs/$job.batch.out"
first_failure() {  # sets `code` to that of the task that failed by itself
  local ends first how rank
  ends=$(tail -c "+$((log_bytes + 1))" "$log" 2>/dev/null |
    grep -E '^srun: error: .*: tasks? [0-9]')
  local asked=': (Terminated|Hangup|User defined signal [12]|Exited with exit code '
  asked+='(85|SIGNALS))$'
  grep -Eq "$asked" <<<"$ends" || return
  first=$(grep -Evm 1 "$asked" <<<"$ends") || return
  how=${first##*: }
  case $how in
    Exited*) code=${how##* } ;;
    Abort*) code=134 ;;
    Killed* | Out*) code=137 ;;
    Segm*) code=139 ;;
    *) code=1 ;;
  esac
  [[ $first =~ tasks?\ ([0-9]+) ]] && rank=${BASH_REMATCH[1]}
  echo "error: process $rank failed first ($how):" \
    "$(tail -n 1 "$run/logs/$job.$rank.out")"
}
finish() {  # requeue the job or end it, by `code`
  [ -n "$stopped" ] || first_failure
  case $code in
    RESTARTED) next=requeue ;;
    FINAL) next=stop ;;
    *) [ -z "${lost-}" ] && [ "$(newest)" = "$before" ] && next=stop || next=requeue ;;
  esac
  if [ $next = requeue ]; then
    if ! may_restart; then
      [ -n "$is_requeued" ] || next=stop
    elif [ "$restarts" -ge "$max_restarts" ]; then
      next=stop
      echo "not restarted: this was start $((restarts + 1)) of $((max_restarts + 1))"
    fi
  fi
  record end "$code" "$next"
  if [ $next = requeue ]; then
    step=$(newest)
    echo "exit code $code: restarted from step ${step:-0}, restart $((restarts + 1))"
    [ -n "$is_requeued" ] || scontrol requeue "$job"
  fi
  exit "$code"
}
""".replace("FINAL", _FINAL)
  .replace("RESTARTED", _RESTARTED)
  .replace("SIGNALS", _SIGNALS)
)

# Slurm counts requeues only; the events have the moves to spare nodes.
_COUNT_MOVES = r"""moves="\"event\": \"move\", \"job\": \"$job\""
moves=$(grep -c "$moves" "$run/events/$task.jsonl" 2>/dev/null)
restarts=$((restarts + ${moves:-0}))
"""

_TRAIN_WITH_SPARES = r"""# Spare nodes replace lost ones.
home=$SLURMD_NODENAME  # where this script runs; if it is lost, so is the script
given_up=  # those that did not answer
good_nodes() {  # of the job, and not down, drained or without an answer (sinfo(1))
  local list bad names
  list=$(squeue --noheader --jobs="$job" --format=%N) && [ -n "$list" ] || return 1
  bad=$(sinfo --noheader --Node --nodes="$list" --format='%N %T' |
    awk '$2 ~ /down|drain|fail|unknown|[*~#!%^]$/ { print $1 }')
  names=$(scontrol show hostnames "$list" | grep -Fxv -e "$bad" -e "$given_up")
  grep -Fxv -e "$home" <<<"$names"
  grep -Fx -e "$home" <<<"$names"  # it trains last
}
silent() {  # NODES; those that start no task now
  lines "$@" | xargs -P 32 -I{} bash -c 'timeout -k 1 30 srun --overlap --nodes=1 \
    --ntasks=1 --ntasks-per-node=1 --nodelist={} true &>/dev/null || echo {}'
}
missing() { lines "${training[@]}" | grep -Fxv -e "$(lines "${nodes[@]}")"; }
lines() { printf '%s\n' "$@"; }
node_list() { lines "$@" | sort -V | paste -sd,; }  # as Slurm has lists
moved_to() {  # NODES
  printf '{"event": "move", "job": "%s", "restarts": %d, "nodes": %d, "hosts": "%s", ' \
    "$job" "$restarts" ${#training[@]} "$1" >>"$run/events/$task.jsonl"
  printf '"lost": "%s", "code": %d, "next": "", "time": %d}\n' \
    "$lost" "$code" "$(date +%s)" >>"$run/events/$task.jsonl"
  echo "exit code $code: node $lost is lost; resumes from step $(newest) on $1," \
    "restart $restarts"
}

# With --no-kill Slurm keeps a job that has lost the node of its script. A task on
# another node watches for that, and the job is requeued, or ended.
guard() {
  trap '' USR1 USR2
  exec >>"$run/logs/$job.batch.out" 2>&1  # srun, which would write, may be lost
  local list
  while sleep 5; do
    list=$(squeue --noheader --jobs="$job" --format=%N) && [ -n "$list" ] || continue
    scontrol show hostnames "$list" | grep -Fxq -e "$home" && continue
    if may_restart && [ "$restarts" -lt "$max_restarts" ]; then
      echo "node $home is lost, and the script with it: the job is requeued"
      record end 137 requeue
      scontrol requeue "$job"
    else
      echo "node $home is lost, and the script with it: the job ends"
      record end 137 stop
      scancel "$job"
    fi
    return
  done
}
start_guard() {  # NODE
  export run job task restarts home max_restarts
  srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$1" \
    bash -c "$(declare -f record may_restart guard); guard" \
    &>>"$run/logs/$job.guard.out" &
  guard=$!
}

lost=
while :; do
  mapfile -t nodes < <(good_nodes)
  [ ${#nodes[@]} -ge "$train_nodes" ] ||
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  training=("${nodes[@]:0:train_nodes}")
  where=(--overlap --nodes="$train_nodes" --ntasks-per-node="$tasks_per_node"
    --ntasks=$((train_nodes * tasks_per_node)))
  where+=(--nodelist="$(node_list "${training[@]}")")
  guard=
  [ "${nodes[0]}" = "$home" ] || start_guard "${nodes[0]}"
  train "${where[@]}"
  [ -z "$guard" ] || kill "$guard" 2>/dev/null
  case $code in FINAL) break ;; esac
  mapfile -t nodes < <(good_nodes)
  [ ${#nodes[@]} -gt 0 ] || break  # Slurm does not answer
  if ! missing >/dev/null; then
    quiet=$(silent "${nodes[@]}")  # if home is too, the question does not work
    grep -Fxq -e "$home" <<<"$quiet" || given_up+=$'\n'$quiet
    mapfile -t nodes < <(good_nodes)
  fi
  lost=$(missing | paste -sd,)
  [ -n "$lost" ] && [ ${#nodes[@]} -ge "$train_nodes" ] && may_restart || break
  restarts=$((restarts + 1))
  moved_to "$(node_list "${nodes[@]:0:train_nodes}")"
done
""".replace("FINAL", f"{_FINAL}|{EXIT_PREEMPTED}")
