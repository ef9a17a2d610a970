"""Provenance of a run: code, command, host and packages. Does not import JAX."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.cluster import gpu_settings
from jaxscale.errors import hide_credentials
from jaxscale.files import append_json_line, output_of, read_json_lines

_PACKAGE = Path(__file__).absolute().parent.parent
FILE = "starts.jsonl"  # in the workdir, one line per start of the run
# Variables that change what a run does. Others are not recorded, as they may hold secrets.
# TF_VAR_ and TF_TOKEN_ are Terraform's.
_NAMES = """JAX XLA_ NCCL_ FI_ LIBTPU_ TPU_ CUDA_VISIBLE CUDA_DEVICE_MAX ROCR_VISIBLE HIP_VISIBLE
  HSA_ TF_CPP_ TF_CUDNN_ TF_DETERMINISTIC_ TF_ENABLE_ TF_FORCE_ TF_GPU_ TF_NUM_ TF_XLA_"""
_VARIABLES = tuple(_NAMES.split())
_SECRETS = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PRIVATE|COOKIE", re.IGNORECASE)


def git(*args: str) -> str:
  """Return git's output in the package's folder; "" without git or a repository."""
  return output_of("git", "-C", str(_PACKAGE), *args, timeout_s=20) or ""


def environment() -> dict[str, Any]:
  """Return what a run depends on in addition to its own code, as JSON."""
  # Folder names, NAME-VERSION.dist-info, are enough: reading metadata takes 0.1 s.
  folders = [f.stem for p in reversed(sys.path) for f in Path(p).glob("*.dist-info")]
  packages = {name: version for name, _, version in (f.partition("-") for f in folders)}
  recorded = (k for k in sorted(os.environ) if k.startswith(_VARIABLES) and not _SECRETS.search(k))
  variables = {k: hide_credentials(os.environ[k]) for k in recorded}
  result: dict[str, Any] = {"commit": git("rev-parse", "HEAD").strip() or None}
  result |= {"changed": git("status", "--porcelain", "--", ".").splitlines()}
  result |= {"python": platform.python_version(), "platform": platform.platform()}
  result |= {"packages": dict(sorted(packages.items(), key=lambda kv: kv[0].lower()))}
  result |= {"variables": variables, "gpu_settings": gpu_settings.applied()}
  return result | {"host": platform.node()}


def command() -> str:
  """Return the command line of this process, without credentials in addresses."""
  return hide_credentials(shlex.join(sys.orig_argv))


def record_start(workdir: Path, devices: str, accepted: Sequence[str] = ()) -> None:
  """Append this start of a run, with its command, to the record in the workdir.

  Args:
    workdir: the run's workdir.
    devices: the devices that the run trains on, as text.
    accepted: the accepted changes of data or code.
  """
  start: dict[str, Any] = {"time": round(time.time(), 3), "devices": devices}
  start["command"] = command()
  if accepted:
    start["accepted_changes"] = list(accepted)
  append_json_line(workdir / FILE, start | environment())


def last_start(workdir: Path, hosts: str = "") -> str:
  """Describe the last start: commit, hosts and command; "" if none is recorded.

  A run of code outside of a git checkout has no commit.

  Args:
    workdir: the run's workdir.
    hosts: the names of all nodes; "" uses that of process 0, which records the start.
  """
  shape = {"commit": (str, None), "host": str, "command": str}
  if not (lines := read_json_lines(workdir / FILE, None, shape)):
    return ""
  last = lines[-1]
  changed = ", changed" * bool(last.get("changed"))
  code = f"commit {last['commit'][:12]}{changed}; " if last["commit"] else ""
  return f"{code}{hosts or last['host']}; {last['command']}"
