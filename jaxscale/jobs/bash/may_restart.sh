# Slurm would also requeue a cancelled job. A job that Slurm is ending is COMPLETING; only
# one at its time limit has Reason=TimeLimit.
may_restart() {
  local shown tries=0
  until shown=$(scontrol show job "$job"); do
    [ $((tries += 1)) -lt 6 ] || break
    sleep 3
  done
  [ -n "$shown" ] || echo "error: not restarted: Slurm's controller does not answer"
  # After a `scontrol requeue` by a user, or a preemption, Slurm itself restarts the job.
  [[ $shown =~ Restarts=([0-9]+) ]] &&
    [ "${BASH_REMATCH[1]}" -gt "${SLURM_RESTART_COUNT:-0}" ] && is_requeued=yes
  [[ $shown == *JobState=RUNNING* || $shown == *Reason=TimeLimit* ]] &&
    [ ! -e "$run/cancelled" ]
}
newest() {  # prints the step of the newest checkpoint, in the workdir or on the nodes
  local copy=$workdir/checkpoints/local.json
  {
    ls "$workdir/checkpoints"
    [ -f "$copy" ] && sed -n 's/.*"step": \([0-9]*\).*/\1/p' "$copy"
  } 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -n 1
}
before=$(newest)
is_requeued=
