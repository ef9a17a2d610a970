"""The part of a script that goes on in the same job when a node is lost.

sbatch --no-kill leaves the allocation to the script: Slurm takes a dead node out of
it and ends the steps that ran there (sbatch(1)). What was found with Slurm 22.05:

- The srun of a step that runs returns once Slurm calls the node down, not before,
  whatever the other tasks do: SlurmdTimeout (slurm.conf(5), 300 s by default) and
  some 10 s for the pings. One that cannot start its step says so in seconds, while
  Slurm still calls the node good: so the nodes are asked.
- SLURM_JOB_NODELIST and its like keep the dead node; squeue does not have it.
- What the lost step had on the other nodes is never free again ("unable to update
  job's core use information due to job resizing"): the next waits for ever, unless it
  may --overlap.
- The job is not ended when the node of its script is lost, and would hold its other
  nodes until the time limit. So a task on another node looks now and then, and
  requeues the job; and the script's node is the spare that trains last.
"""

from __future__ import annotations

from textwrap import indent

# Exit codes after which another step is of no use (exits.py): done, the user's
# mistake, saved on request, no progress, Ctrl-C.
_FINAL = (0, 2, 85, 93, 130)
_LOOK_EVERY_S = 5  # one squeue of one job: nothing to a controller

# After a requeue Slurm's count begins where it was; the diary has the others.
COUNT = r"""moves="\"event\": \"move\", \"job\": \"$job\""
moves=$(grep -c "$moves" "$run/events/$task.jsonl" 2>/dev/null)
restarts=$((restarts + ${moves:-0}))
"""

_NODES = r"""# Nodes beyond those that train, for those that are lost.
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
together() { lines "$@" | sort -V | paste -sd,; }  # as Slurm has lists
moved_to() {  # NODES
  printf '{"event": "move", "job": "%s", "restarts": %d, "nodes": %d, "hosts": "%s", ' \
    "$job" "$restarts" ${#training[@]} "$1" >>"$run/events/$task.jsonl"
  printf '"lost": "%s", "code": %d, "next": "", "time": %d}\n' \
    "$lost" "$code" "$(date +%s)" >>"$run/events/$task.jsonl"
  echo "exit code $code: node $lost is lost; goes on from step $(newest) on $1," \
    "restart $restarts"
}
"""

_GUARD = r"""
# With --no-kill Slurm keeps a job that has lost the node of its script. A task on
# another node looks for that, and the job is requeued, or ended.
guard() {
  trap '' USR1 USR2
  exec >>"$run/logs/$job.batch.out" 2>&1  # srun, which would write, may be lost
  local list
  while sleep %(every)d; do
    list=$(squeue --noheader --jobs="$job" --format=%%N) && [ -n "$list" ] || continue
    scontrol show hostnames "$list" | grep -Fxq -e "$home" && continue
    if may_start_again && [ "$restarts" -lt %(requeue)d ]; then
      echo "node $home is lost, and the script with it: the job is requeued"
      diary end 137 requeue
      scontrol requeue "$job"
    else
      echo "node $home is lost, and the script with it: the job ends"
      diary end 137 stop
      scancel "$job"
    fi
    return
  done
}
start_guard() {  # NODE
  export run job task restarts home
  srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$1" \
    bash -c "$(declare -f diary may_start_again guard); guard" \
    &>>"$run/logs/$job.guard.out" &
  guard=$!
}
"""

_ROUNDS = r"""
lost=
while :; do
  mapfile -t nodes < <(good_nodes)
  [ ${#nodes[@]} -ge %(nodes)d ] ||
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  training=("${nodes[@]:0:%(nodes)d}")
  where=(--overlap --nodes=%(nodes)d --ntasks=%(processes)d --ntasks-per-node=%(tasks)d)
  where+=(--nodelist="$(together "${training[@]}")")
  guard=
  [ "${nodes[0]}" = "$home" ] || start_guard "${nodes[0]}"
  train
  [ -z "$guard" ] || kill "$guard" 2>/dev/null
  case $code in %(final)s) break ;; esac
  mapfile -t nodes < <(good_nodes)
  [ ${#nodes[@]} -gt 0 ] || break  # Slurm does not say
  if ! missing >/dev/null; then
    quiet=$(silent "${nodes[@]}")  # where this one is too, asking does not work
    grep -Fxq -e "$home" <<<"$quiet" || given_up+=$'\n'$quiet
    mapfile -t nodes < <(good_nodes)
  fi
  lost=$(missing | paste -sd,)
  [ -n "$lost" ] && [ ${#nodes[@]} -ge %(nodes)d ] && may_start_again || break
  restarts=$((restarts + 1))
  moved_to "$(together "${nodes[@]:0:%(nodes)d}")"
done
"""


def with_spares(train: str, *, nodes: int, tasks: int, requeue: int) -> str:
  """The bash that trains on `nodes` of a job's nodes, and on others if some are lost.

  Args:
    train: the lines that run one step, with its options in the array `where`, and
      set `code`.
    nodes: that train.
    tasks: processes on each.
    requeue: how often the job may be started again.

  Example:
    >>> text = with_spares("code=0", nodes=2, tasks=1, requeue=3)
    >>> "where=(--overlap --nodes=2 --ntasks=2 --ntasks-per-node=1)" in text
    True
  """
  guard = _GUARD % {"every": _LOOK_EVERY_S, "requeue": requeue}
  rounds = _ROUNDS % {
    "nodes": nodes,
    "tasks": tasks,
    "processes": nodes * tasks,
    "final": "|".join(map(str, _FINAL)),
  }
  return f"{_NODES}{guard}\ntrain() {{\n{indent(train, '  ')}}}\n{rounds}"
