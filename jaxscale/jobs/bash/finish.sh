log="$run/logs/$job.batch.out"
first_failure() {  # sets `code` to the exit code of the task that failed first
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
finish() {  # requeues or ends the job, depending on `code`
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
