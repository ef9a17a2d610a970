"""How a command ends: its exit code, and one line for what its user did wrong."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from traceback import walk_tb
from typing import Any, NamedTuple, NoReturn, ParamSpec

EXIT_DONE, EXIT_CRASH, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_PREEMPTED = 85  # asked to stop, and saved: requeue
EXIT_HANG = 86
EXIT_GIVE_UP = 93  # do not requeue: it would only fail again
# Of a run that was asked to stop, and saved, by `StopRequest.kind`.
EXIT_OF_STOP = {"preemption": EXIT_PREEMPTED, "interrupt": EXIT_INTERRUPTED}

# What a disk or its server does, and not a fault of the program.
_DISK_ADVICE = {
  errno.ENOSPC: "make room",
  errno.EDQUOT: "make room, or have the quota raised",
  errno.EROFS: "have it mounted for writing (dmesg says why it is not)",
  errno.EMFILE: "raise the limit on open files (ulimit -n)",
  errno.ENFILE: "raise the system's limit on open files (sysctl fs.file-max)",
  errno.EIO: "have the disk or its server checked (dmesg)",
  errno.ESTALE: "have the file system mounted again",
}

# A command stuck in C++, as in a compilation, runs no handler of Ctrl-C: after these
# seconds a thread ends the process.
_UNWIND_S = 1.0

# For threads of a config that are not daemons, after the end of its run.
_THREADS_S = 30.0

# Threads that the end of the process does not wait for: see `abandon`.
_abandoned: list[threading.Thread] = []

P = ParamSpec("P")


class ConfigError(ValueError):
  """An invalid setting; its message of one line names field, value and remedy."""


def invalid(field: str, value: Any, why: str, fix: str) -> ConfigError:
  """Return the error for an invalid value: `field=value why; fix`.

  Args:
    field: the setting, option or file that the user gave.
    value: its value, shortened where it is long; `...` leaves it out.
    why: what is wrong with it, a predicate such as "is not divisible by 8 devices".
    fix: what to do, an imperative.

  Example:
    >>> print(invalid("batch_size", 100, "is not divisible by 8 devices", "use 96"))
    batch_size=100 is not divisible by 8 devices; use 96
  """
  text = value if isinstance(value, str) else repr(value)
  shown = "" if value is ... else f"={text if len(text) <= 80 else text[:77] + '...'}"
  return ConfigError(f"{field}{shown} {why}; {fix}")


class GiveUpError(Exception):
  """A restart would only fail again; the message says why."""

  exit_code = EXIT_GIVE_UP


class NonFiniteError(FloatingPointError):
  """A step whose loss or gradient is NaN or Inf.

  Attributes:
    step: number of the step.
    good_until: checkpoints up to this step are good.
    advice: what to do, for the end of the line.
  """

  exit_code = EXIT_CRASH
  advice = (
    "lower optimizer.lr or set clip_norm, in a new --workdir, or resume without such "
    "steps by --config.checks.nan_policy=skip"
  )

  def __init__(self, step: int, what: str):
    super().__init__(f"{what} at step {step}")
    self.step = self.good_until = step


class OutputError(OSError):
  """Standard output is full, or nobody reads it any more."""


class Output:
  """Standard output, with one place for what goes wrong with it.

  Attributes:
    on_error: called with the error of a write, which is then lost; None: it is raised.
  """

  def __init__(self, stream: Any):
    self._stream, self._is_moved = stream, False
    self.on_error: Callable[[OSError], None] | None = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    """As a file's; so is `flush`."""
    self._guarded(self._stream.write, text)
    return len(text)

  def flush(self) -> None:
    """Write out what waits."""
    self._guarded(self._stream.flush)

  def move(self, *, to_stderr: bool = True) -> None:
    """From here on, and what waits, to stderr; where that fails as well, nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a notebook's has no descriptor
      if to_stderr and not self._is_moved:
        os.dup2(2, self._stream.fileno())
      else:
        with open(os.devnull, "wb") as nowhere:
          os.dup2(nowhere.fileno(), self._stream.fileno())
      self._is_moved = True

  def _guarded(self, function: Callable[..., Any], *args: str) -> None:
    try:
      function(*args)
    except OSError as e:
      if self.on_error is None:
        self.move(to_stderr=False)  # what waits would fail again at the very end
        raise OutputError(e.errno, e.strerror) from None
      self.on_error(e)


def disk_advice(number: int | None, folder: str | os.PathLike[str] = ".") -> str:
  """The end of a line about an error of a disk: what to do.

  Args:
    number: `OSError.errno`; None: not known.
    folder: on that disk.
  """
  advice = _disk_remedy(number, folder) or "correct this"
  return f"{advice}, and start it again: it resumes from its newest checkpoint"


def unwritable(workdir: str | os.PathLike[str], error: OSError) -> ConfigError:
  """Return the error for a workdir that a run cannot begin in, with what to do."""
  remedy = _disk_remedy(error.errno, workdir)
  fix = f"{remedy}, or use another one" if remedy else "use another one"
  return invalid("--workdir", str(workdir), f"cannot be written: {error.strerror}", fix)


def _disk_remedy(number: int | None, folder: str | os.PathLike[str]) -> str | None:
  if number == errno.ENOSPC and lacks_inodes(folder):
    return "delete files there, or have their number raised"
  return _DISK_ADVICE.get(number or 0)


def lacks_inodes(folder: str | os.PathLike[str]) -> bool:
  """Return whether a disk can hold no more files, however much room there is."""
  with contextlib.suppress(OSError):
    found = os.statvfs(folder)
    return found.f_files > 0 and found.f_favail == 0
  return False


class UserMessage(NamedTuple):
  """One line about an error for the user, and the exit code."""

  line: str
  code: int


def printable(text: str) -> str:
  r"""A text of others as a terminal may show it: one line without control characters.

  Example:
    >>> print(printable("a\x1b[2Jb\nc"))
    a\x1b[2Jb\nc
  """
  return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def message_of(error: BaseException) -> str:
  r"""The message of an error on one line.

  Example:
    >>> message_of(OSError("no\n  route"))
    'no route'
  """
  return " ".join(str(error).split())


def user_message(error: BaseException) -> UserMessage | None:
  """The line for an error that is not the program's; None: it needs a traceback.

  Those are ConfigErrors, what disks do, errors with an `exit_code`, whose `advice`, if
  there is one, ends the line, and what JAX and Python report of the environment.

  Example:
    >>> user_message(ConfigError("--sizes=x: give whole numbers"))
    UserMessage(line='--sizes=x: give whole numbers', code=2)
    >>> user_message(KeyError("x"))
  """
  if (message := _message(error)) is None:
    return None
  return message._replace(line=printable(message.line))


def _message(error: BaseException) -> UserMessage | None:
  if isinstance(error, ConfigError):
    return UserMessage(str(error), EXIT_USER)
  if code := getattr(error, "exit_code", None):
    advice = getattr(error, "advice", "")
    return UserMessage(f"{error}; {advice}" if advice else str(error), code)
  if isinstance(error, OutputError) and error.errno != errno.EPIPE:
    text = f"standard output: {error.strerror}; what it was to hold is lost"
    return UserMessage(f"{text}, print it elsewhere", EXIT_CRASH)
  if isinstance(error, OSError) and error.errno in _DISK_ADVICE:
    where = f"{error.filename}: " if error.filename else ""
    advice = disk_advice(error.errno, os.path.dirname(str(error.filename or "")) or ".")
    return UserMessage(f"{where}{error.strerror}; {advice}", EXIT_CRASH)
  if isinstance(error, IsADirectoryError) and error.filename:
    advice = "a file is to be there, move it away"
    return UserMessage(f"{error.filename}: {error.strerror}; {advice}", EXIT_CRASH)
  if line := _of_environment(error):
    return UserMessage(line, EXIT_USER)
  return None


def _of_environment(error: BaseException) -> str | None:
  """What is wrong with the environment, by an error of Python's or JAX's."""
  if isinstance(error, FileNotFoundError) and os.stat(".").st_nlink == 0:
    return "the current folder was deleted; cd to one that exists"
  text = message_of(error)
  module = getattr(error, "name", None) or "jaxscale"
  if isinstance(error, ModuleNotFoundError) and not module.startswith("jaxscale"):
    remedy = "install jaxscale's packages there (`make env`), or use the Python of its "
    return f"{module} is not installed for {sys.executable}; {remedy}environment"
  # A variable JAX_… that it cannot read, and a platform that it cannot start.
  names = [f.f_globals.get("__name__", "") for f, _ in walk_tb(error.__traceback__)]
  package, _, module = (names[-1] if names else "").partition(".")
  is_config = package == "jax" and module.endswith("config")
  if isinstance(error, ValueError) and is_config:
    return f"{text}; correct the variable in the environment, or unset it"
  is_platform = text.startswith("Unable to initialize backend")
  return text if isinstance(error, RuntimeError) and is_platform else None


def one_line_errors(main: Callable[P, int]) -> Callable[P, int]:
  """A `main` whose errors of its user become one line on stderr and a code.

  Example:
    >>> @one_line_errors
    ... def main():
    ...   raise ConfigError("--sizes=x: give whole numbers")
    >>> main()
    2
  """

  @functools.wraps(main)
  def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
    try:
      return main(*args, **kwargs)
    except Exception as e:
      if (message := user_message(e)) is None:
        raise
      print(f"error: {message.line}", file=sys.stderr)
      return message.code

  return guarded


def abandon(thread: threading.Thread) -> None:
  """Let `leave` end the process without what libraries do at its exit.

  For a thread that hangs in a library, whose own wait at exit has no bound (wandb's).
  """
  _abandoned.append(thread)


def leave(main: Callable[[list[str]], int]) -> NoReturn:
  """End the process with the exit code of a command's `main`.

  One of several processes that fails is ended by `cluster.open_session` before.
  """
  code = EXIT_CRASH
  _open_closed()
  _watch_interrupts()
  errors = Output(sys.stderr)
  errors.on_error = lambda error: None  # a full disk under it costs lines, no exit code
  sys.stderr = errors
  try:
    sys.stdout = _output(sys.stdout)
    code = one_line_errors(_flushed(main))(sys.argv[1:])
  except OutputError:  # `--help | head`: the reader has enough
    os._exit(EXIT_DONE)
  except KeyboardInterrupt:
    with contextlib.suppress(OSError):
      sys.stdout.flush()
    _leave_interrupted()
  except Exception:
    traceback.print_exc()
  errors.on_error = None  # what waits must not fail again at the very end
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):  # was reported, or nobody reads it
      stream.flush()
  if code in (EXIT_CRASH, EXIT_USER):
    os._exit(code)  # a compilation in the background may take minutes more
  # Slurm sends SIGTERM to what is left of a job as soon as one process has ended or
  # the job is requeued: that must not take the exit code away. (Python gives its own
  # handlers back to the system before it has ended; what is ignored stays ignored.)
  for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  if any(thread.is_alive() for thread in _abandoned):
    _leave_now(code)
  _bound_exit(code)
  sys.exit(code)


def _leave_now(code: int) -> NoReturn:
  """Leave without what libraries do at the exit of a process."""
  if jax := sys.modules.get("jax"):
    jax.distributed.shutdown()  # the others wait for it
  os._exit(code)


def _bound_exit(code: int) -> None:
  """Leave some time from here on, where Python still waits for threads of the config.

  It waits for those that are not daemons, and then calls what atexit has, the last
  function first.
  """

  def leave_behind() -> None:
    others = {threading.main_thread(), threading.current_thread()}
    alive = [t for t in threading.enumerate() if not t.daemon and t not in others]
    names = ", ".join(thread.name for thread in alive)
    text = f"note: left while threads still ran ({names}); start them with daemon=True"
    print(printable(text), file=sys.stderr)
    _leave_now(code)

  timer = threading.Timer(_THREADS_S, leave_behind)
  timer.daemon = True
  timer.start()
  atexit.register(timer.cancel)


def _open_closed() -> None:
  """Open the null device where standard streams were closed, as by `2>&-`.

  Else the next file or socket would be number 2, into which C++ writes its logs.
  """
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    try:
      os.fstat(number)
    except OSError:
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number
    if getattr(sys, name) is None:
      setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _output(stream: Any) -> Any:
  """Standard output, guarded; what its encoding lacks is printed as "?"."""
  if "utf" not in (stream.encoding or "").lower():
    stream.reconfigure(errors="replace")
  return Output(stream)


def _flushed(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
  """A `main` that has printed, or failed to, when it returns."""

  def run(argv: list[str]) -> int:
    code = main(argv)
    sys.stdout.flush()
    return code

  return run


def _watch_interrupts() -> None:
  """End this process some time after Ctrl-C, also where the main thread is in C++.

  What the main thread has to clean up it does meanwhile. A session has handlers of
  its own (cluster/watch/signals.py).
  """
  report = sys.unraisablehook

  def unraisable(error: Any) -> None:
    # A collection of garbage, or a __del__, was at work, and has swallowed it.
    if issubclass(error.exc_type, KeyboardInterrupt):
      _leave_interrupted()
    report(error)

  sys.unraisablehook = unraisable
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

  def wait() -> None:
    while signal.SIGINT not in os.read(reading, 64):
      pass
    time.sleep(_UNWIND_S)
    _leave_interrupted()

  threading.Thread(target=wait, name="ctrl-c", daemon=True).start()


def _leave_interrupted() -> NoReturn:
  """Leave after Ctrl-C: at once, since threads that compile have no end to wait for."""
  with contextlib.suppress(OSError):
    os.write(2, b"\nerror: Ctrl-C\n")
  os._exit(EXIT_INTERRUPTED)
