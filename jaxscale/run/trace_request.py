"""A request to a run that trains: trace your next steps.

Whoever asks writes one small file into the workdir, on any node that shares it; every
process of the run reads it on its own, so nobody has to agree on anything. Where the
file system lets others than the run's owner, or the group that it shares the workdir
with, write the file, it is left alone. Needs no JAX.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from pathlib import Path
from typing import NamedTuple

from jaxscale.config.running import MOST_TRACED_STEPS
from jaxscale.errors import ConfigError
from jaxscale.files import json_objects, readable_text, who_else_writes, write_json

FOLDER = "profile"  # in the workdir
_FILE = "request.json"
_NAME = re.compile(r"request_[0-9]{8}_[0-9]{6}_[0-9a-f]{6}", re.ASCII)
_LONGEST = 1 << 16  # bytes of a request: thousands of processes
_SHAPE = {"name": str, "steps": int, "processes": [int], "until": float}


class TraceRequest(NamedTuple):
  """What is asked for.

  Attributes:
    name: of the trace, its folder.
    steps: how many.
    processes: that trace them.
    until: seconds since the epoch; later nobody waits for it any more.
  """

  name: str
  steps: int
  processes: tuple[int, ...]
  until: float


def make(steps: int, processes: tuple[int, ...], wait_s: float) -> TraceRequest:
  """A request with a name that no other has.

  Example:
    >>> make(10, (0,), wait_s=60.0).steps
    10
  """
  now = time.time()
  stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
  name = f"request_{stamp}_{secrets.token_hex(3)}"
  return TraceRequest(name, steps, processes, now + wait_s)


def session_folder(workdir: Path, name: str) -> Path:
  """Where the traces of all processes are, as XProf and TensorBoard look for them."""
  return workdir / FOLDER / "plugins" / "profile" / name


def process_file(folder: Path, process: int, suffix: str = ".xplane.pb") -> Path:
  """A process's file in a `session_folder`; XProf takes the first word for a host."""
  return folder / f"process_{process}{suffix}"


def write(workdir: Path, request: TraceRequest) -> None:
  """Ask.

  Raises:
    ConfigError: somebody else's request waits, or the file cannot be written.
  """
  path = workdir / FOLDER / _FILE
  if read(workdir):
    hint = f"wait for that trace, or remove {path}"
    raise ConfigError(f"{workdir}: another trace is asked for already; {hint}")
  try:
    path.parent.mkdir(exist_ok=True)
    write_json(path, request._asdict())
  except OSError as e:
    remedy = "make room, or have the owner of the run ask"
    raise ConfigError(f"{path}: {e.strerror}; {remedy}") from None


def withdraw(workdir: Path, request: TraceRequest) -> None:
  """Take it back, or clean up; another one in its place stays."""
  path = workdir / FOLDER / _FILE
  with contextlib.suppress(OSError):
    if _read(path) == request:
      path.unlink()


def read(workdir: Path) -> TraceRequest | None:
  """The request that waits; None: there is none, or it is not to be trusted.

  Example:
    >>> read(Path("no/such/run"))
  """
  found = _read(workdir / FOLDER / _FILE)
  return found if found and time.time() < found.until else None


def _read(path: Path) -> TraceRequest | None:
  try:
    if path.lstat().st_size > _LONGEST or who_else_writes(path, group=False):
      return None
  except OSError:
    return None
  for found in json_objects([readable_text(path, _LONGEST)], _SHAPE):
    request = TraceRequest(*(found[name] for name in _SHAPE))
    request = request._replace(processes=tuple(request.processes))
    if _NAME.fullmatch(request.name) and 1 <= request.steps <= MOST_TRACED_STEPS:
      return request
  return None
