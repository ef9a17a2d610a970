"""Cost of authentication between processes: the start, and each message.

    python benchmarks/rendezvous.py --before DIR [--procs 8] [--turns 15]

DIR is a checkout of an earlier commit. Processes of this one and of that one connect
on loopback in turns; a turn is the time from when all have imported what they need to
when the last has connected. `start_ms` has the medians. `message_us` is what sealing
and opening one heartbeat takes; a process sends one a second, so that is the share of a
second, and of any step, that it takes.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import timeit
from pathlib import Path

from common import report

CHILD = """
import sys, time
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous.client import rendezvous
rank, of, job = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("up", flush=True)
sys.stdin.readline()
group = rendezvous(Launch("test", rank, of, "127.0.0.1", 0, 1, job))
print(time.monotonic(), flush=True)
sys.stdin.readline()
"""


def start_s(tree: Path, count: int, job: str) -> float:
  """Return the seconds until all processes of a run have connected."""
  import time

  env = os.environ | {"PYTHONPATH": str(tree), "JAXSCALE_SECRET": "x" * 32}
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", CHILD, str(rank), str(count), job],
      env=env,
      cwd=tree,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for rank in range(count)
  ]
  for process in processes:
    assert process.stdout and process.stdout.readline() == "up\n"
  began = time.monotonic()
  for process in processes:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()
  ends = [float(process.stdout.readline()) for process in processes if process.stdout]
  for process in processes:
    process.communicate("end\n")
  return max(ends) - began


def message_s() -> float:
  """Return the seconds that sealing and opening a heartbeat takes, less the time without keys."""
  from jaxscale.cluster.wire import Keys, Link

  here, there = map(Link, socket.socketpair())
  message = {"beat": [17, "step", 0, 0.0123, 1.234567, 16]}

  def exchange() -> None:
    here.send(message)
    there.receive(None)

  plain = min(timeit.repeat(exchange, number=2000, repeat=9)) / 2000
  here.seal(Keys(b"a" * 32, b"b" * 32)), there.seal(Keys(b"b" * 32, b"a" * 32))
  return min(timeit.repeat(exchange, number=2000, repeat=9)) / 2000 - plain


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--before", type=Path, required=True)
  parser.add_argument("--procs", type=int, default=8)
  parser.add_argument("--turns", type=int, default=15)
  args = parser.parse_args()
  trees = {"before": args.before.resolve(), "now": Path(__file__).parents[1].resolve()}
  took: dict[str, list[float]] = {name: [] for name in trees}
  for turn in range(args.turns):
    for name, tree in trees.items():
      took[name].append(start_s(tree, args.procs, f"bench-{os.getpid()}-{turn}-{name}"))
  report(
    "rendezvous",
    processes=args.procs,
    start_ms={n: round(1e3 * statistics.median(t), 1) for n, t in took.items()},
    turns_ms={n: [round(1e3 * s, 1) for s in t] for n, t in took.items()},
    message_us=round(1e6 * message_s(), 2),
  )


if __name__ == "__main__":
  main()
