"""Each gradient exchange against plain `lax.psum`, across real processes.

    python benchmarks/exchange.py [--procs 4] [--rounds 7] [--pairs 31]
                                  [--links loopback,1gbit] [--only NAME,NAME]

The gradient is ResNet-50's: 161 tensors, 25.6 M float32. Every process has one CPU
device; they are joined by jax.distributed and gloo, over the loopback and then, as
root on Linux, over links of 1 Gbit/s (private_links.py). Programs are compiled
before, and called in turns; a call counts as long as the slowest process took. A
ratio is that of a turn to the baseline, `lax.psum` of the tree, of the same turn:
the median over turns, and quartiles. The default exchange and the baseline are also
compared in more turns, those two alone. Bytes are read from the compiled program.

All processes share the cores of one machine. Over the loopback the table so says
what the exchanges compute and copy, and little about networks: compressed ones cost
work there that hides behind no transfer. Over slow links it says what they save,
still with less compute than a machine of each process's own would have.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import private_links
from common import report
from exchange_worker import BASELINE, DEFAULT, MARK, NAMES

LOOPBACK = "loopback"
NOTE = (
  "{procs} processes share {cores} cores: over the loopback this is about work, not "
  "networks; the rated links have a bandwidth at both ends, but no added latency"
)


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--procs", type=int, default=4, help="processes, 2 or more")
  parser.add_argument("--rounds", type=int, default=7, help="turns of all")
  parser.add_argument("--pairs", type=int, default=31, help="turns of the default")
  parser.add_argument(
    "--links", default=f"{LOOPBACK},1gbit", help="loopback or rates as tc has them"
  )
  parser.add_argument("--only", default="", help="names of exchanges, with commas")
  asked = parser.parse_args()
  some = [n for n in asked.only.split(",") if n and n not in NAMES[:2]]
  asked.names = [*NAMES[:2], *some] if asked.only else list(NAMES)
  if unknown := [n for n in asked.names if n not in NAMES]:
    parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(NAMES)}")
  if min(asked.procs - 1, asked.rounds, asked.pairs) < 1:
    parser.error("give --procs >= 2, --rounds >= 1, --pairs >= 1")
  return asked


@contextmanager
def processes(asked: argparse.Namespace, link: str) -> Iterator[list[Any]]:
  """Start the workers, joined by a link, and end all of them on exit."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  private = link != LOOPBACK
  host = private_links.address(0) if private else "127.0.0.1"
  request = json.dumps({x: getattr(asked, x) for x in ("names", "rounds", "pairs")})
  worker = [sys.executable, str(Path(__file__).with_name("exchange_worker.py")), request]
  started = []
  try:
    if private:
      bridge = private_links.switch()
      started.append(bridge)
    for i in range(asked.procs):
      env = os.environ | {
        "JAX_NUM_CPU_DEVICES": "1",
        "JAXSCALE_COORDINATOR": f"{host}:{port}",
        "JAXSCALE_NUM_PROCESSES": str(asked.procs),
        "JAXSCALE_PROCESS_ID": str(i),
      }
      program = private_links.command(i, worker) if private else worker
      pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
      started.append(subprocess.Popen(program, env=env, **pipes))
      if private:
        private_links.connect(bridge, i, started[-1], link)
    yield started[-asked.procs :]
  finally:
    for process in reversed(started):  # the coordinator after those who watch it
      process.kill()
      process.wait()


def answers(workers: list[Any]) -> list[Any]:
  """Return the next answer of each worker."""
  found = []
  for worker in workers:
    line = next((x for x in worker.stdout if x.startswith(MARK)), None)
    if line is None:
      raise SystemExit(f"a process ended with {worker.wait()}: see above")
    found.append(json.loads(line.removeprefix(MARK)))
  return found


def go(workers: list[Any]) -> None:
  for worker in workers:
    worker.stdin.write("go\n")
    worker.stdin.flush()


def measure(asked: argparse.Namespace, link: str) -> dict[str, Any]:
  with processes(asked, link) as workers:
    answers(workers)
    log(f"{link}: compiling {len(asked.names)} exchanges")
    for some in (workers[:1], workers[1:]):  # the first has the cores to itself
      go(some)
      answers(some)
    log(f"{link}: {asked.pairs} turns of the default, {asked.rounds} of all")
    go(workers)
    return answers(workers)[0]


def log(text: str) -> None:
  """Print text for people to stderr; stdout has only the JSON line."""
  print(text, file=sys.stderr, flush=True)


def ratios(times: dict[str, list[float]], name: str) -> dict[str, Any]:
  """Return the times of a row, and their ratios to the baseline in each turn."""
  each = [a / b for a, b in zip(times[name], times[BASELINE], strict=True)]
  quartiles = statistics.quantiles(each, n=4, method="inclusive") if each[1:] else each
  return {
    "seconds": round(statistics.median(times[name]), 4),
    "ratio": round(statistics.median(each), 3),
    "quartiles": [round(quartiles[0], 3), round(quartiles[-1], 3)],
  }


def table(measured: dict[str, Any]) -> dict[str, Any]:
  """Return the stored results of a link's measurements."""
  rows = [
    {"exchange": name, **ratios(measured["rounds"], name), **facts}
    for name, facts in measured["rows"].items()
  ]
  pair = ratios(measured["pairs"], DEFAULT)
  baseline = statistics.median(measured["pairs"][BASELINE])
  turns = {n: [round(t, 4) for t in ts] for n, ts in measured["pairs"].items()}
  return {
    "neighbour_gbit_s": measured["link"],
    "default": {**pair, "baseline_seconds": round(baseline, 4), "turns": turns},
    "rows": rows,
  }


def show(link: str, found: dict[str, Any]) -> None:
  """Print the results as a table."""
  default = found["default"]
  low, high = default["quartiles"]
  log(
    f"\n{link}: {found['neighbour_gbit_s']} Gbit/s to a neighbour; the default takes "
    f"{default['ratio']} of the baseline ({low} to {high})"
  )
  log(f"{'exchange':26}{'seconds':>9}{'ratio':>8}  {'quartiles':14}{'sent MB':>9}{'compile s':>11}")
  for row in found["rows"]:
    quartiles = "{:.3f}-{:.3f}".format(*row["quartiles"])
    log(
      f"{row['exchange']:26}{row['seconds']:9.3f}{row['ratio']:8.3f}  {quartiles:14}"
      f"{row['sent_mb']:9.2f}{row['compile_s']:11.1f}"
    )


def main() -> None:
  asked = parse()
  links, left_out = {}, {}
  for link in asked.links.split(","):
    if link != LOOPBACK and (reason := private_links.why_not()):
      left_out[link] = reason
      log(f"{link} left out: {reason}")
      continue
    links[link] = table(measure(asked, link))
    show(link, links[link])
  cores = len(os.sched_getaffinity(0))
  report(
    "exchange",
    note=NOTE.format(procs=asked.procs, cores=cores),
    procs=asked.procs,
    rounds=asked.rounds,
    pairs=asked.pairs,
    links=links,
    links_left_out=left_out,
  )


if __name__ == "__main__":
  main()
