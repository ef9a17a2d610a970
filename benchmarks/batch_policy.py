"""Steps of two processes on CPUs under SCHED_BATCH and under SCHED_OTHER, in turns.

    python benchmarks/batch_policy.py            (Linux, two cores)

Each process has a core; then both share two. `cluster/cpu_settings.py` sets the policy.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from common import free_address, report
from plan_error import joined
from plan_error_cases import LOOPBACK, MARK, PROCS, Case, answer, stepper

CASES = [
  Case(model, way, LOOPBACK, True)
  for model, way in [("mlp", "plain"), ("cnn", "plain"), ("text", "fsdp")]
]
TURNS, STEPS = 7, 10


def worker(pinned: bool) -> None:
  """One process: all cases under both policies."""
  from jaxscale import cluster

  if pinned:
    os.sched_setaffinity(0, {int(os.environ["JAXSCALE_PROCESS_ID"])})
  with cluster.open_session():
    for case in CASES:
      some, seconds = stepper(case), {"SCHED_BATCH": [], "SCHED_OTHER": []}
      for turn in range(2 * TURNS):
        name = list(seconds)[turn % 2]
        for thread in map(int, os.listdir("/proc/self/task")):
          os.sched_setscheduler(thread, getattr(os, name), os.sched_param(0))
        some(2)
        seconds[name].append(max(cluster.gather(some(STEPS))))
      answer({"case": f"{case.model} {case.way}", "pinned": pinned} | seconds)


def measure(pinned: bool) -> list[dict[str, Any]]:
  """What both processes found, by case."""
  address = free_address()
  command = [sys.executable, __file__, "--worker", *["--pinned"] * pinned]
  started = [
    subprocess.Popen(
      command, env=os.environ | joined(address, i), stdout=subprocess.PIPE, text=True
    )
    for i in range(PROCS)
  ]
  lines = started[0].communicate()[0].splitlines()
  if any([process.wait() for process in started]):
    raise SystemExit("a process failed: see above")
  return [json.loads(x.removeprefix(MARK)) for x in lines if x.startswith(MARK)]


def main() -> None:
  rows = []
  for found in (*measure(True), *measure(False)):
    batch, other = (
      statistics.median(found.pop(f"SCHED_{x}")) for x in ("BATCH", "OTHER")
    )
    row = found | {"batch_ms": round(1e3 * batch, 2), "other_ms": round(1e3 * other, 2)}
    rows.append(row | {"ratio": round(other / batch, 2)})
    print(rows[-1], file=sys.stderr)
  report("batch_policy", rows=rows)


if __name__ == "__main__":
  if "--worker" in sys.argv:
    worker("--pinned" in sys.argv)
  else:
    main()
