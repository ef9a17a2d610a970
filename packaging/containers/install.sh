#!/usr/bin/env bash
# Install jaxscale into the Python of an image that has JAX. The image's own jax, jaxlib and
# plugins stay as they are: they were built for its CUDA or ROCm and its NCCL or RCCL.
#
#   install.sh SOURCE        a wheel, or the folder of this repository
#
# Where the image's jax is older than what jaxscale needs, pip says so and nothing is done.
set -euo pipefail
source=${1:?give a wheel, or the folder of the repository}
python=${PYTHON:-python3}

# The image is ours: its Python may be written to (PEP 668).
export PIP_BREAK_SYSTEM_PACKAGES=1

versions() { "$python" -m pip list --format=freeze | grep -iE '^(jax|jaxlib|jax[-_].*)=='; }
kept=$(mktemp)
trap 'rm -f "$kept"' EXIT
if ! versions >"$kept"; then
  echo "error: $("$python" -V) of this image has no jax: take an image of JAX" >&2
  exit 2
fi
# An editable or local build has a version that no index has; what is installed satisfies it.
"$python" -m pip install --no-cache-dir --constraint "$kept" "$source"
if ! diff <(versions) "$kept"; then
  echo "error: pip has replaced a part of the image's JAX, see above" >&2
  exit 1
fi
"$python" -P -m jaxscale --version
