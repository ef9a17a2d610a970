#!/usr/bin/env bash
# Build sdist and wheel, install the wheel as users do into an empty environment of each
# Python given, and train the digits there, outside of the repository:
#
#   packaging/try_wheel.sh python3.11 python3.12 python3.13      (make try-wheel)
#   JAX=0.10.2 packaging/try_wheel.sh python3.12                 with this jax
#
# Needs the package index; each environment takes 1 GB in a temporary folder until it is
# done. A line per Python: versions, accuracy, seconds of training. 2 minutes each.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

fail() { echo "error: $*" >&2; exit 1; }
[ $# -gt 0 ] || fail "give interpreters, e.g. python3.11 python3.12"

# With the first of them: the sdist, and the wheel from the unpacked sdist, so that the
# sdist is shown to be whole.
"$1" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --require-hashes -r "$root/requirements/build.txt"
(cd "$root" && "$work/build/bin/python" -m hatchling build -t sdist -d "$work/dist")
mkdir "$work/sdist"
tar -xzf "$work"/dist/*.tar.gz -C "$work/sdist" --strip-components=1
(cd "$work/sdist" && "$work/build/bin/python" -m hatchling build -t wheel -d "$work/dist")
rm -rf "$work/sdist"

for python in "$@"; do
  rm -rf "$work/venv" "$work/empty"
  mkdir "$work/empty"
  "$python" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install --quiet "$work"/dist/*.whl ${JAX:+"jax==$JAX"}
  "$work/venv/bin/python" -m pip check --quiet || fail "$python: packages do not fit"
  cd "$work/empty"
  "$work/venv/bin/jaxscale" train --config digits >out.log 2>&1 || {
    tail -n 20 out.log >&2
    fail "$python: training failed"
  }
  "$work/venv/bin/python" - <<'END'
import importlib.metadata as metadata
import json
import platform
from pathlib import Path

import jaxscale

assert "site-packages" in jaxscale.__file__, jaxscale.__file__
summary = json.loads(Path("runs/digits/summary.json").read_text())
names = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
versions = " ".join(f"{name} {metadata.version(name)}" for name in names)
print(f"Python {platform.python_version()}: {versions}; accuracy", end=" ")
print(f"{summary['accuracy']:.2%} in {summary['seconds']:.0f} s")
assert summary["accuracy"] >= 0.97, summary
END
  cd "$root"
done
