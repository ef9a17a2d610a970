"""Secret of a run whose processes only JAX has connected, as in a TPU pod.

The hosts of such a pod share no home directory, and JAX's connections are open to others. So
the secret comes from $JAXSCALE_SECRET, or from a file in the run's shared workdir.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.cluster.rendezvous.handshake import ranks_in_words
from jaxscale.cluster.secret import VARIABLE, find_secret, read_file
from jaxscale.errors import ConfigError

_FIX = f"set {VARIABLE} to the same 64 random hex digits in all processes"


def agree(
  workdir: Path | None,
  rank: int,
  gather: Callable[[Any], list[Any]],
  env: Mapping[str, str] = os.environ,
) -> bytes:
  """Return the secret of a run; all its processes call this.

  Without the variable, process 0 writes the secret to a new file of mode 0600 in the workdir and
  removes it when all have read it. If a process does not see the file, process 0 sends the secret
  over JAX's connections, and a line reports that others may know it.

  Args:
    workdir: the workdir; None if there is none.
    rank: the rank of this process.
    gather: a function that returns the values of all processes, over JAX's connections.
    env: the environment variables.

  Raises:
    ConfigError: in all processes, if only some have the variable, or if the file was replaced.
  """
  if len({*(is_set := gather(bool(env.get(VARIABLE))))}) > 1:
    who = ranks_in_words(i for i, each in enumerate(is_set) if not each)
    raise ConfigError(f"{VARIABLE}: not set in {who}; {_FIX}")
  if is_set[0]:
    return find_secret(env)
  own, problem = _create(workdir) if rank == 0 else (None, "")
  try:
    name, problem = gather([own and own.name, problem])[0]
    # What came over JAX's connections may be forged, so process 0 reads and removes its own file.
    path = own or (workdir / Path(str(name)).name if name and workdir else None)
    secret, is_replaced, problem = _read(path, rank) if path else (b"", False, problem)
    problems = gather([is_replaced, problem])
  finally:
    if own is not None:
      with contextlib.suppress(OSError):
        own.unlink()
  if not any(text for _, text in problems):
    return secret
  return _send_openly(problems, rank, gather)


def _read(path: Path, rank: int) -> tuple[bytes, bool, str]:
  """Return the secret in a file, whether another user has replaced the file, and the problem."""
  try:
    return read_file(path), False, ""
  except OSError as e:  # only the file that process 0 has just created cannot be missing there
    is_replaced = rank == 0 or e.errno == errno.ELOOP
    return b"", is_replaced, f"{path}: {e.strerror}" + f"; {_FIX}" * is_replaced
  except ConfigError as e:
    return b"", True, str(e)


def _create(workdir: Path | None) -> tuple[Path | None, str]:
  """Create the file; return its path, and the problem if it cannot be created."""
  if workdir is None:
    return None, "the session has no workdir"
  path = workdir / f".secret-{secrets.token_hex(8)}"
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "w") as file:
      file.write(secrets.token_hex(32))
      file.flush()
      os.fsync(file.fileno())
    read_file(path)  # NFS may give the files of root to nobody
  except (OSError, ConfigError) as e:
    return None, f"{workdir}: cannot keep a file private to this user ({e})"
  return path, ""


def _send_openly(
  problems: Sequence[Sequence[Any]], rank: int, gather: Callable[[Any], list[Any]]
) -> bytes:
  """Return a secret of process 0 that others may read, if no process has reported an attack."""
  for is_replaced, problem in problems:
    if is_replaced:
      raise ConfigError(problem)
  process, (_, problem) = next((i, p) for i, p in enumerate(problems) if p[1])
  if rank == 0:
    line = "other users may know the run's secret, which went over JAX's open connections, "
    line += f"because process {process} cannot read it from a file ({problem})"
    print(f"warning: {line}; {_FIX}", file=sys.stderr, flush=True)
  return bytes.fromhex(gather(secrets.token_hex(32))[0])
