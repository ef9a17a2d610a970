"""Compiled programs of a run, saved on disk: later starts load what one start compiled.

The programs are in JAX's persistent compilation cache (jax.experimental.compilation_cache)
in the workdir, so a requeued job finds them, and all processes can read them. Cache keys
cover the program, jaxlib's version, XLA's flags, and the kind and number of devices
(including CPU instruction sets), so any change of these compiles again.

A cached program is code that is run. It is therefore loaded only from a folder of this user
that nobody else can write to, and that nobody else can exchange for another one: JAX reads it
through a descriptor, or, on GPUs, nobody else can write to a folder above it. A program is
loaded only if it is intact: after a kill or a full disk, JAX leaves truncated files, and never
rewrites them. Each program has a file with a SHA-256 of its content and name. A program without
a matching checksum, or of another user, is deleted before anything is loaded.
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
from jaxscale.data.caches import user_cache
from jaxscale.files import read_bytes, readable_text, replace_text
from jaxscale.metrics.log import logger
from jaxscale.owners import own_folder

FOLDER = "compiled"
_PROGRAM, _SUM = "-cache", ".sha256"  # JAX defines the first one (jax/_src/lru_cache.py).
_ordinals = itertools.count()  # numbers the turns of this process


class Programs:
  """Program cache of a run, and the turns in which processes compile."""

  def __init__(self, folder: Path | None, wait_s: float, name: str | None = None):
    """Use a folder whose programs were checked.

    Args:
      folder: the folder of JAX's cache; None if jaxscale does not manage it.
      wait_s: the longest time to wait for the leader in a turn, in seconds.
      name: the name of the folder for messages.
    """
    self._folder, self._wait_s, self._name = folder, wait_s, name
    self._lock = threading.Lock()

  def turn(self) -> contextlib.AbstractContextManager[None]:
    """Return a context to compile one program in: first the leader, then the others.

    All processes must create their turns in the same order, in their main threads; they
    may enter them in any thread. On GPUs nobody waits: there XLA divides autotuning among
    the processes, which compile together.
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
    """Write missing and outdated checksums of programs."""
    if self._folder is None or not cluster.is_leader():
      return
    with self._lock:
      try:
        for path in _programs(self._folder):
          stored, written = _sum_of(path), path.stat().st_mtime_ns
          if not stored.exists() or stored.stat().st_mtime_ns < written:
            replace_text(stored, _digest(path) + "\n")
      except OSError as e:
        logger.warning(f"cannot save compiled programs in {self._name}: {e.strerror}")
        self._folder = None


@contextlib.contextmanager
def kept_programs(settings: Compilation, workdir: Path, wait_s: float) -> Iterator[Programs]:
  """Make JAX load and save compiled programs inside the block; all processes call it.

  Args:
    settings: the settings of the cache.
    workdir: the run's workdir, which exists.
    wait_s: the longest time to wait for the leader to compile a program, in seconds.
  """
  # The user set or disabled the cache, for example by JAX_COMPILATION_CACHE_DIR.
  is_users = _setting("compilation_cache_dir") is not None
  is_off = not _setting("enable_compilation_cache") or not settings.cache
  with contextlib.ExitStack() as stack:
    folder = name = None
    if not (is_users or is_off):
      name = _folder_for_all(settings, workdir)
      with contextlib.suppress(OSError):  # Users may differ between hosts.
        folder = stack.enter_context(_opened(Path(name))) if name else None
    programs, options = Programs(folder, wait_s, name), {}
    if folder is not None:
      # JAX warns twice per program; `seal` reports the same problem once.
      warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation")
      options = _jax_settings(folder)
    before = {name: _setting(name) for name in options}
    stack.enter_context(_same_keys_on_cpus())
    _update(options)
    try:
      yield programs
    finally:
      programs.seal()
      _update(before)


def _opened(folder: Path) -> contextlib.AbstractContextManager[Path]:
  # On GPUs the path is part of the keys of programs, and must be the same at each start.
  return own_folder(folder, by_descriptor=jax.default_backend() != "gpu")


def _folder_for_all(settings, workdir: Path) -> str | None:
  """Return the leader's folder."""
  folder, lines = cluster.from_leader(_open(settings, workdir) if cluster.is_leader() else None)
  for line in lines:
    logger.warning(line)
  return folder


@contextlib.contextmanager
def _same_keys_on_cpus() -> Iterator[None]:
  """Give processes on CPUs of one kind the same cache key for a program.

  Only process 0 writes, and with JAX's own keys the other processes never found a program
  (jax 0.10.2). A program depends on the CPU's instruction set; devices and their numbers
  are among the compiler options, which are also part of the key.
  """
  if jax.process_count() == 1 or jax.default_backend() != "cpu":
    yield
    return
  with jax_internals.devices_hashed_as(_cpu_kind()):
    yield


def _cpu_kind() -> bytes:
  """Return the model and instruction sets of this host's processor."""
  fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
  lines = readable_text(Path("/proc/cpuinfo")).splitlines()
  kinds = {x for x in lines if x.partition(":")[0].strip() in fields}
  return "\n".join([platform.machine(), *sorted(kinds)]).encode()


def _jax_settings(folder: Path) -> dict[str, object]:
  """Return values for JAX settings that the user has not set."""
  # Also cache programs that compile in less than a second: a start waits for their sum.
  settings: dict[str, object] = {"persistent_cache_min_compile_time_secs": 0.0}
  if jax.default_backend() != "gpu":
    # These caches do not help, and their path is in every key: moving a workdir would recompile.
    settings["persistent_cache_enable_xla_caches"] = ""
  settings = {k: v for k, v in settings.items() if f"JAX_{k.upper()}" not in os.environ}
  return settings | {"compilation_cache_dir": str(folder)}


def _setting(name: str) -> object:
  return getattr(jax.config, f"jax_{name}")


def _update(values: dict[str, object]) -> None:
  for name, value in values.items():
    jax.config.update(f"jax_{name}", value)
  if values:
    compilation_cache.reset_cache()  # JAX opens the cache only once.


def _open(settings: Compilation, workdir: Path) -> tuple[str | None, list[str]]:
  """Return the folder, with intact programs only, and lines to log; in the leader."""
  if settings.cache_dir:
    folders = [Path(settings.cache_dir).expanduser().absolute()]
  else:
    folders = [workdir.absolute() / FOLDER, user_cache().absolute() / FOLDER]
  first = ""
  for folder in folders:
    try:
      with contextlib.suppress(FileExistsError):  # The check below reports a plain file.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      with _opened(folder) as opened:
        damaged = _clean(opened, math.ceil(1e9 * settings.cache_gb))
      lines = [f"{first}: saving compiled programs in {folder}"] if first else []
      if damaged:
        lines.append(f"{folder}: deleted {damaged} damaged programs; compiling again")
      return str(folder), lines
    except OSError as e:
      first = first or (f"{folder}: {e.strerror}" if e.errno else str(e.strerror))
  return None, [f"{first}: not saving compiled programs (compilation.cache_dir)"]


def _clean(folder: Path, max_bytes: int) -> int:
  """Delete damaged programs, and the least recently used ones above the size limit.

  Returns:
    The number of damaged programs, without those that have no checksum after a kill.
  """
  total = num_damaged = 0
  files = [(path.lstat(), path) for path in _programs(folder)]
  # Sorted by access time, as far as the file system records it.
  for info, path in sorted(files, key=lambda x: -max(x[0].st_atime, x[0].st_mtime)):
    expected, is_whole = readable_text(_sum_of(path)).strip(), False
    is_own = info.st_uid in (os.geteuid(), 0) and not path.is_symlink()
    with contextlib.suppress(OSError):  # It may be a pipe, or unreadable.
      is_whole = is_own and _digest(path) == expected
    total += info.st_size * is_whole
    if is_whole and total <= max_bytes:
      with contextlib.suppress(OSError):  # Restore the access time: a check is not a use.
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
      continue
    num_damaged += bool(expected) and not is_whole
    path.unlink(missing_ok=True)
    _sum_of(path).unlink(missing_ok=True)
  return num_damaged


def _programs(folder: Path) -> list[Path]:
  return [path for path in folder.glob(f"*{_PROGRAM}") if path.is_symlink() or not path.is_dir()]


def _sum_of(path: Path) -> Path:
  return path.with_name(path.name + _SUM)


def _digest(path: Path) -> str:
  """Return the SHA-256 of a program and its name, so that it cannot load under another name."""
  return hashlib.sha256(path.name.encode() + b"\0" + read_bytes(path, most=1 << 40)).hexdigest()
