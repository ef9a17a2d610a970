"""Whether checkpoints are safe and quick in the directory of a run.

A checkpoint is committed by renaming a directory, a lease is taken by creating a
file that must not exist, and every process reads what another one wrote. Local
disks, NFS with caches and object stores mounted as a file system break one or
the other; here each is tried, by all hosts at once, in a directory of its own.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxscale.preflight.finding import Finding
from jaxscale.preflight.group import Group, barrier, broadcast, gather

# NFS keeps what a directory holds for up to acdirmax = 60 s (man 5 nfs); a run
# that waits this long for a file of another host works, only slowly.
SEEN_S = 10.0
_RENAMES = 40
_CLAIMS = 16
_FILES = 4


def probe(group: Group, workdir: Path) -> dict[str, Any]:
  """Try what checkpoints need; all processes call it, hosts' first ones act.

  Returns:
    What this process found, as JSON; "error" alone if the directory cannot be used.
  """
  folder = _enter(group, workdir)
  if isinstance(folder, str):
    return {"error": folder}
  try:
    found: dict[str, Any] = {"seen_s": _see(group, folder)}
    found["won"] = _claim(group, folder)
    found["torn"] = _watch_renames(group, folder)
    found["merged"] = _merges(folder) if group.rank == 0 else ""
    barrier(group, "files: done")
  finally:
    if group.rank == 0:
      shutil.rmtree(folder, ignore_errors=True)
  return found


def _enter(group: Group, workdir: Path) -> Path | str:
  """A directory for the trials, or, in all processes, why there is none."""
  made: list[str] = ["", ""]
  if group.rank == 0:
    folder = workdir.absolute() / f".preflight-{secrets.token_hex(4)}"
    made = [str(folder), attempt(lambda: folder.mkdir(parents=True))]
  path, error = broadcast(group, "files: directory", made)
  return error or Path(path)


def attempt(action: Callable[[], Any]) -> str:
  """Why something with files failed, or ""."""
  try:
    action()
  except OSError as e:
    return e.strerror or str(e)
  return ""


def _see(group: Group, folder: Path) -> float | None:
  """Seconds until this host sees a file of process 0; None: it never does."""
  key = secrets.token_hex(8)
  if group.rank == 0:
    attempt(lambda: (folder / "seen").write_text(key))
  key = broadcast(group, "files: written", key)
  began = time.monotonic()
  waited = None
  while group.speaks and waited is None and time.monotonic() - began < SEEN_S:
    try:
      if (folder / "seen").read_text() == key:
        waited = time.monotonic() - began
    except OSError:
      time.sleep(0.05)
  # And the other way: what others write must be seen by process 0, which is where
  # the decision falls which checkpoint is whole.
  sees = waited is not None
  if group.speaks and sees:
    attempt(lambda: (folder / f"from-{group.rank}").write_text(key))
  wrote = gather(group, "files: seen", sees and group.speaks)
  unseen = [r for r, did in enumerate(wrote) if did]
  began = time.monotonic()
  while unseen and time.monotonic() - began < SEEN_S:
    unseen = [r for r in unseen if not _holds(folder / f"from-{r}", key)]
    time.sleep(0.05 if unseen else 0.0)
  lost = broadcast(group, "files: back", unseen)
  return None if group.rank in lost else waited


def _holds(path: Path, text: str) -> bool:
  try:
    return path.read_text() == text
  except OSError:
    return False


def _claim(group: Group, folder: Path) -> list[int]:
  """Which of some files this process could create exclusively, all racing."""
  barrier(group, "files: claim")
  won = []
  for i in range(_CLAIMS if group.speaks else 0):
    try:
      os.close(os.open(folder / f"claim-{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
      won.append(i)
    except OSError:
      continue
  return won


def _watch_renames(group: Group, folder: Path) -> str:
  """What this process saw while process 0 renamed; "" if all of it was whole.

  A file is replaced again and again: whoever opens it must find one of its whole
  contents. A directory is renamed into its place: as soon as it is there, all its
  files are.
  """
  path, last = folder / "renamed", {"turn": _RENAMES}
  if group.rank == 0:
    _write_whole(path, {"turn": 0})
  barrier(group, "files: rename")
  if group.rank == 0:
    return attempt(lambda: _rename_often(folder, path))
  began, torn = time.monotonic(), ""
  turn: Any = None
  while group.speaks and turn != last and time.monotonic() - began < SEEN_S:
    turn = _read_whole(path)
    if isinstance(turn, str):
      if not path.parent.exists():
        return ""  # not shared: said elsewhere
      return f"a file that is replaced was {turn}"
    for step in folder.glob("step-*"):
      if (missing := _FILES - len(list(step.iterdir()))) > 0:
        torn = f"a directory that is renamed appeared without {missing} of its files"
  return torn


def _rename_often(folder: Path, path: Path) -> None:
  for turn in range(1, _RENAMES + 1):
    _write_whole(path.with_suffix(".tmp"), {"turn": turn})
    os.replace(path.with_suffix(".tmp"), path)
    if turn % 10 == 0:
      tmp = folder / f"tmp-{turn}"
      tmp.mkdir()
      for i in range(_FILES):
        (tmp / str(i)).write_bytes(b"x" * 4096)
      os.rename(tmp, folder / f"step-{turn}")
    time.sleep(0.002)


def _write_whole(path: Path, value: Any) -> None:
  path.write_text(json.dumps(value | {"pad": "x" * 20_000}))


def _read_whole(path: Path) -> Any:
  """Which content it has; as text, what is wrong with it."""
  for _ in range(20):
    try:
      text = path.read_text()
    except FileNotFoundError:
      return "missing for a moment"
    except OSError as e:
      if e.errno == errno.ESTALE:  # NFS, of a file replaced meanwhile: open it again
        continue
      return f"unreadable ({e.strerror})"
    try:
      return {"turn": json.loads(text)["turn"]}
    except ValueError:
      return "half-written for a moment"
  return "unreadable (stale file handle)"


def _merges(folder: Path) -> str:
  """Whether a directory can be renamed onto one that holds files."""
  one, other = folder / "one", folder / "other"
  for path in (one, other):
    path.mkdir()
    (path / path.name).write_text("")
  try:
    os.rename(one, other)
  except OSError:
    return ""
  return "a directory was renamed onto one that is not empty"


def judge(
  found: Sequence[dict[str, Any]], group: Group, workdir: Path
) -> list[Finding]:
  """What is said of what `probe` found, by rank."""
  if error := found[0].get("error"):
    remedy = "give a --workdir that can be written, on a file system of all nodes"
    return [Finding(False, f"workdir {workdir}: {error}", remedy)]
  hosts, speakers = group.hosts, group.first_of_host
  blind = [hosts[r] for r in speakers if found[r]["seen_s"] is None]
  if blind:
    return [
      Finding(
        False,
        f"workdir {workdir}: {', '.join(blind)} and {hosts[0]} do not see each "
        f"other's files within {SEEN_S:g} s",
        f"give a --workdir on a file system that all nodes share, or mount it on "
        f"{', '.join(blind)}",
      )
    ]
  findings = []
  remedy = "give a --workdir on another file system (Lustre, GPFS, NFS or a local disk)"
  winners = [sum(i in found[r]["won"] for r in speakers) for i in range(_CLAIMS)]
  if wrong := [n for n in winners if n != 1]:
    text = (
      f"exclusive creation gave {max(wrong)} of {len(speakers)} hosts the same file"
    )
    if not max(wrong):
      text = "exclusive creation does not work"
    findings.append(Finding(False, f"workdir {workdir}: {text}", remedy))
  for rank in speakers:
    if torn := found[rank]["torn"] or found[rank]["merged"]:
      text = f"workdir {workdir}: rename is not atomic, {hosts[rank]} says: {torn}"
      findings.append(Finding(False, text, remedy))
  slowest = max(found[r]["seen_s"] for r in speakers)
  if not findings:
    text = f"workdir {workdir}: rename is atomic, creation exclusive"
    if len(speakers) > 1:
      text += f", all {len(speakers)} hosts see each other's files in {slowest:.2f} s"
    findings.append(Finding(True, text))
  return findings
