# Replace lost nodes by spare ones.
home=$SLURMD_NODENAME  # the node of this script
given_up=  # nodes that did not answer
good_nodes() {  # prints the job's nodes that are not down, drained or silent (sinfo(1))
  local list bad names
  list=$(squeue --noheader --jobs="$job" --format=%N) && [ -n "$list" ] || return 1
  bad=$(sinfo --noheader --Node --nodes="$list" --format='%N %T' |
    awk '$2 ~ /down|drain|fail|unknown|[*~#!%^]$/ { print $1 }')
  names=$(scontrol show hostnames "$list" | grep -Fxv -e "$bad" -e "$given_up")
  grep -Fxv -e "$home" <<<"$names"
  grep -Fx -e "$home" <<<"$names"  # last, so that it trains only if it is needed
}
silent() {  # NODES; prints those that cannot start a task now
  lines "$@" | xargs -P 32 -I{} bash -c 'timeout -k 1 30 srun --overlap --nodes=1 \
    --ntasks=1 --ntasks-per-node=1 --nodelist={} true &>/dev/null || echo {}'
}
missing() { lines "${training[@]}" | grep -Fxv -e "$(lines "${nodes[@]}")"; }
lines() { printf '%s\n' "$@"; }
node_list() { lines "$@" | sort -V | paste -sd,; }  # in Slurm's format
moved_to() {  # NODES
  printf '{"event": "move", "job": "%s", "restarts": %d, "nodes": %d, "hosts": "%s", ' \
    "$job" "$restarts" ${#training[@]} "$1" >>"$run/events/$task.jsonl"
  printf '"lost": "%s", "code": %d, "next": "", "time": %d}\n' \
    "$lost" "$code" "$(date +%s)" >>"$run/events/$task.jsonl"
  echo "exit code $code: lost node $lost; resuming from step $(newest) on $1," \
    "restart $restarts"
}

# With --no-kill Slurm keeps a job that has lost the node of its script. A task on a
# different node detects this and requeues or ends the job.
guard() {
  trap '' USR1 USR2
  exec >>"$run/logs/$job.batch.out" 2>&1  # its srun may be lost with the node
  local list
  while sleep 5; do
    list=$(squeue --noheader --jobs="$job" --format=%N) && [ -n "$list" ] || continue
    scontrol show hostnames "$list" | grep -Fxq -e "$home" && continue
    if may_restart && [ "$restarts" -lt "$max_restarts" ]; then
      echo "lost node $home, which ran the batch script: the job is requeued"
      record end 137 requeue
      scontrol requeue "$job"
    else
      echo "lost node $home, which ran the batch script: the job ends"
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
  case $code in FINAL|85) break ;; esac
  mapfile -t nodes < <(good_nodes)
  [ ${#nodes[@]} -gt 0 ] || break  # Slurm does not answer
  if ! missing >/dev/null; then
    quiet=$(silent "${nodes[@]}")  # if it contains home, the test itself failed
    grep -Fxq -e "$home" <<<"$quiet" || given_up+=$'\n'$quiet
    mapfile -t nodes < <(good_nodes)
  fi
  lost=$(missing | paste -sd,)
  [ -n "$lost" ] && [ ${#nodes[@]} -ge "$train_nodes" ] && may_restart || break
  restarts=$((restarts + 1))
  moved_to "$(node_list "${nodes[@]:0:train_nodes}")"
done
