"""Is this allocation ready for a job? Everything that is looked at before it.

    srun --ntasks-per-node=1 jaxscale doctor --workdir DIR --config FILE

All processes take part, process 0 prints, and all end with the same exit code: 0
ready, 2 not. What needs no JAX comes first and takes a second or two; JAX is only
asked in child processes, so nothing that ends it can end the preflight.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import EXIT_DONE
from jaxscale.preflight import clocks, devices, disk, pairs, slow, software, storage
from jaxscale.preflight.finding import EXIT_NOT_READY, Finding, bytes_text, report
from jaxscale.preflight.group import Group, barrier, broadcast, gather, make_group

CHECKS = {
  "software": "versions, limits of the system, GPUs that others use",
  "clocks": "offset of every host's clock to process 0",
  "network": "latency and bandwidth between all pairs of hosts",
  "files": "the workdir is shared, renames atomically, creates exclusively",
  "devices": "number, kind and a tiny program on each; XLA's flags; the data",
  "disk": "room for checkpoints and how fast one is written",
}
_PART = 256 << 20  # bytes written where no config says how large a checkpoint is
_MOST_PART = 8 << 30  # bytes written of a larger one: its speed is known by then


class Options(NamedTuple):
  """What the preflight is asked.

  Attributes:
    workdir: of the run, or where its workdirs will be.
    config: `FILE[:arg]` that is to run; None: whatever does.
    overrides: of the config, as text by dotted field.
    skip: checks to leave out, names of `CHECKS`.
    limits: of the network.
  """

  workdir: Path = Path()
  config: str | None = None
  overrides: Mapping[str, str] = {}
  skip: tuple[str, ...] = ()
  limits: slow.Limits = slow.Limits()


def check(options: Options) -> int:
  """Look at everything with all processes of the job; returns the exit code."""
  from jaxscale.cluster import detect
  from jaxscale.cluster.rendezvous import client

  began = time.monotonic()
  launch = detect.detect(os.environ)
  meeting = client.rendezvous(launch)
  group = make_group(meeting.process_id, meeting.hosts, meeting.links)
  findings = [launched(group, launch.kind, time.monotonic() - began)]
  findings += run(group, options)
  if group.rank == 0:
    report("preflight", findings)
    sys.stdout.flush()
  # A launcher may end all as soon as one fails: not before process 0 has spoken.
  barrier(group, "said")
  return EXIT_DONE if all(f.ok for f in findings) else EXIT_NOT_READY


def launched(group: Group, kind: str, seconds: float) -> Finding:
  """The line that says who takes part."""
  hosts = [group.hosts[rank] for rank in group.first_of_host]
  shown = ", ".join(hosts[:4]) + (f" … {hosts[-1]}" if len(hosts) > 4 else "")
  processes = f"{len(group.hosts)} processes" if len(group.hosts) > 1 else "1 process"
  on = f"{len(hosts)} hosts" if len(hosts) > 1 else "1 host"
  met = f", met in {seconds:.1f} s" if group.links else ""
  return Finding(True, f"launch: {kind}, {processes} on {on} ({shown}){met}")


def run(group: Group, options: Options) -> list[Finding]:
  """Look at everything; all processes call it and get the same findings.

  Args:
    group: who takes part.
    options: what is asked.

  Raises:
    ConfigError: a process was lost on the way.

  Example:
    >>> run(make_group(0, ["n1"], {}), Options(skip=tuple(CHECKS)))
    []
  """
  findings: list[Finding] = []
  wanted = [name for name in CHECKS if name not in options.skip]
  state: dict[str, Any] = {"bytes": None, "kept": 1, "software": []}
  for name in wanted:
    findings += _STEPS[name](group, options, state)
  return [Finding(*f) for f in broadcast(group, "findings", findings)]


def _software(group: Group, options: Options, state: dict[str, Any]) -> list[Finding]:
  del options
  state["software"] = gather(group, "software", software.probe())
  if group.rank:
    return []
  return software.judge(state["software"], group.hosts)


def _clocks(group: Group, options: Options, state: dict[str, Any]) -> list[Finding]:
  del options, state
  return clocks.judge(clocks.measure(group), group.hosts)


def _network(group: Group, options: Options, state: dict[str, Any]) -> list[Finding]:
  del state
  measured = pairs.measure(group, options.limits)
  return [] if group.rank else slow.judge(measured, group.hosts, options.limits)


def _files(group: Group, options: Options, state: dict[str, Any]) -> list[Finding]:
  found = gather(group, "files", storage.probe(group, options.workdir))
  if group.rank:
    return []
  findings = storage.judge(found, group, options.workdir)
  state["unusable"] = "error" in found[0]
  return findings


def _devices(group: Group, options: Options, state: dict[str, Any]) -> list[Finding]:
  asked = {"config": options.config, "overrides": dict(options.overrides)}
  found = gather(group, "devices", devices.finish(devices.start("look", asked, {})))
  if group.rank:
    return []
  findings = devices.judge(found, state["software"], group.hosts)
  if options.config is None or not all(f.ok for f in findings):
    return findings
  # What the config becomes on so many devices, simulated on the CPU of process 0.
  total = sum(each["count"] for each in found)
  env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(total), "XLA_FLAGS": ""}
  asked |= {"workdir": str(options.workdir)}
  fits = devices.finish(devices.start("fits", asked, env))
  state |= fits
  if error := fits.get("error"):
    text = f"config {options.config} on {total} devices: {error}"
    return [
      *findings,
      Finding(False, text, "change the config, or ask for other nodes"),
    ]
  text = f"config {options.config} fits {total} devices, its checkpoints have "
  return [*findings, Finding(True, text + bytes_text(fits["bytes"]))]


def _disk(group: Group, options: Options, state: dict[str, Any]) -> list[Finding]:
  told = {"size": state["bytes"], "leave": state.get("unusable", False)}
  told = broadcast(group, "disk: size", told)
  if told["leave"]:  # said already
    return []
  size = told["size"] or _PART
  written = min(size, _MOST_PART)
  found = gather(group, "disk", disk.measure(group, options.workdir, written))
  if group.rank:
    return []
  return disk.judge(found, group, options.workdir, size, size * state["kept"])


_STEPS = {
  "software": _software,
  "clocks": _clocks,
  "network": _network,
  "files": _files,
  "devices": _devices,
  "disk": _disk,
}
