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
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxscale import cluster
from jaxscale.cluster import jax_internals
from jaxscale.config import Compilation
from jaxscale.data.dataset import user_cache
from jaxscale.files import read_bytes, readable_text, replace_text, who_else_writes
from jaxscale.metrics.log import logger

FOLDER = "compiled"
_PROGRAM, _SUM = "-cache", ".sha256"  # the first is JAX's (jax/_src/lru_cache.py)
_ordinals = itertools.count()  # of the turns of this process


class Programs:
  """Where this run's programs are kept, and who compiles first."""

  def __init__(self, folder: Path | None, wait_s: float):
    """Kept in a folder, whose programs are whole.

    Args:
      folder: JAX's cache; None: it is not ours to look after.
      wait_s: for the leader, at most, in a turn.
    """
    self._folder, self._wait_s = folder, wait_s
    self._lock = threading.Lock()

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
    """Write the checksums of programs that have none, or one of before."""
    if self._folder is None or not cluster.is_leader():
      return
    with self._lock:
      try:
        for path in _programs(self._folder):
          stored, written = _sum_of(path), path.stat().st_mtime_ns
          if not stored.exists() or stored.stat().st_mtime_ns < written:
            replace_text(stored, _digest(path) + "\n")
      except OSError as e:
        logger.warning(f"compiled programs are not kept in {self._folder}: {e.strerror}")
        self._folder = None


@contextlib.contextmanager
def kept_programs(settings: Compilation, workdir: Path, wait_s: float) -> Iterator[Programs]:
  """Inside, JAX loads what is kept and keeps what it compiles; all processes call it.

  Args:
    settings: whether and where.
    workdir: of the run, which is there.
    wait_s: for the leader, at most, to compile a program.
  """
  # Set by the user, as by JAX_COMPILATION_CACHE_DIR, or switched off there.
  is_users = _setting("compilation_cache_dir") is not None
  is_off = not _setting("enable_compilation_cache") or not settings.cache
  folder = None if is_users or is_off else _folder_for_all(settings, workdir)
  programs, wanted = Programs(folder, wait_s), {}
  if folder is not None:
    # Python's two lines for each program are one of ours, in `seal`.
    warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation")
    wanted = _jax_settings(folder)
  before = {name: _setting(name) for name in wanted}
  with _same_keys_on_cpus():
    _update(wanted)
    try:
      yield programs
    finally:
      programs.seal()
      _update(before)


def _folder_for_all(settings, workdir: Path) -> Path | None:
  """The leader's folder, in processes where nobody else can write to it."""
  opened = _open(settings, workdir) if cluster.is_leader() else None
  folder, lines = cluster.from_leader(opened)
  for line in lines:
    logger.warning(line)
  with contextlib.suppress(OSError):  # another host may have other users
    if folder and not who_else_writes(Path(folder), is_folder=True):
      return Path(folder)
  return None


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
  if values:
    compilation_cache.reset_cache()  # which JAX opens but once


def _open(settings: Compilation, workdir: Path) -> tuple[str | None, list[str]]:
  """The folder, with what is whole in it, and lines to show; in the leader."""
  if settings.cache_dir:
    folders = [Path(settings.cache_dir).expanduser().absolute()]
  else:
    folders = [workdir.absolute() / FOLDER, user_cache().absolute() / FOLDER]
  first = ""
  for folder in folders:
    try:
      with contextlib.suppress(FileExistsError):  # it is no folder, as is seen below
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      if not (problem := who_else_writes(folder, is_folder=True)):
        damaged = _clean(folder, math.ceil(1e9 * settings.cache_gb))
        lines = [f"{first}: compiled programs are kept in {folder}"] if first else []
        if damaged:
          lines.append(f"{folder}: {damaged} damaged, deleted; compiling again")
        return str(folder), lines
    except OSError as e:
      problem = f"{folder}: {e.strerror}"
    first = first or problem
  return None, [f"{first}: compiled programs are not kept (compilation.cache_dir)"]


def _clean(folder: Path, max_bytes: int) -> int:
  """Delete what is not as it was written, and what is longest out of use.

  Returns:
    How many were damaged; those without a checksum, which a kill leaves, do not count.
  """
  total = num_damaged = 0
  found = [(path.lstat(), path) for path in _programs(folder)]
  # By the time of the last use, as far as the file system keeps it.
  for info, path in sorted(found, key=lambda x: -max(x[0].st_atime, x[0].st_mtime)):
    expected, is_whole = readable_text(_sum_of(path)).strip(), False
    with contextlib.suppress(OSError):  # a pipe, or it cannot be read
      is_whole = not path.is_symlink() and _digest(path) == expected
    total += info.st_size * is_whole
    if is_whole and total <= max_bytes:
      with contextlib.suppress(OSError):  # a look at all of them is no use of any
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
      continue
    num_damaged += bool(expected) and not is_whole
    path.unlink(missing_ok=True)
    _sum_of(path).unlink(missing_ok=True)
  return num_damaged


def _programs(folder: Path) -> list[Path]:
  paths = folder.glob(f"*{_PROGRAM}")
  return [path for path in paths if path.is_symlink() or not path.is_dir()]


def _sum_of(path: Path) -> Path:
  return path.with_name(path.name + _SUM)


def _digest(path: Path) -> str:
  """SHA-256 of a program and its name: under another's it must not be loaded."""
  return hashlib.sha256(path.name.encode() + b"\0" + read_bytes(path)).hexdigest()
