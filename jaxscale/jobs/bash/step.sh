# bash must survive the signals that ask the tasks to save. It handles signals only between
# two commands, so it polls in a loop. `wait` is no alternative, because bash 5.2 loses its
# status when SIGCONT and a trapped signal coincide.
exec {codes}<> <(:)  # a pipe, since a file would stay empty on a full disk
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
