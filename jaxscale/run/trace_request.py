"""Requests to a training run to trace its next steps.

A request is a small file in the workdir, written on any node that shares it. Every process
reads the file on its own, so processes need not agree. A file is ignored if users other
than the run's owner, or the group that shares the workdir, may write it. This module does
not import JAX.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path
from typing import NamedTuple

from jaxscale.config.running import MOST_TRACED_STEPS
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import json_objects, readable_text, write_json
from jaxscale.owners import unsafe_owner

FOLDER = "profile"  # in the workdir
_FILE = "request.json"
_NAME = re.compile(r"request_[0-9]{8}_[0-9]{6}_[0-9a-f]{6}", re.ASCII)
_LONGEST = 1 << 16  # bytes of a request, enough for thousands of processes
_SHAPE = {"name": str, "steps": int, "processes": [int], "until": float}


class TraceRequest(NamedTuple):
  """Request for a trace.

  Attributes:
    name: the name of the trace, which is its folder.
    steps: the number of steps to trace.
    processes: the processes that trace them.
    until: the time in seconds since 1970 after which the request expires.
  """

  name: str
  steps: int
  processes: tuple[int, ...]
  until: float


def make(steps: int, processes: tuple[int, ...], wait_s: float) -> TraceRequest:
  """Create a request with a unique name.

  Example:
    >>> make(10, (0,), wait_s=60.0).steps
    10
  """
  now = time.time()
  stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
  return TraceRequest(f"request_{stamp}_{secrets.token_hex(3)}", steps, processes, now + wait_s)


def session_folder(workdir: Path, name: str) -> Path:
  """Return the folder of the traces of all processes, as XProf and TensorBoard expect it."""
  return workdir / FOLDER / "plugins" / "profile" / name


def process_file(folder: Path, process: int, suffix: str = ".xplane.pb") -> Path:
  """Return a process's file in a `session_folder`; XProf reads its first word as the host."""
  return folder / f"process_{process}{suffix}"


def write(workdir: Path, request: TraceRequest) -> None:
  """Write a request to the workdir.

  Raises:
    ConfigError: another request is pending, or the file cannot be written, or would be
      written through a link of another user.
  """
  path = workdir / FOLDER / _FILE
  if read(workdir):
    hint = f"wait for that trace, or remove {path}"
    raise ConfigError(f"{workdir}: another trace is already requested; {hint}")
  try:
    path.parent.mkdir(exist_ok=True)
    if path.parent.is_symlink() and path.parent.lstat().st_uid not in (os.geteuid(), 0):
      raise invalid(str(path.parent), ..., "is a link of another user", "have its owner remove it")
    write_json(path, request._asdict())
  except OSError as e:
    remedy = "free disk space, or have the owner of the run request the trace"
    raise ConfigError(f"{path}: {e.strerror}; {remedy}") from None


def withdraw(workdir: Path, request: TraceRequest) -> None:
  """Remove the request, unless another one has replaced it."""
  with contextlib.suppress(OSError):
    if read(workdir) in (request, None):  # None: it has expired.
      (workdir / FOLDER / _FILE).unlink()


def read(workdir: Path) -> TraceRequest | None:
  """Return the pending request; None if there is none, or if it is not safe to read.

  Example:
    >>> read(Path("no/such/run"))
  """
  path = workdir / FOLDER / _FILE
  try:
    if path.lstat().st_size > _LONGEST or unsafe_owner(path, group=False):
      return None
  except OSError:
    return None
  for record in json_objects([readable_text(path, _LONGEST)], _SHAPE):
    request = TraceRequest(*(record[name] for name in _SHAPE))
    request = request._replace(processes=tuple(request.processes))
    is_valid = _NAME.fullmatch(request.name) and 1 <= request.steps <= MOST_TRACED_STEPS
    if is_valid and time.time() < request.until:
      return request
  return None
