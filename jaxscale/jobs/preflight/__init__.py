"""Preflight: checks of an allocation before a job.

All processes of the job take part, process 0 prints, and all end with the same exit code.
The checks without JAX come first and take a second or two. JAX runs in child processes
only, so that its aborts do not end the preflight. This package does not depend on the way
a job is submitted. A new check is a module with `measure` and `findings`, and a line in
`CHECKS`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.cluster.group import Group, barrier, broadcast, gather
from jaxscale.errors import EXIT_DONE, EXIT_USER
from jaxscale.jobs.preflight import devices, disk, shared_files, software
from jaxscale.jobs.preflight.finding import Facts, Finding, report
from jaxscale.metrics.text import few, plural

__all__ = ["CHECKS", "Check", "Options", "check", "run_checks"]


class Options(NamedTuple):
  """Options of the preflight.

  Attributes:
    workdir: the workdir of the run, or the directory of its workdirs.
    config: the config of the run as `FILE[:arg]`; None checks without a config.
    overrides: overrides of the config, as text by dotted field.
    skip: checks to skip, by name in `CHECKS`.
    trust: whether to execute code of a run that others could have written.
  """

  workdir: Path = Path()
  config: str | None = None
  overrides: Mapping[str, str] = {}
  skip: tuple[str, ...] = ()
  trust: bool = False


class Check(NamedTuple):
  """A check; `CHECKS` has all checks by name.

  Attributes:
    text: a description of the check.
    module: the module with `measure`, a function of the group, the options and the facts of
      earlier checks, which all processes call; it returns JSON values, or None in all
      processes to skip the check. Process 0 then calls `findings`, a function of the measured
      values by rank and of the same arguments. It may add facts, which all processes get.
  """

  text: str
  module: Any


CHECKS = {
  "software": Check("versions, system limits, GPUs already in use", software),
  "files": Check("the workdir is shared; atomic renames, exclusive creation", shared_files),
  "devices": Check("number, kind and a tiny program on each; XLA's flags; the data", devices),
  "disk": Check("room for checkpoints and how fast one is written", disk),
}


def check(options: Options) -> int:
  """Run all checks with all processes of the job; return the exit code."""
  from jaxscale.cluster import detect
  from jaxscale.cluster.rendezvous import client

  began = time.monotonic()
  launch = detect.detect(os.environ)
  connected = client.rendezvous(launch)
  group = Group(connected.process_id, tuple(connected.hosts), connected.links)
  acting = [group.hosts[rank] for rank in group.host_ranks]
  processes = f"{len(group.hosts)} process{'es' * (len(group.hosts) > 1)}"
  text = f"launch: {launch.kind}, {processes} on {plural(len(acting), 'host')} ({few(acting)})"
  if group.links:
    text += f", rendezvous in {time.monotonic() - began:.1f} s"
  findings = [Finding(True, text), *software.check_gpu_settings(group, launch)]
  findings += run_checks(group, options)
  if group.rank == 0:
    report(findings)
  # A launcher may end all processes when one fails, so wait until process 0 has printed.
  barrier(group, "printed")
  return EXIT_DONE if all(f.ok for f in findings) else EXIT_USER


def run_checks(group: Group, options: Options) -> list[Finding]:
  """Run the checks; all processes call it and get the same findings.

  Args:
    group: the processes that take part.
    options: the options of the preflight.

  Raises:
    PeerError: the connection to a process was lost.

  Example:
    >>> run_checks(Group(0, ("n1",), {}), Options(skip=tuple(CHECKS)))
    []
  """
  findings: list[Finding] = []
  facts: Facts = {}
  for name, one in CHECKS.items():
    if name in options.skip or (own := one.module.measure(group, options, facts)) is None:
      continue
    if results := gather(group, name, own):
      findings += one.module.findings(results, group, options, facts)
    facts = broadcast(group, name, facts)
  return [Finding(*f) for f in broadcast(group, "findings", findings)]
