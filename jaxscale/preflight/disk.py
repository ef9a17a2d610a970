"""How much room a run has for its checkpoints, and how fast they are written."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.preflight.finding import Finding, bytes_text
from jaxscale.preflight.group import Group, barrier
from jaxscale.preflight.storage import attempt

_SYNCED = 1 << 26  # bytes between syncs, a multiple of a block


def measure(
  group: Group, workdir: Path, size: int, *, most_s: float = 10.0
) -> dict[str, Any]:
  """Write and fsync a checkpoint's worth, every host its part; all call it.

  Args:
    group: who takes part.
    workdir: where checkpoints will lie.
    size: bytes of a checkpoint, all hosts' parts together.
    most_s: seconds after which a host stops writing.

  Returns:
    {"bytes", "seconds", "free", "files"} of this host, "error" if it could not
    write; {} in processes that are not the first of their host.
  """
  path = workdir.absolute() / f".preflight-{group.rank}-{secrets.token_hex(4)}"
  error = ""
  if group.rank == 0:
    error = attempt(lambda: workdir.mkdir(parents=True, exist_ok=True))
  barrier(group, "files: write")
  if not group.speaks:
    return {}
  part, written = -(-size // len(group.first_of_host)), 0
  # Random, or a file system that compresses would write nothing.
  block = memoryview(secrets.token_bytes(min(part, 1 << 22) or 1))
  began = time.monotonic()
  try:
    free = os.statvfs(workdir)
    with open(path, "wb", buffering=0) as file:
      while written < part and time.monotonic() - began < most_s:
        written += file.write(block[: part - written])
        if written % _SYNCED == 0 or written == part:  # so that time stays bounded
          os.fsync(file.fileno())
      os.fsync(file.fileno())
  except OSError as e:
    return {"error": error or e.strerror or str(e), "bytes": written}
  finally:
    seconds = time.monotonic() - began
    attempt(lambda: path.unlink(missing_ok=True))  # a read-only one minds even that
  return {
    "bytes": written,
    "seconds": seconds,
    "free": free.f_bavail * free.f_frsize,
    # Some file systems (btrfs) count no inodes and say 0 of 0.
    "files": free.f_favail if free.f_files else None,
  }


def judge(
  found: Sequence[dict[str, Any]],
  group: Group,
  workdir: Path,
  size: int,
  needed: int,
) -> list[Finding]:
  """What is said of what `measure` found, by rank.

  Args:
    found: by rank.
    group: who took part.
    workdir: where.
    size: bytes of a checkpoint.
    needed: bytes that are to be free, for all checkpoints that are kept.
  """
  hosts, findings = group.hosts, []
  for rank in group.first_of_host:
    if error := found[rank].get("error"):
      findings.append(
        Finding(
          False,
          f"workdir {workdir}: {hosts[rank]} wrote {bytes_text(found[rank]['bytes'])} "
          f"of its part of {bytes_text(size)}, then: {error}",
          f"make room or raise the quota there ({bytes_text(needed)} are needed), or "
          "give another --workdir",
        )
      )
  if findings:
    return findings
  each = {rank: found[rank] for rank in group.first_of_host}
  free = min(f["free"] for f in each.values())
  room = f"workdir {workdir}: {bytes_text(free)} free, {bytes_text(needed)} needed"
  remedy = f"make room for {bytes_text(needed)} there, or give another --workdir"
  findings.append(Finding(free >= needed, room, remedy))
  if (files := [f["files"] for f in each.values() if f["files"] is not None]) and (
    min(files) < 10_000
  ):
    text = f"workdir {workdir}: only {min(files):,} more files are allowed"
    findings.append(Finding(False, text, "remove files there, or raise the quota"))
  rates = {rank: f["bytes"] / max(f["seconds"], 1e-9) for rank, f in each.items()}
  usual = statistics.median(rates.values())
  for rank, rate in rates.items():
    if len(rates) > 2 and rate < usual / 5:
      text = f"workdir {workdir}: {hosts[rank]} writes {bytes_text(rate)}/s, "
      text += f"the median host {bytes_text(usual)}/s"
      findings.append(Finding(False, text, f"leave {hosts[rank]} out and report it"))
  total = sum(f["bytes"] for f in each.values())
  rate = total / max(f["seconds"] for f in each.values())
  text = f"workdir {workdir}: {bytes_text(total)} written and synced at "
  text += f"{bytes_text(rate)}/s; a checkpoint of {bytes_text(size)} takes "
  text += f"{size / rate:.1f} s"
  return [*findings, Finding(True, text)]
