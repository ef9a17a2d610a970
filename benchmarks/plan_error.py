"""Plans of training steps against their measurement, on this machine.

    python benchmarks/plan_error.py chip
    python benchmarks/plan_error.py measure --links loopback     (1gbit, 100mbit: root)
    python benchmarks/plan_error.py predict

`chip` is `jaxscale plan --calibrate` in two processes with a core each. `measure`
starts two such processes, joined by a link (private_links.py), and measures the link;
and two more for each of its cases, whose step they measure.
`predict` plans each case, with what was measured of chip and link alone, and prints
both. None of the cases is calibrated on. Errors of those marked "seen" were looked
at while the planner was made, those of the others only at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import private_links
from common import free_address, report
from plan_error_cases import CASES, LOOPBACK, MARK, PROCS, Case, config_of

FOLDER = Path("runs/plan_error")


def chip() -> None:
  """Measures processor and loopback by the command that a user types."""
  command = [sys.executable, "-m", "jaxscale", "plan", "--calibrate"]
  address, started = free_address(), []
  for i in range(PROCS):
    env = os.environ | joined(address, i)
    started.append(
      subprocess.Popen(
        [*command, "--site", str(FOLDER / "chip.toml")], env=env,
        preexec_fn=lambda i=i: os.sched_setaffinity(0, {i}),
      )
    )  # fmt: skip
  if any([process.wait() for process in started]):
    raise SystemExit("not calibrated: see above")


def joined(coordinator: str, index: int) -> dict[str, str]:
  """The environment of a process: one device, one thread, and where the others are."""
  return {
    "JAX_NUM_CPU_DEVICES": "1", "NPROC": "1", "JAXSCALE_COORDINATOR": coordinator,
    "JAXSCALE_NUM_PROCESSES": str(PROCS), "JAXSCALE_PROCESS_ID": str(index),
  }  # fmt: skip


def measure(link: str, only: str) -> None:
  """Measures a link and the cases of it."""
  if link != LOOPBACK and (reason := private_links.why_not()):
    raise SystemExit(f"{link} left out: {reason}")
  names = [c.name for c in CASES if c.link == link and only in c.name]
  # Each in processes of its own, as a run is: what others leave in a process's memory
  # slows a step.
  for cases in ([], *([name] for name in names)):
    together(link, cases)


def together(link: str, cases: list[str]) -> None:
  """Two processes measure cases; the link, if there are none."""
  private = link != LOOPBACK
  port = free_address().rpartition(":")[2]
  host = private_links.address(0) if private else "127.0.0.1"
  started: list[Any] = []
  try:
    bridge = private_links.switch() if private else None
    started += [bridge] * private
    for i in range(PROCS):
      request = {"core": i, "cases": cases, "turns": 5, "budget_s": 2.0}
      worker = [sys.executable, str(Path(__file__).with_name("plan_error_cases.py"))]
      worker.append(json.dumps(request))
      env = os.environ | joined(f"{host}:{port}", i)
      program = private_links.command(i, worker) if private else worker
      pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
      started.append(subprocess.Popen(program, env=env, **pipes))
      if private:
        private_links.connect(bridge, i, started[-1], link)
    for line in started[-PROCS].stdout:
      if line.startswith(MARK):
        keep(link, json.loads(line.removeprefix(MARK)))
  finally:
    for process in reversed(started):
      process.kill()
      process.wait()


def keep(link: str, found: dict[str, Any]) -> None:
  """What a worker says, at once: what follows may fail."""
  print(found if "case" in found else "links", file=sys.stderr, flush=True)
  path = FOLDER / f"{link}.json"
  record = json.loads(path.read_text()) if path.exists() else {"cases": {}}
  if "case" in found:
    record["cases"][found["case"]] = found
  else:
    record |= found
  path.write_text(json.dumps(record))


def predict(case: Case) -> dict[str, Any]:
  """A case's plan, from what was measured of chip and link."""
  from jaxscale.launch.site import load_site
  from jaxscale.launch.site_file import write_machine
  from jaxscale.planning.measured import Table
  from jaxscale.planning.plan import make_plan

  measured = json.loads((FOLDER / f"{case.link}.json").read_text())
  site = FOLDER / "chip.toml"
  machine = load_site(str(site)).machine
  assert machine
  if case.link != LOOPBACK:
    links = measured["links"]
    near = [t for t in machine.tables if t.form != "network"]
    tables = [*near, *(Table(**t) for t in links["tables"])]
    text, site = site.read_text(), FOLDER / f"{case.link}.toml"
    site.write_text(text)
    write_machine(site, links | {"tables": tables})
    machine = load_site(str(site)).machine
  plan = make_plan(config_of(case), f"cpu-{PROCS}", machine=machine, nodes=(PROCS,))
  seconds = plan.step.seconds
  found = measured["cases"].get(case.name)
  return case._asdict() | {
    "planned_ms": round(1e3 * seconds["expected"], 2),
    "low_ms": round(1e3 * seconds["high"], 2),
    "high_ms": round(1e3 * seconds["low"], 2),
    "measured_ms": round(1e3 * found["seconds"], 2) if found else None,
    "parts_ms": {n: round(1e3 * s, 2) for n, s in plan.step.parts.items()},
  }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Median and worst error, in percent."""
  errors = [abs(r["planned_ms"] / r["measured_ms"] - 1) for r in rows]
  if not errors:
    return {"cases": 0}
  inside = sum(r["low_ms"] <= r["measured_ms"] <= r["high_ms"] for r in rows)
  return {
    "cases": len(rows), "median": round(100 * statistics.median(errors), 1),
    "worst": round(100 * max(errors), 1), "in_range": inside,
  }  # fmt: skip


def show(row: dict[str, Any]) -> None:
  """A row of the table."""
  error = 100 * (row["planned_ms"] / row["measured_ms"] - 1)
  print(
    f"| {row['model']} | {row['way']} | {row['link']} | {row['measured_ms']:.1f} | "
    f"{row['planned_ms']:.1f} ({row['low_ms']:.1f} to {row['high_ms']:.1f}) | "
    f"{error:+.0f}% | {'seen' if row['seen'] else 'unseen'} |",
    file=sys.stderr, flush=True,
  )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("what", choices=("chip", "measure", "predict"))
  parser.add_argument("--links", default="loopback,1gbit,100mbit")
  parser.add_argument("--only", default="", help="cases whose name has this")
  parser.add_argument("--seen", action="store_true", help="only those")
  asked = parser.parse_args()
  FOLDER.mkdir(parents=True, exist_ok=True)
  if asked.what == "chip":
    return chip()
  if asked.what == "measure":
    for link in asked.links.split(","):
      measure(link, asked.only)
    return None
  os.environ |= {"JAX_NUM_CPU_DEVICES": str(PROCS), "NPROC": "1"}
  rows = []
  for case in CASES:
    is_measured = (FOLDER / f"{case.link}.json").exists()
    if is_measured and asked.only in case.name and (case.seen or not asked.seen):
      row = predict(case)
      if row["measured_ms"] is not None:
        rows.append(row)
        show(row)
  seen, unseen = ([r for r in rows if r["seen"] is s] for s in (True, False))
  report(
    "plan_error", keep=not asked.seen and not asked.only, rows=rows,
    seen=summary(seen), unseen=summary(unseen), all=summary(rows),
  )  # fmt: skip
  return None


if __name__ == "__main__":
  main()
