"""The check `disk`: room for a run's checkpoints, and how fast they are written."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from typing import Any

from jaxscale.cluster.group import Group, barrier
from jaxscale.jobs.preflight.finding import Facts, Finding, Results
from jaxscale.jobs.preflight.shared_files import attempt
from jaxscale.metrics.text import byte_size

_DEFAULT = 256 << 20  # bytes of a checkpoint without a config
_MOST = 8 << 30  # bytes to write for larger checkpoints, enough to measure the speed
_MOST_S = 10.0  # seconds after which a host stops writing
_SYNCED = 1 << 26  # bytes between syncs, a multiple of a block


def measure(group: Group, options: Any, facts: Facts) -> dict[str, Any] | None:
  """Write and fsync as much as a checkpoint, in equal parts on all hosts.

  Returns:
    {"bytes", "seconds", "free", "files"} of this host, with "error" if it could not write;
    {} in processes that are not the first of their host; None if the workdir is unusable.
  """
  if facts.get("unusable"):
    return None
  workdir, size = options.workdir, min(facts.get("bytes", _DEFAULT), _MOST)
  path = workdir.absolute() / f".preflight-{group.rank}-{secrets.token_hex(4)}"
  error = ""
  if group.rank == 0:
    error = attempt(lambda: workdir.mkdir(parents=True, exist_ok=True))
  barrier(group, "disk: write")
  if not group.acts:
    return {}
  part, written = -(-size // len(group.host_ranks)), 0
  # Random bytes, since a compressing file system would write almost nothing.
  block = memoryview(secrets.token_bytes(min(part, 1 << 22) or 1))
  began = time.monotonic()
  try:
    room = os.statvfs(workdir)
    with open(path, "wb", buffering=0) as file:
      while written < part and time.monotonic() - began < _MOST_S:
        written += file.write(block[: part - written])
        if written % _SYNCED == 0 or written == part:  # keeps the last sync short
          os.fsync(file.fileno())
      os.fsync(file.fileno())
  except OSError as e:
    return {"error": error or e.strerror or str(e), "bytes": written}
  finally:
    seconds = time.monotonic() - began
    attempt(lambda: path.unlink(missing_ok=True))  # fails on a read-only file system
  # Some file systems (btrfs) do not count inodes and report 0 of 0.
  files = room.f_favail if room.f_files else None
  free = room.f_bavail * room.f_frsize
  return {"bytes": written, "seconds": seconds, "free": free, "files": files}


def findings(results: Results, group: Group, options: Any, facts: Facts) -> list[Finding]:
  """Return findings on the results of `measure`, which are by rank."""
  prefix = f"workdir {options.workdir}: "
  size = facts.get("bytes", _DEFAULT)
  least = size * facts.get("kept", 1)  # of all checkpoints that are kept
  by_host = {group.hosts[rank]: results[rank] for rank in group.host_ranks}
  wrong = []
  for host, each in by_host.items():
    if error := each.get("error"):
      text = f"{prefix}{host} wrote {byte_size(each['bytes'])} of its part of "
      remedy = f"make room or raise the quota there ({byte_size(least)} are needed), "
      remedy += "or use a different --workdir"
      wrong.append(Finding(False, f"{text}{byte_size(size)}, then: {error}", remedy))
  if wrong:
    return wrong
  free = min(each["free"] for each in by_host.values())
  text = f"{prefix}{byte_size(free)} free, {byte_size(least)} needed"
  remedy = f"make room for {byte_size(least)} there, or use a different --workdir"
  result = [Finding(free >= least, text, remedy)]
  files = [e["files"] for e in by_host.values() if e["files"] is not None]
  if files and min(files) < 10_000:
    text = f"{prefix}only {min(files):,} more files are allowed"
    result.append(Finding(False, text, "remove files there, or raise the quota"))
  rates = {h: each["bytes"] / max(each["seconds"], 1e-9) for h, each in by_host.items()}
  usual = statistics.median(rates.values())
  for host, rate in rates.items():
    if len(rates) > 2 and rate < usual / 5:
      text = f"{prefix}{host} writes {byte_size(rate)}/s, the median host "
      remedy = f"exclude {host} and report it"
      result.append(Finding(False, f"{text}{byte_size(usual)}/s", remedy))
  total = sum(each["bytes"] for each in by_host.values())
  rate = total / max(each["seconds"] for each in by_host.values())
  text = f"{prefix}{byte_size(total)} written and synced at {byte_size(rate)}/s; a "
  text += f"checkpoint of {byte_size(size)} takes {size / rate:.1f} s"
  return [*result, Finding(True, text)]
