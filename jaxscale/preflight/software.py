"""What runs on every process: versions, names, limits of the system, GPUs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxscale.cluster.rendezvous import handshake, network
from jaxscale.preflight.finding import Finding, bytes_text

PACKAGES = (
  "jax", "jaxlib", "jaxscale", "flax", "optax", "orbax-checkpoint",
  "tensorflow-datasets", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin",
  "nvidia-nccl-cu12", "nvidia-nccl-cu13", "libtpu",
)  # fmt: skip
_SMI_S = 15.0  # the driver loads for seconds where persistence mode is off
# NCCL keeps its buffers between processes of a node in /dev/shm, and says of
# Docker's 64 MiB that they are too few: docs.nvidia.com/deeplearning/nccl,
# "Troubleshooting", "Shared memory", whose remedy is --shm-size=1g.
_LEAST_SHM = 1 << 30
_NOTHING = "nothing"  # what a name stands for that does not resolve


def probe() -> dict[str, Any]:
  """What this process has, as JSON."""
  driver, gpus = nvidia()
  return {
    "versions": versions() | ({"NVIDIA driver": driver} if driver else {}),
    "hostname": socket.gethostname(),
    "loopback": loopback(socket.gethostname()),
    "place": network.place(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    "infiniband": bool(_entries("/sys/class/infiniband")),
    "shm": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    "gpus": gpus,
  }


def versions() -> dict[str, str]:
  """Versions of Python and of the packages that are installed."""
  return handshake.versions(PACKAGES)


def loopback(name: str) -> str:
  """The loopback address that a host's own name stands for; "" if it is no such.

  Gloo, and NCCL's bootstrap by default of interfaces, tell others the address that
  the host's name has here (measured: "Connection refused, remote=[127.0.0.1]").
  """
  try:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
  except OSError as e:
    return f"{_NOTHING} ({e.strerror or e})"
  addresses = [str(info[4][0]) for info in found]
  local = [a for a in addresses if a.startswith("127.") or a == "::1"]
  return local[0] if local and len(local) == len(addresses) else ""


def _entries(directory: str) -> list[str]:
  try:
    return sorted(os.listdir(directory))
  except OSError:
    return []


def nvidia() -> tuple[str, list[dict[str, Any]]]:
  """The driver's version, and each visible GPU: who is on it, memory, errors.

  By `nvidia-smi`, which knows nothing of CUDA_VISIBLE_DEVICES: GPUs that it hides
  by number or UUID are left out here. Call it before anything of ours uses one.
  """
  gpus = _smi("gpu", "index,uuid,name,driver_version,memory.used,memory.total,"
              "ecc.errors.uncorrected.volatile.total")  # fmt: skip
  if not gpus:
    return "", []
  processes = _smi("compute-apps", "gpu_uuid,pid,used_memory,process_name")
  found = []
  for index, uuid, name, _, used, total, errors in (
    row for row in gpus if len(row) == 7
  ):
    if not _visible(index, uuid, os.environ.get("CUDA_VISIBLE_DEVICES")):
      continue
    on_it = [row for row in processes if len(row) == 4 and row[0] == uuid]
    found.append(
      {
        "index": index,
        "name": name,
        "used": _mib(used),
        "total": _mib(total),
        "errors": int(errors) if errors.isdigit() else 0,
        "processes": [f"{row[1]} ({row[3]}, {row[2]} MiB)" for row in on_it],
      }
    )
  return gpus[0][3], found


def _smi(what: str, fields: str) -> list[list[str]]:
  """Rows of `nvidia-smi --query-...`; [] where there is none."""
  command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=_SMI_S, check=True
    )
  except (OSError, subprocess.SubprocessError):
    return []
  return [re.split(r",\s*", line.strip()) for line in done.stdout.splitlines() if line]


def _visible(index: str, uuid: str, chosen: str | None) -> bool:
  """Whether CUDA_VISIBLE_DEVICES leaves a GPU visible (indices or UUID prefixes)."""
  if chosen is None:
    return True
  names = [name.strip() for name in chosen.split(",") if name.strip()]
  return any(name == index or (name[:4] in ("GPU-", "MIG-") and uuid.startswith(name))
             for name in names)  # fmt: skip


def _mib(text: str) -> int:
  return int(float(text) * 2**20) if re.fullmatch(r"[\d.]+", text) else 0


def judge(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[Finding]:
  """What is said of it; both by rank."""
  return [
    *_versions(found, hosts),
    *_names(found, hosts),
    *_limits(found, hosts),
    *_gpus(found, hosts),
  ]


def _versions(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[Finding]:
  """Whose versions are not those that most have."""
  findings = []
  tables = [each["versions"] for each in found]
  usual = {}
  for name in dict.fromkeys(name for table in tables for name in table):
    count = Counter(table.get(name, "none") for table in tables)
    usual[name] = count.most_common(1)[0][0]
    for other in sorted(set(count) - {usual[name]}):
      ranks = [r for r, table in enumerate(tables) if table.get(name, "none") == other]
      findings.append(
        Finding(
          False,
          f"{name} {other} on {named(ranks, hosts)}, {usual[name]} on the others",
          f"install the same everywhere, e.g. pip install {name}=={usual[name]}"
          if name in PACKAGES
          else f"use nodes, or an environment, with the same {name}",
        )
      )
  same = "on all processes" if len(found) > 1 else "here"
  shown = ", ".join(f"{name} {usual[name]}" for name in usual)
  return findings or [Finding(True, f"versions {same}: {shown}")]


def _names(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[Finding]:
  """Hosts whose own name stands for loopback, where there are other hosts."""
  if len({each["hostname"] for each in found}) < 2:
    return []
  # Hosts of one place are so by name alone: loopback leads from each to each.
  apart = len({each["place"] for each in found}) > 1
  bad = {host: each["loopback"] for host, each in zip(hosts, found, strict=True)
         if each["loopback"] and (apart or each["loopback"].startswith(_NOTHING))
  }  # fmt: skip
  return [
    Finding(
      False,
      f"{host}: its own name stands for {address} there, which other hosts cannot "
      "reach",
      "take it off the line of 127.0.0.1 or 127.0.1.1 in /etc/hosts, or give it a name "
      f"that resolves, on {host}",
    )
    for host, address in bad.items()
  ]


def _limits(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[Finding]:
  """Limits that stop MPI, NCCL or many sockets later, with worse messages."""
  findings = []
  # Two sockets a process, files of data and of checkpoints; a run raises its soft
  # limit itself, up to the hard one.
  needed = 2 * len(hosts) + 256
  for host, each in dict(zip(reversed(hosts), reversed(found), strict=True)).items():
    if 0 <= (hard := each["files"][1]) < needed:
      findings.append(
        Finding(
          False,
          f"{host}: {hard} open files are allowed at most, {needed} may be needed",
          "raise the hard limit there (ulimit -Hn, LimitNOFILE of slurmd)",
        )
      )
    locked = each["locked"]
    if each["infiniband"] and locked != -1 and locked < 1 << 30:
      findings.append(
        Finding(
          False,
          f"{host}: {bytes_text(locked)} of memory may be locked, InfiniBand "
          "registers its buffers",
          "let slurmd start with LimitMEMLOCK=infinity, and PropagateResourceLimits"
          "Except=MEMLOCK in slurm.conf (ulimit -l unlimited)",
        )
      )
    if each["gpus"] and (shm := each["shm"]) is not None and shm < _LEAST_SHM:
      findings.append(
        Finding(
          False,
          f"{host}: /dev/shm has {bytes_text(shm)}, NCCL shares buffers there",
          "start the container with --shm-size=1g or more",
        )
      )
  return findings or [Finding(True, "limits: open files, locked memory, /dev/shm")]


def _gpus(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[Finding]:
  """GPUs that somebody else uses, or that have lost bits."""
  findings, seen = [], set()
  for host, each in zip(hosts, found, strict=True):
    for gpu in each["gpus"]:
      where = f"GPU {gpu['index']} of {host}"
      if where in seen:
        continue
      seen.add(where)
      busy = gpu["processes"]
      if busy or gpu["used"] > max(1 << 30, gpu["total"] // 10):
        who = f"process {', '.join(busy)}" if busy else "a process that is not seen"
        findings.append(
          Finding(
            False,
            f"{where}: {bytes_text(gpu['used'])} in use by {who}",
            f"end it, or leave {host} out",
          )
        )
      if gpu["errors"]:
        findings.append(
          Finding(
            False,
            f"{where}: {gpu['errors']} uncorrected memory errors since it was reset",
            f"leave {host} out and have the GPU reset",
          )
        )
  if seen and not findings:
    return [Finding(True, f"GPUs: {len(seen)} visible, nobody else on them")]
  return findings


def named(ranks: Sequence[int], hosts: Sequence[str], most: int = 8) -> str:
  """Processes with their hosts, as a message names them.

  Example:
    >>> named([1, 2], ["n1", "n1", "n2"])
    'process 1 (n1), process 2 (n2)'
  """
  shown = [f"process {rank} ({hosts[rank]})" for rank in ranks[:most]]
  more = len(ranks) - most
  return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
