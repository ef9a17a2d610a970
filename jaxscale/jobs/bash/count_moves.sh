moves="\"event\": \"move\", \"job\": \"$job\""
moves=$(grep -c "$moves" "$run/events/$task.jsonl" 2>/dev/null)
restarts=$((restarts + ${moves:-0}))
