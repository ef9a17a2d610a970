# Write one line per start and end, which `jaxscale status` reads.
job=$SLURM_JOB_ID
restarts=${SLURM_RESTART_COUNT:-0}
record() {  # EVENT CODE NEXT
  local line='{"event": "%s", "job": "%s", "restarts": %d, "nodes": %d, "hosts": "%s", '
  line+='"code": %d, "next": "%s", "time": %d}\n'
  printf "$line" "$1" "$job" "$restarts" "$SLURM_JOB_NUM_NODES" \
    "$SLURM_JOB_NODELIST" "$2" "$3" "$(date +%s)" >>"$run/events/$task.jsonl"
}
