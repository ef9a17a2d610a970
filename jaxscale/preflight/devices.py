"""Devices, XLA's flags and the data, as a child process with JAX finds them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from jaxscale.preflight.finding import Finding
from jaxscale.preflight.software import named

WAIT_S = 90.0  # JAX's import from a cold parallel file system takes long


class Child(NamedTuple):
  """A process that was started, and where it writes.

  What it writes goes into files: XLA lists all its flags, more than a pipe holds.
  """

  process: subprocess.Popen
  out: IO[bytes]
  err: IO[bytes]


def start(what: str, options: dict[str, Any], env: dict[str, str]) -> Child:
  """Start `child`, which answers while we do something else.

  Args:
    what: "look" or "fits".
    options: its arguments.
    env: variables that differ from ours; "" takes one away.
  """
  whole = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | env
  whole = {name: value for name, value in whole.items() if value}
  out, err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (`finish`)
  command = [sys.executable, "-m", "jaxscale.preflight.child", what]
  process = subprocess.Popen(
    [*command, json.dumps(options)], env=whole, stdout=out, stderr=err,
    stdin=subprocess.DEVNULL,
  )  # fmt: skip
  return Child(process, out, err)


def finish(child: Child, wait_s: float = WAIT_S) -> dict[str, Any]:
  """What a child found; {"error": text} if it did not live to say it."""
  with child.out as out, child.err as err:
    try:
      code = child.process.wait(wait_s)
    except subprocess.TimeoutExpired:
      return {"error": f"JAX did not find its devices within {wait_s:g} s"}
    finally:
      child.process.kill()  # JAX swallows SIGTERM
      child.process.wait()
    out.seek(0)
    err.seek(0)
    said, wrong = out.read().decode(), err.read().decode(errors="replace")
  try:
    if code == 0:
      return json.loads(said.splitlines()[-1])
  except (IndexError, ValueError):
    pass
  return {"error": why(wrong, code)}


def why(text: str, code: int) -> str:
  """What stderr says of a process that JAX or XLA ended.

  The sentences are those of XLA's parse_flags_from_env.cc and
  command_line_flags.cc, as jaxlib 0.10.2 writes them.

  Example:
    >>> why("F1121 x.cc:234] Unknown flag in XLA_FLAGS: --xla_foo=1", -6)
    'XLA_FLAGS: this jax does not know --xla_foo=1'
  """
  if found := re.search(r"Unknown flags? in XLA_FLAGS: (.*)", text):
    return f"XLA_FLAGS: this jax does not know {found[1].strip()}"
  if found := re.search(r"Couldn't interpret value (\S*) for flag (\S+?)\.?$", text,
                        re.M):  # fmt: skip
    return f"XLA_FLAGS: --{found[2]}={found[1]} is no value of this flag"
  if found := re.search(r'Could not open file "(.*?)" to read flags', text):
    return f"XLA_FLAGS={found[1]}: neither flags, which begin with --, nor a file"
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [x for x in lines if re.match(r"\S*(Error|Exception)\b|F\d{4} ", x)]
  return (errors or lines or [f"JAX ended with code {code}"])[-1][:300]


def judge(
  found: Sequence[dict[str, Any]], software: Sequence[dict[str, Any]],
  hosts: Sequence[str],
) -> list[Finding]:  # fmt: skip
  """What is said of devices and data.

  Args:
    found: what `child.look` gave, by rank.
    software: what `software.probe` gave, by rank; [] if it was not asked.
    hosts: by rank.
  """
  findings = _grouped(found, hosts, "error", _remedy)
  alive = [rank for rank, each in enumerate(found) if "error" not in each]
  if not alive:
    return findings
  shape = {rank: (found[rank]["count"], found[rank]["kind"]) for rank in alive}
  usual = Counter(shape.values()).most_common(1)[0][0]
  for other in sorted(set(shape.values()) - {usual}):
    ranks = [rank for rank in alive if shape[rank] == other]
    findings.append(
      Finding(
        False,
        f"devices: {other[0]} x {other[1]} in {named(ranks, hosts)}, "
        f"{usual[0]} x {usual[1]} in the others",
        "ask for the same number of the same kind for every process, e.g. with "
        "--gpus-per-node and --constraint, or leave these nodes out",
      )
    )
  for rank in alive:
    if found[rank]["wrong"]:
      text = f"devices: {hosts[rank]} computes wrongly: {found[rank]['wrong'][0]}"
      findings.append(Finding(False, text, f"leave {hosts[rank]} out and report it"))
    idle = found[rank]["platform"] == "cpu" and software and software[rank]["gpus"]
    if idle and os.environ.get("JAX_PLATFORMS") != "cpu":
      text = f"devices: {hosts[rank]} has GPUs, and JAX runs on its CPU"
      findings.append(Finding(False, text, "install jaxscale[cuda12] or [cuda13]"))
  if not findings:
    where = f" in each of {len(found)} processes" if len(found) > 1 else ""
    findings.append(
      Finding(True, f"devices: {usual[0]} x {usual[1]}{where}, tried out")
    )
    if flags := os.environ.get("XLA_FLAGS"):
      findings.append(Finding(True, f"XLA_FLAGS: this jax knows all of {flags}"))
  return [*findings, *_data(found, alive, hosts)]


def _remedy(error: str) -> str:
  if error.startswith("XLA_FLAGS"):
    return "take it out of XLA_FLAGS, or use the version of jax that it is of"
  return "run python -c 'import jax; print(jax.devices())' there"


def _data(
  found: Sequence[dict[str, Any]], alive: Sequence[int], hosts: Sequence[str]
) -> list[Finding]:
  """The data of the config, on every host, and everywhere the same."""
  remedy = "make it available on every node: python -m jaxscale.data.prepare NAME, or "
  remedy += "a path that all nodes share"
  findings = _grouped(found, hosts, "data_error", lambda _: remedy, "data: ")
  kinds = {rank: tuple(found[rank]["data"]) for rank in alive if "data" in found[rank]}
  if not kinds:
    return findings
  usual = Counter(kinds.values()).most_common(1)[0][0]
  for other in sorted(set(kinds.values()) - {usual}):
    ranks = [rank for rank, kind in kinds.items() if kind == other]
    findings.append(
      Finding(
        False,
        f"data: {other[0]} has {other[1]:,} + {other[2]:,} examples in "
        f"{named(ranks, hosts)}, {usual[1]:,} + {usual[2]:,} in the others",
        "use the same version of the data on every node",
      )
    )
  if not findings:
    text = f"data: {usual[0]}, {usual[1]:,} + {usual[2]:,} examples"
    findings.append(Finding(True, text))
  return findings


def _grouped(
  found: Sequence[dict[str, Any]],
  hosts: Sequence[str],
  key: str,
  remedy: Any,
  prefix: str = "",
) -> list[Finding]:
  """A finding for each different text under `key`, with who says it."""
  texts = dict.fromkeys(each[key] for each in found if key in each)
  findings = []
  for text in texts:
    ranks = [rank for rank, each in enumerate(found) if each.get(key) == text]
    who = "" if len(found) == 1 else f"{named(ranks, hosts)}: "
    findings.append(Finding(False, f"{prefix}{who}{text}", remedy(text)))
  return findings
