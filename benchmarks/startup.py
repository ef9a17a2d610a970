"""From process start to the first step of the digits run, against the least.

    python benchmarks/startup.py

The least is what no run can do without: `import jax`, and tracing and compiling
that very step, measured in a process of its own. Both in turns; `ratio` is the
ratio of the medians. The first step counts as done when its loss has been read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report

TURNS = 7
LEAST = """
import time
began = time.perf_counter()
import jax
imported = time.perf_counter()
from jaxscale.experiment import build
from jaxscale.config.loading import load_config
e = build.experiment(load_config("configs/digits.py"))
abstract = e.abstract_state(), e.abstract_batch()
ready = time.perf_counter()
e.train_step.lower(*abstract).compile()
print(imported - began + time.perf_counter() - ready)
"""


def environment() -> dict[str, str]:
  return os.environ | {"JAX_PLATFORMS": "cpu"}


def least() -> float:
  done = subprocess.run(
    [sys.executable, "-c", LEAST], env=environment(), capture_output=True, text=True
  )
  return float(done.stdout)


def first_step() -> float:
  """Seconds from starting the process to the line of step 1 in its record."""
  with tempfile.TemporaryDirectory() as workdir:
    command = [
      *(sys.executable, "-m", "jaxscale.train", "--config", "configs/digits.py"),
      *("--workdir", workdir, "--config.log.every_steps=1"),
      *("--config.log.tensorboard=False", "--config.epochs=3"),
    ]
    began = time.time()
    subprocess.run(command, env=environment(), capture_output=True, check=True)
    lines = Path(workdir, "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[0])["time"] - began


def main() -> None:
  least(), first_step()  # fill the page cache
  pairs = [(least(), first_step()) for _ in range(TURNS)]
  floor, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
  report(
    "startup",
    ratio=round(ours / floor, 3),
    first_step_s=round(ours, 2),
    import_jax_and_compile_s=round(floor, 2),
    turns=[[round(a, 2), round(b, 2)] for a, b in pairs],
  )


if __name__ == "__main__":
  main()
