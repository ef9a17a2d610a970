"""Compiled programs of a run, kept on disk: what one start compiles, the next loads.

They are JAX's persistent compilation cache (jax.experimental.compilation_cache), in the
workdir: a job that is requeued has it again, and all processes can read it. Its keys
are of the program itself, jaxlib's version, XLA's flags, and the kind and number of
devices, CPUs' instruction sets included: what was edited, upgraded or is on other
hardware is compiled again.

A program is code that is run. So it is loaded only from a folder that nobody else can
write to, and if it is what was written: JAX leaves behind what a kill or a full disk
has cut short, and never writes it again. Next to each program is a SHA-256 of it and
its name; what does not fit, or has none, is deleted before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxscale import cluster
from jaxscale.cluster import jax_internals
from jaxscale.config import Compilation
from jaxscale.data.dataset import user_cache
from jaxscale.files import read_bytes, readable_text, replace_text, who_else_writes

FOLDER = "compiled"
_PROGRAM, _SUM = "-cache", ".sha256"  # the first is JAX's (jax/_src/lru_cache.py)
_ordinals = itertools.count()  # of the turns of this process


class Programs:
  """Where this run's programs are kept, and who compiles first."""

  def __init__(self, folder: Path | None, say: Callable[[str], None], wait_s: float):
    """Kept in a folder, whose programs are whole.

    Args:
      folder: JAX's cache; None: it is not ours to look after.
      say: called with a line if programs cannot be kept; in the leader only.
      wait_s: for the leader, at most, in a turn.
    """
    self._folder, self._say, self._wait_s = folder, say, wait_s
    self._lock = threading.Lock()
    self._sealed = _stamps(folder)

  def turn(self) -> contextlib.AbstractContextManager[None]:
    """To compile one program in: the leader compiles it, then the others load it.

    All processes make their turns in the same order, in their main threads; they may
    enter them in any thread. On GPUs nobody waits: there XLA divides what it measures
    to choose its kernels among the processes, which compile together.
    """
    return self._turn(f"compiled/{next(_ordinals)}")

  @contextlib.contextmanager
  def _turn(self, name: str) -> Iterator[None]:
    first = contextlib.nullcontext()
    is_kept = _setting("enable_compilation_cache") and _setting("compilation_cache_dir")
    if is_kept and jax.default_backend() != "gpu":
      first = cluster.leader_first(name, self._wait_s)
    with first:
      yield
      self.seal()

  def seal(self) -> None:
    """Note the checksums of programs that were written since the last time."""
    if self._folder is None or not cluster.is_leader():
      return
    with self._lock:
      for name, stamp in _stamps(self._folder).items():
        if self._sealed.get(name) == stamp:
          continue
        try:
          path = self._folder / name
          replace_text(path.with_name(name + _SUM), _digest(path) + "\n")
          self._sealed[name] = stamp
        except OSError as e:
          self._say(f"compiled programs are not kept in {self._folder}: {e.strerror}")
          self._folder = None
          return


@contextlib.contextmanager
def kept_programs(
  settings: Compilation, workdir: Path, say: Callable[[str], None], wait_s: float
) -> Iterator[Programs]:
  """Inside, JAX loads what is kept and keeps what it compiles; all processes call it.

  Args:
    settings: whether and where.
    workdir: of the run, which is there.
    say: called with a line where something is in the way; in the leader only.
    wait_s: for the leader, at most, to compile a program.
  """
  with _same_keys_on_cpus():
    # Set by the user, as by JAX_COMPILATION_CACHE_DIR, or switched off there.
    is_users = _setting("compilation_cache_dir") is not None
    if is_users or not _setting("enable_compilation_cache") or not settings.cache:
      yield Programs(None, say, wait_s)
    else:
      with _own_programs(settings, workdir, say, wait_s) as programs:
        yield programs


@contextlib.contextmanager
def _own_programs(settings, workdir, say, wait_s) -> Iterator[Programs]:
  """`kept_programs`, where JAX has no cache of the user's."""
  opened = _open(settings, workdir) if cluster.is_leader() else None
  found, lines = cluster.from_leader(opened)
  for line in lines:
    say(line)
  folder = Path(found) if found else None
  # The others look for themselves: another host may have other users.
  if folder and not cluster.is_leader() and _problem(folder):
    folder = None
  programs = Programs(folder, say, wait_s)
  if folder is None:
    yield programs
    return
  # Python's two lines for each program are one of ours, in `seal`.
  warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache")
  wanted = _jax_settings(folder)
  before = {name: _setting(name) for name in wanted}
  _update(wanted)
  try:
    yield programs
  finally:
    programs.seal()
    _update(before)


@contextlib.contextmanager
def _same_keys_on_cpus() -> Iterator[None]:
  """Inside, processes on CPUs of one kind look for a program under the same key.

  Only process 0 writes: under JAX's own keys the others never found anything (jax
  0.10.2). What a program is compiled for is their instruction set; devices and their
  numbers are among the compiler's options, which the key has too.
  """
  if jax.process_count() == 1 or jax.default_backend() != "cpu":
    yield
    return
  with jax_internals.devices_hashed_as(_cpu_kind()):
    yield


def _cpu_kind() -> bytes:
  """Model and instruction sets of this host's processor."""
  fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
  lines = readable_text(Path("/proc/cpuinfo")).splitlines()
  found = {x for x in lines if x.partition(":")[0].strip() in fields}
  return "\n".join([platform.machine(), *sorted(found)]).encode()


def _jax_settings(folder: Path) -> dict[str, object]:
  """What JAX's configuration gets, where the user has set nothing."""
  # Also what takes less than a second: the sum of it is what a start waits for.
  wanted: dict[str, object] = {"persistent_cache_min_compile_time_secs": 0.0}
  if jax.default_backend() != "gpu":
    # Of no use, and its path is in every key: a workdir that is moved would compile.
    wanted["persistent_cache_enable_xla_caches"] = ""
  wanted = {k: v for k, v in wanted.items() if f"JAX_{k.upper()}" not in os.environ}
  return wanted | {"compilation_cache_dir": str(folder)}


def _setting(name: str) -> object:
  return getattr(jax.config, f"jax_{name}")


def _update(values: dict[str, object]) -> None:
  for name, value in values.items():
    jax.config.update(f"jax_{name}", value)
  compilation_cache.reset_cache()  # which JAX opens but once


def _open(settings: Compilation, workdir: Path) -> tuple[str | None, list[str]]:
  """The folder, with what is whole in it, and lines to show; in the leader."""
  if settings.cache_dir:
    places = [Path(settings.cache_dir).expanduser().absolute()]
  else:
    places = [workdir.absolute() / FOLDER, user_cache().absolute() / FOLDER]
  problem = ""
  for place in places:
    with contextlib.suppress(OSError):  # `_problem` says what there is instead
      place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
      if why := _problem(place):
        problem = problem or why
        continue
      lines = [f"{problem}: compiled programs are kept in {place}"] if problem else []
      if damaged := _drop_damaged(place):
        lines.append(f"{place}: {damaged} damaged, deleted; compiling again")
      _drop_oldest(place, math.ceil(1e9 * settings.cache_gb))
      return str(place), lines
    except OSError as e:
      problem = problem or f"{place}: {e.strerror}"
  return None, [f"{problem}: compiled programs are not kept (compilation.cache_dir)"]


def _problem(folder: Path) -> str | None:
  """Why nothing may be loaded from there, as words."""
  try:
    return who_else_writes(folder, is_folder=True)
  except OSError as e:
    return f"{folder}: {e.strerror}"


def _stamps(folder: Path | None) -> dict[str, tuple[int, int]]:
  """Size and time of writing of each program, by its file's name."""
  found = {}
  with contextlib.suppress(OSError):
    for entry in os.scandir(folder) if folder else ():
      if entry.name.endswith(_PROGRAM) and not entry.is_dir(follow_symlinks=False):
        info = entry.stat(follow_symlinks=False)
        found[entry.name] = info.st_size, info.st_mtime_ns
  return found


def _digest(path: Path) -> str:
  """SHA-256 of a program and its name: under another's it must not be loaded."""
  return hashlib.sha256(path.name.encode() + b"\0" + read_bytes(path)).hexdigest()


def _drop_damaged(folder: Path) -> int:
  """Delete the programs that are not as they were written; how many there were."""
  damaged = 0
  for name in _stamps(folder):
    path = folder / name
    wanted = readable_text(path.with_name(name + _SUM)).strip()
    with contextlib.suppress(OSError):  # a pipe, or it cannot be read
      info = path.lstat()
      if wanted and not path.is_symlink() and _digest(path) == wanted:
        with contextlib.suppress(OSError):  # a look at all of them is no use of any
          os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        continue
    _delete(path)
    damaged += bool(wanted)  # without: a run was killed while it was written
  return damaged


def _drop_oldest(folder: Path, max_bytes: int) -> None:
  """Delete the programs longest out of use, as far as the file system knows."""
  left = 0
  paths = [folder / name for name in _stamps(folder)]
  for info, path in sorted(((p.stat(), p) for p in paths), key=_last_use, reverse=True):
    left += info.st_size
    if left > max_bytes:
      _delete(path)


def _last_use(entry: tuple[os.stat_result, Path]) -> float:
  return max(entry[0].st_atime, entry[0].st_mtime)


def _delete(path: Path) -> None:
  """A program and its checksum."""
  path.unlink(missing_ok=True)
  path.with_name(path.name + _SUM).unlink(missing_ok=True)
