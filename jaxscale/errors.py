"""Exit codes of commands, and one-line errors for users."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable
from traceback import walk_tb
from typing import Any, NamedTuple, NoReturn, ParamSpec

# Exit codes of all commands. `jobs/spec.py` has those after which a job restarts, and
# docs/reference/exit_codes.md explains them to users.
EXIT_DONE = 0
EXIT_CRASH = 1  # fault or error; a job restarts if it has saved a newer checkpoint
EXIT_USER = 2  # invalid configuration or usage
EXIT_PREEMPTED = 85  # stopped on request after saving; requeue
EXIT_HANG = 86  # a process hung or was lost; requeue
EXIT_GIVE_UP = 93  # do not requeue, because a restart would fail again
EXIT_INTERRUPTED = 130  # Ctrl-C, after saving; as of shells, 128 + SIGINT

# Advice for errors of disks and file servers, which are not bugs of the program.
_DISK_ADVICE = {
  errno.ENOSPC: "make room",
  errno.EDQUOT: "make room, or have the quota raised",
  errno.EROFS: "mount it for writing (dmesg shows why it is not)",
  errno.EMFILE: "raise the limit on open files (ulimit -n)",
  errno.ENFILE: "raise the system's limit on open files (sysctl fs.file-max)",
  errno.EIO: "have the disk or its server checked (dmesg)",
  errno.ESTALE: "have the file system mounted again",
}

# Seconds after Ctrl-C before a thread ends the process. A command that is in C++ code, such
# as a compilation, does not run Python's handler.
_UNWIND_S = 1.0

# Seconds to wait for non-daemon threads of a config after the end of its run.
_THREADS_S = 30.0

# Threads that the end of the process does not wait for; see `abandon`.
_abandoned: list[threading.Thread] = []

P = ParamSpec("P")


class ConfigError(ValueError):
  """Invalid setting or usage, with a one-line message: field, value, problem, remedy."""


def invalid(field: str, value: Any, problem: str, fix: str) -> ConfigError:
  """Return the error for an invalid value: `field=value problem; fix`.

  Args:
    field: the setting, option or file of the user.
    value: the value of the field, shortened if it is long; `...` omits it.
    problem: the problem, a predicate such as "is not divisible by 8 devices".
    fix: the remedy, an imperative.

  Example:
    >>> print(invalid("batch_size", 100, "is not divisible by 8 devices", "use 96"))
    batch_size=100 is not divisible by 8 devices; use 96
  """
  text = value if isinstance(value, str) else repr(value)
  shown = "" if value is ... else f"={text if len(text) <= 80 else text[:77] + '...'}"
  return ConfigError(f"{field}{shown} {problem}; {fix}")


def remedy_for(path: str | os.PathLike, otherwise: str = "check the path") -> str:
  """Return the remedy for a missing path; it may be the name of a model on a hub.

  Example:
    >>> remedy_for("Qwen/Qwen3-0.6B")
    'nothing is downloaded; run `hf download Qwen/Qwen3-0.6B --local-dir DIR` and give DIR'
    >>> remedy_for("x.safetensors")
    'check the path'
  """
  name = os.fspath(path)
  is_local = name.endswith((".safetensors", ".json")) or os.path.isdir(os.path.dirname(name))
  if is_local or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
    return otherwise
  return f"nothing is downloaded; run `hf download {name} --local-dir DIR` and give DIR"


class GiveUpError(Exception):
  """Error after which a restart would fail again."""

  exit_code = EXIT_GIVE_UP


class NonFiniteError(FloatingPointError):
  """Error for a step whose loss or gradient is NaN or Inf.

  Attributes:
    step: number of the step.
    good_until: checkpoints up to this step are good.
    advice: what to do; the end of the error line.
  """

  exit_code = EXIT_CRASH
  advice = (
    "lower optimizer.lr or set clip_norm, in a new --workdir, or resume without such "
    "steps by --config.checks.nan_policy=skip"
  )

  def __init__(self, step: int, what: str, is_skipping: bool = False):
    super().__init__(f"{what} at step {step}")
    if is_skipping:
      self.advice = self.advice.partition(", or resume")[0]
    self.step = self.good_until = step


class OutputError(OSError):
  """Error of standard output: its disk is full, or its reader has closed it."""


class Output:
  """Wrapper of standard output that handles write errors in one place.

  Attributes:
    on_error: function that is called with a write error, whose text is lost; None raises
      an `OutputError`.
  """

  def __init__(self, stream: Any):
    self._stream, self._is_moved = stream, False
    self.on_error: Callable[[OSError], None] | None = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    """Write a text, as a file's `write` does."""
    self._guarded(self._stream.write, text)
    return len(text)

  def flush(self) -> None:
    """Flush the stream."""
    self._guarded(self._stream.flush)

  def move(self, *, to_stderr: bool = True) -> None:
    """Redirect buffered and further output to stderr, or to nowhere at the second call."""
    with contextlib.suppress(OSError, ValueError):  # a notebook's stream has no descriptor
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
        self.move(to_stderr=False)  # buffered text would fail again at exit
        raise OutputError(e.errno, e.strerror) from None
      self.on_error(e)


def disk_advice(number: int | None, folder: str | os.PathLike[str] = ".") -> str:
  """Return advice for a disk error, the end of an error line.

  Args:
    number: `OSError.errno`, or None if it is unknown.
    folder: a folder on the disk.
  """
  advice = _disk_remedy(number, folder) or "correct this"
  return f"{advice}, and start it again: it resumes from its newest checkpoint"


def unwritable(workdir: str | os.PathLike[str], error: OSError) -> ConfigError:
  """Return the error for a workdir that cannot be written."""
  remedy = _disk_remedy(error.errno, workdir)
  fix = f"{remedy}, or use a different directory" if remedy else "use a different directory"
  return invalid("--workdir", str(workdir), f"cannot be written: {error.strerror}", fix)


def _disk_remedy(number: int | None, folder: str | os.PathLike[str]) -> str | None:
  if number == errno.ENOSPC and lacks_inodes(folder):
    return "delete files, or ask for a higher limit on inodes"
  return _DISK_ADVICE.get(number or 0)


def lacks_inodes(folder: str | os.PathLike[str]) -> bool:
  """Return whether a disk has no free inodes, so that no file can be created."""
  with contextlib.suppress(OSError):
    status = os.statvfs(folder)
    return status.f_files > 0 and status.f_favail == 0
  return False


class UserMessage(NamedTuple):
  """Error line for the user, and the exit code."""

  line: str
  code: int


def printable(text: str, keep: str = "") -> str:
  r"""Escape control characters and newlines in a text from an untrusted source.

  A terminal would execute them: set its title, clear it, or write to the clipboard.

  Args:
    text: the text.
    keep: the characters that stay as they are, e.g. newlines in a text of several lines.

  Example:
    >>> print(printable("a\x1b[2Jb\nc"))
    a\x1b[2Jb\nc
  """
  hidden = [c for c in {*text} - {*keep} if not c.isprintable()]
  # Python counts the no-break spaces as not printable.
  return text.translate({ord(c): repr(c)[1:-1] for c in hidden if unicodedata.category(c) != "Zs"})


_NAMES = "token|secret|password|credential|signature|key|sig"
_CREDENTIALS = re.compile(
  # A user alone may be a token in https, and is the container or the account in others.
  r"(?:(?<=http://)|(?<=https://)|(?<=://)(?=[^/?#\s@]*:))[^/?#\s@]+(?=@)"
  rf"|(?<=[?&])[\w-]*(?:{_NAMES})=[^&#\s'\"]+",
  re.IGNORECASE,
)


def hide_credentials(text: str) -> str:
  """Replace users, passwords and tokens in the addresses in a text.

  Example:
    >>> hide_credentials("see https://me:x@host/a and https://host/a?sig=b")
    'see https://***@host/a and https://host/a?***'
    >>> hide_credentials("abfs://container@account/path@v1")
    'abfs://container@account/path@v1'
  """
  return _CREDENTIALS.sub("***", text)


def message_of(error: BaseException) -> str:
  r"""Return the message of an error on one line; of JAX's own errors the first line.

  Example:
    >>> message_of(OSError("no\n  route")), message_of(ConfigError("no\n  route"))
    ('no route', 'no route')
  """
  text = str(error)
  if type(error).__module__.partition(".")[0] in ("jax", "jaxlib"):
    # The other lines are paragraphs of advice and a link.
    text = text.partition("\n")[0]
  return hide_credentials(" ".join(text.split()))


def user_message(error: BaseException) -> UserMessage | None:
  """Return the line for an error that is not a bug; None if a traceback must be printed.

  Such errors are ConfigErrors, disk errors, errors with an `exit_code` (their `advice`, if
  there is one, ends the line), and errors of the environment from JAX and Python.

  Example:
    >>> user_message(ConfigError("--sizes=x: give whole numbers"))
    UserMessage(line='--sizes=x: give whole numbers', code=2)
    >>> user_message(KeyError("x"))
  """
  if (message := _message(error)) is None:
    return None
  return message._replace(line=printable(hide_credentials(message.line)))


def _message(error: BaseException) -> UserMessage | None:
  if isinstance(error, ConfigError):
    return UserMessage(str(error), EXIT_USER)
  if code := getattr(error, "exit_code", None):
    advice = getattr(error, "advice", "")
    return UserMessage(f"{error}; {advice}" if advice else str(error), code)
  if isinstance(error, OutputError) and error.errno != errno.EPIPE:
    text = f"standard output: {error.strerror}; its output is lost"
    return UserMessage(f"{text}, redirect it elsewhere", EXIT_CRASH)
  if isinstance(error, OSError) and error.errno in _DISK_ADVICE:
    where = f"{error.filename}: " if error.filename else ""
    advice = disk_advice(error.errno, os.path.dirname(str(error.filename or "")) or ".")
    return UserMessage(f"{where}{error.strerror}; {advice}", EXIT_CRASH)
  if isinstance(error, IsADirectoryError) and error.filename:
    advice = "move this directory away, since a file is needed in its place"
    return UserMessage(f"{error.filename}: {error.strerror}; {advice}", EXIT_CRASH)
  if line := _of_environment(error):
    return UserMessage(line, EXIT_USER)
  return None


def _of_environment(error: BaseException) -> str | None:
  """Return a line for an environment error from Python or JAX; None for other errors."""
  if isinstance(error, FileNotFoundError) and os.stat(".").st_nlink == 0:
    return "the current folder was deleted; cd to one that exists"
  text = message_of(error)
  module = getattr(error, "name", None) or "jaxscale"
  if isinstance(error, ModuleNotFoundError) and not module.startswith("jaxscale"):
    remedy = "install jaxscale's packages there (`make env`), or use the Python of its "
    return f"{module} is not installed for {sys.executable}; {remedy}environment"
  # JAX raises these for invalid JAX_... variables and for platforms that fail to start.
  names = [f.f_globals.get("__name__", "") for f, _ in walk_tb(error.__traceback__)]
  package, _, module = (names[-1] if names else "").partition(".")
  is_config = package == "jax" and module.endswith("config")
  if isinstance(error, ValueError) and is_config:
    return f"{text}; correct the variable in the environment, or unset it"
  is_platform = text.startswith("Unable to initialize backend")
  return text if isinstance(error, RuntimeError) and is_platform else None


def one_line_errors(main: Callable[P, int]) -> Callable[P, int]:
  """Wrap a `main` so that user errors become a line on stderr and an exit code.

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
  """Make `leave` end the process without the exit handlers of libraries.

  Use it for a thread that hangs in a library that waits without limit at exit (wandb).
  """
  _abandoned.append(thread)


def leave(main: Callable[[list[str]], int]) -> NoReturn:
  """End the process with the exit code of a command's `main`.

  If one of several processes fails, `cluster.open_session` ends it before.
  """

  @one_line_errors
  def flushed() -> int:
    code = main(sys.argv[1:])
    sys.stdout.flush()
    return code

  code = EXIT_CRASH
  _open_closed()
  _watch_interrupts()
  errors = Output(sys.stderr)
  errors.on_error = lambda error: None  # a full disk loses lines, but not the exit code
  sys.stderr = errors
  try:
    sys.stdout = _output(sys.stdout)
    code = flushed()
  except OutputError:  # the reader has closed the pipe, as in `--help | head`
    os._exit(EXIT_DONE)
  except KeyboardInterrupt:
    with contextlib.suppress(OSError):
      sys.stdout.flush()
    _leave_interrupted()
  except Exception:
    traceback.print_exc()
  errors.on_error = None  # buffered text must not fail again at exit
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):  # already reported, or without a reader
      stream.flush()
  if code in (EXIT_CRASH, EXIT_USER):
    os._exit(code)  # a compilation in the background could take minutes
  # Slurm sends SIGTERM to the rest of a job as soon as one process has ended or the job is
  # requeued, which must not change the exit code. Python resets its own handlers before it
  # has ended, but ignored signals stay ignored.
  for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  if any(thread.is_alive() for thread in _abandoned):
    _leave_now(code)
  _bound_exit(code)
  sys.exit(code)


def _leave_now(code: int) -> NoReturn:
  """End the process without the exit handlers of libraries."""
  if jax := sys.modules.get("jax"):
    jax.distributed.shutdown()  # other processes wait for it
  os._exit(code)


def _bound_exit(code: int) -> None:
  """End the process after `_THREADS_S` if Python still waits for threads of the config.

  Python waits for non-daemon threads before it runs the functions of atexit, of which
  the last one registered runs first.
  """

  def leave_behind() -> None:
    others = {threading.main_thread(), threading.current_thread()}
    alive = [t for t in threading.enumerate() if not t.daemon and t not in others]
    names = ", ".join(thread.name for thread in alive)
    text = f"note: exited while threads were running ({names}); start them with daemon=True"
    print(printable(text), file=sys.stderr)
    _leave_now(code)

  timer = threading.Timer(_THREADS_S, leave_behind)
  timer.daemon = True
  timer.start()
  atexit.register(timer.cancel)


def _open_closed() -> None:
  """Open the null device for closed standard streams, as after `2>&-`.

  Otherwise the next file or socket would get descriptor 2, to which C++ writes its logs.
  """
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    try:
      os.fstat(number)
    except OSError:
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number
    if getattr(sys, name) is None:
      setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _output(stream: Any) -> Any:
  """Wrap standard output; characters that its encoding lacks become "?"."""
  if "utf" not in (stream.encoding or "").lower():
    stream.reconfigure(errors="replace")
  return Output(stream)


def _watch_interrupts() -> None:
  """End this process shortly after Ctrl-C, even if the main thread is in C++ code.

  The main thread can clean up meanwhile, until the second Ctrl-C. A session installs its
  own handlers (cluster/watch/signals.py).
  """
  report = sys.unraisablehook

  def unraisable(error: Any) -> None:
    # The garbage collector or a __del__ method was running and swallowed the exception.
    if issubclass(error.exc_type, KeyboardInterrupt):
      _leave_interrupted()
    report(error)

  def interrupt(*_: object) -> NoReturn:
    # A second KeyboardInterrupt during the clean-up would end in a traceback.
    signal.signal(signal.SIGINT, lambda *_: _leave_interrupted())
    raise KeyboardInterrupt

  sys.unraisablehook = unraisable
  if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored
    signal.signal(signal.SIGINT, interrupt)
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
  """End the process after Ctrl-C at once, since compiling threads may take long."""
  with contextlib.suppress(OSError):
    os.write(2, b"\ninterrupted\n")
  os._exit(EXIT_INTERRUPTED)
