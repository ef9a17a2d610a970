"""Processes that reach each other only through links of a given rate.

Every process has a network namespace of its own, as a machine has: one card `eth0`
(a veth) on a switch (a bridge in one more namespace), and the token bucket of
`tc` at both ends of the cable, so that a process neither sends nor receives faster
than the rate. Only bandwidth is imitated: latency is the kernel's, some 50 us, and
all processes still share the cores of one machine. Nothing outside of the
namespaces changes, and they vanish with their processes.

Needs Linux, root, and `ip`, `tc`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any

NET = "10.77.0."  # exists in the namespaces alone
# TCP hands down segments of 64 KB, and a bucket below that cuts them into packets, so
# that the processor is what is measured. What a full bucket has is sent at once, which
# is much for the small messages of a step: hence smaller segments, and a bucket above
# one of them. The queue takes all that TCP has on its way, so that nothing is lost.
SEGMENT, BUCKET = "16000", ("burst", "24k", "limit", "2mb")
# TCP as every Linux has it, whatever this machine's is set to: of BBR, say, a message
# takes 351 or 413 ms, as its phase is.
TCP = " && ".join(
  f"echo {value} > /proc/sys/net/ipv4/tcp_{name}"
  for name, value in {"congestion_control": "reno", "limit_output_bytes": 2**20}.items()
)
# gloo listens on what the host's name resolves to: the address itself.
START = f'{TCP} && hostname "$0" && read go && exec "$@"'


def why_not() -> str | None:
  """Return the reason that this machine cannot make such links, or None."""
  missing = [x for x in ("ip", "tc", "unshare", "nsenter") if not shutil.which(x)]
  if missing:
    return f"no {', '.join(missing)} here"
  if os.geteuid() != 0:
    return "network namespaces need root"
  steps = (
    TCP,
    "ip link add eth0 type veth peer name eth1",
    "ip link add br0 type bridge",
    f"tc qdisc add dev eth0 root tbf rate 1gbit {' '.join(BUCKET)}",
  )
  probe = " && ".join(steps)
  done = subprocess.run(
    ["unshare", "--net", "--uts", "sh", "-c", probe], capture_output=True, text=True
  )
  return f"the kernel refuses: {done.stderr.strip()}" if done.returncode else None


def switch() -> subprocess.Popen[str]:
  """Start a process whose namespace has the bridge; it ends with its stdin."""
  bridge = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, text=True)
  _wait_for_namespace(bridge)
  _inside(bridge, "ip link add br0 type bridge")
  _inside(bridge, "ip link set br0 up")
  return bridge


def address(index: int) -> str:
  """Return the address of a process."""
  return f"{NET}{index + 1}"


def command(index: int, program: list[str]) -> list[str]:
  """Return a command that waits in a new namespace until `connect` is called."""
  start = ["unshare", "--net", "--uts", "sh", "-c", START]
  return [*start, address(index), *program]


def connect(bridge: Any, index: int, process: Any, rate: str) -> None:
  """Connect a process to the switch and let its program start.

  Args:
    bridge: the process from `switch`.
    index: the number of the process.
    process: a `Popen` of `command`, with a pipe for its stdin.
    rate: the rate as `tc` writes it, e.g. "1gbit".
  """
  _wait_for_namespace(process)
  port, bucket = f"v{index}", f"root tbf rate {rate} {' '.join(BUCKET)}"
  _inside(bridge, f"ip link add {port} type veth peer name eth0 netns {process.pid}")
  _inside(bridge, f"ip link set {port} gso_max_size {SEGMENT} master br0 up")
  _inside(bridge, f"tc qdisc add dev {port} {bucket}")
  _inside(process, f"ip addr add {address(index)}/24 dev eth0")
  _inside(process, f"tc qdisc add dev eth0 {bucket}")
  _inside(process, f"ip link set eth0 gso_max_size {SEGMENT} up")
  _inside(process, "ip link set lo up")
  process.stdin.write("go\n")
  process.stdin.flush()


def _inside(process: Any, words: str) -> None:
  subprocess.run(["nsenter", f"--net=/proc/{process.pid}/ns/net", *words.split()], check=True)


def _wait_for_namespace(process: Any) -> None:
  """Wait until the process has left the namespace that it was started in."""
  ours = os.readlink("/proc/self/ns/net")
  deadline = time.monotonic() + 10
  while os.readlink(f"/proc/{process.pid}/ns/net") == ours:
    if process.poll() is not None or time.monotonic() > deadline:
      raise RuntimeError("unshare did not make a network namespace")
    time.sleep(0.01)
