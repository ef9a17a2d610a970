# One process per node checks whether this allocation can train. If a signal stops the
# check, the nodes may be fine, so the job is requeued and checks again.
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
  echo "error: the preflight found problems on this allocation; see the lines above" >&2
  finish
elif [ "$code" != 0 ]; then
  echo "error: the preflight could not run (exit code $code); see the lines above" >&2
  finish
fi
