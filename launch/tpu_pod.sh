#!/usr/bin/env bash
# Train on a Cloud TPU pod slice. On a machine with gcloud:
#
#   TPU=my-pod ZONE=us-central2-b bash launch/tpu_pod.sh --config configs/x.py \
#     --workdir /mnt/shared/run
#
# gcloud starts `python -P -m jaxscale.train` with these arguments on each host of the slice. Each
# process calls jax.distributed.initialize in jaxscale/cluster/rendezvous/join.py, and JAX
# finds the other hosts. Every host needs the code in ~/jaxscale with the environment that
# `make env` builds there. The workdir must be a mounted directory that all hosts share, not a
# gs:// address.
set -euo pipefail

: "${TPU:?set it to the name of the TPU, as TPU=my-pod}"
: "${ZONE:?set it to the zone of the TPU, as ZONE=us-central2-b}"

# Quoted once more, because a shell on each host splits the line again.
printf -v arguments '%q ' "$@"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="cd ~/jaxscale && exec .venv/bin/python -P -m jaxscale.train $arguments"
