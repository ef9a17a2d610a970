"""The check `files`: safety of checkpoints in the workdir of a run.

A checkpoint is committed by renaming a directory, a lock is taken by creating a file
exclusively, and processes read files of other processes. Local disks, NFS with caches, and
object stores mounted as file systems break some of these. All hosts try each operation at
once in a temporary directory.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale.cluster.group import Group, barrier, broadcast
from jaxscale.jobs.preflight.finding import Facts, Finding, Results

# NFS caches directory entries for up to acdirmax = 60 s (man 5 nfs). A run that waits this
# long for files of other hosts works, but slowly.
SEEN_S = 10.0
_RENAMES = 40
_CLAIMS = 16
_FILES = 4


def measure(group: Group, options: Any, facts: Facts) -> dict[str, Any]:
  """Try the file operations of checkpoints; the first process of each host acts.

  Returns:
    The observations of this process; only "error" if the workdir is unusable.
  """
  folder = options.workdir.absolute() / f".preflight-{secrets.token_hex(4)}"
  error = "" if group.rank else attempt(lambda: folder.mkdir(parents=True))
  path, error = broadcast(group, "files: directory", [str(folder), error])
  if error:
    return {"error": error}
  folder = Path(path)
  try:
    unseen, seconds = _see(group, folder)
    won, torn = _claim(group, folder), _watch_renames(group, folder)
    barrier(group, "files: done")
  finally:
    if group.rank == 0:
      shutil.rmtree(folder, ignore_errors=True)
  return {"unseen": unseen, "seconds": seconds, "won": won, "torn": torn}


def attempt(action: Callable[[], Any]) -> str:
  """Run an operation on files; return its error, or ""."""
  try:
    action()
  except OSError as e:
    return e.strerror or str(e)
  return ""


def _see(group: Group, folder: Path) -> tuple[list[int], float]:
  """Return the ranks whose files this host does not see, and the seconds of the wait.

  Process 0 decides which checkpoint is complete, so it must see the files of all hosts, and
  all hosts must see its files.
  """
  if group.acts:
    attempt(lambda: _write(folder / f"from-{group.rank}", group.rank))
  barrier(group, "files: written")
  began, unseen = time.monotonic(), [*group.host_ranks] if group.rank == 0 else [0] * group.acts
  while unseen := [rank for rank in unseen if _read(folder / f"from-{rank}") != rank]:
    if time.monotonic() - began > SEEN_S:
      break
    time.sleep(0.05)
  return unseen, time.monotonic() - began


def _claim(group: Group, folder: Path) -> list[int]:
  """Let all hosts try to create the same files with O_EXCL.

  Returns:
    The numbers of the files that this process created.
  """
  barrier(group, "files: claim")
  flags, won = os.O_CREAT | os.O_EXCL | os.O_WRONLY, []
  for i in range(_CLAIMS if group.acts else 0):
    with contextlib.suppress(OSError):
      os.close(os.open(folder / f"claim-{i}", flags))
      won.append(i)
  return won


def _watch_renames(group: Group, folder: Path) -> str:
  """Return an observed error while process 0 renames; "" if there is none.

  While a file is replaced repeatedly, every reader must find a complete version. When a
  renamed directory appears, it must have all of its files.
  """
  path = folder / "renamed"
  if group.rank == 0:
    _write(path, 0)
  barrier(group, "files: rename")
  if group.rank == 0:
    return attempt(lambda: _rename_often(folder, path)) or _replace_full(folder)
  until, torn, turn = time.monotonic() + SEEN_S, "", 0
  while group.acts and turn != _RENAMES and time.monotonic() < until:
    turn = _read(path)
    if isinstance(turn, str):  # without a shared folder, `_see` reports the error
      return f"a file was {turn} during its replacement" if folder.exists() else ""
    for step in folder.glob("step-*"):
      if (missing := _FILES - len(list(step.iterdir()))) > 0:
        torn = f"a renamed directory appeared without {missing} of its files"
  return torn


def _rename_often(folder: Path, path: Path) -> None:
  for turn in range(1, _RENAMES + 1):
    _write(path.with_suffix(".tmp"), turn)
    os.replace(path.with_suffix(".tmp"), path)
    if turn % 10 == 0:
      os.rename(_filled(folder / f"tmp-{turn}"), folder / f"step-{turn}")
    time.sleep(0.002)


def _replace_full(folder: Path) -> str:
  """Return an error if a directory can be renamed onto one that is not empty."""
  one, other = _filled(folder / "one"), _filled(folder / "other")
  failed = attempt(lambda: os.rename(one, other))
  return "" if failed else "a directory was renamed onto one that is not empty"


def _filled(path: Path) -> Path:
  """Return a new directory with files, like a checkpoint."""
  path.mkdir()
  for i in range(_FILES):
    (path / str(i)).write_bytes(b"x" * 4096)
  return path


def _write(path: Path, number: int) -> None:
  path.write_text(json.dumps({"number": number, "pad": "x" * 20_000}))


def _read(path: Path) -> int | str:
  """Return the number in a file, or a description if the file is not complete."""
  for _ in range(20):
    try:
      return json.loads(path.read_text())["number"]
    except FileNotFoundError:
      return "missing for a moment"
    except OSError as e:
      if e.errno != errno.ESTALE:  # NFS reports it for a replaced file; reopening helps
        return f"unreadable ({e.strerror})"
    except ValueError:
      return "half-written for a moment"
  return "unreadable (stale file handle)"


def findings(answers: Results, group: Group, options: Any, facts: Facts) -> list[Finding]:
  """Return findings on the results of `measure`, which are by rank."""
  hosts, ranks = group.hosts, group.host_ranks
  facts["unusable"] = "error" in answers[0]

  def finding(ok: bool, text: str, remedy: str = "") -> Finding:
    return Finding(ok, f"workdir {options.workdir}: {text}", remedy)

  if error := answers[0].get("error"):
    remedy = "give a --workdir that can be written, on a file system that all nodes share"
    return [finding(False, error, remedy)]
  unseen = {*answers[0]["unseen"], *(r for r in ranks[1:] if answers[r]["unseen"])}
  if blind := ", ".join(hosts[rank] for rank in sorted(unseen)):
    text = f"{blind} and {hosts[0]} do not see each other's files within {SEEN_S:g} s"
    remedy = "give a --workdir on a file system that all nodes share, or mount it on "
    return [finding(False, text, remedy + blind)]
  wrong, wins = [], collections.Counter(i for rank in ranks for i in answers[rank]["won"])
  if wins != dict.fromkeys(range(_CLAIMS), 1):
    most = max(wins.values(), default=0)
    text = f"succeeded on {most} of {len(ranks)} hosts at once" if most > 1 else "does not work"
    wrong.append(f"exclusive creation of a file {text}")
  for rank in ranks:
    if torn := answers[rank]["torn"]:
      wrong.append(f"rename is not atomic, {hosts[rank]} reports: {torn}")
  text = "renames are atomic, creation is exclusive"
  if len(ranks) > 1:
    slowest = max(answers[rank]["seconds"] for rank in ranks)
    text += f", all {len(ranks)} hosts see each other's files in {slowest:.2f} s"
  remedy = "give a --workdir on a different file system (Lustre, GPFS, NFS or a local disk)"
  return [finding(False, what, remedy) for what in wrong] or [finding(True, text)]
