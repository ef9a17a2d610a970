#!/usr/bin/env bash
# A Cloud TPU pod slice: the same command on each of its hosts.
#
#   TPU=my-pod ZONE=us-central2-b bash launch/tpu_pod.sh --config configs/x.py \
#     --workdir /mnt/shared/run
#
# Every argument goes to `python -m jaxscale.train`. The code is expected in
# ~/jaxscale on every host, with the environment that `make env` builds there; the
# workdir must be a mounted directory that all hosts see (no gs:// address). JAX itself
# knows which host is which.
set -euo pipefail

: "${TPU:?give the name of the TPU, as TPU=my-pod}"
: "${ZONE:?give its zone, as ZONE=us-central2-b}"

# Quoted once more: a shell on each host takes the line apart again.
printf -v arguments '%q ' "$@"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="cd ~/jaxscale && exec .venv/bin/python -P -m jaxscale.train $arguments"
