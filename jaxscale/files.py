"""Defensive I/O: bounded reads of untrusted files, atomic writes, and output of commands.

Files of a run are read again after a kill, a full disk or manual edits, and by other
users. Therefore the type of each value is checked, nesting and numbers are limited, and
every problem is reported in one line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxscale.errors import EXIT_USER, ConfigError, invalid

_DEEPEST = 100  # levels of JSON, because functions that walk over it may recurse
_LONGEST = 1 << 20  # bytes of a line of JSON; longer ones are damaged
MOST_BYTES = 64 << 20  # of a file that is read at once; the largest tokenizer.json has 35 MB
_READ_AT_ONCE = ".json", "manifest.ocdbt"  # by TFDS and TensorStore
_MOST_DIGITS = 18  # digits of an integer in text, so that it fits into 64 bits


class TruncatedError(OSError):
  """Error of a file that became shorter while it was read."""

  exit_code = EXIT_USER
  advice = "copy it again"

  def __init__(self, path: str):
    super().__init__(errno.EINVAL, "became shorter while it was read", path)


def whole_number(text: str) -> int | None:
  """Parse ASCII digits as an integer; None for any other text.

  `str.isdigit` accepts "²", and `int` raises for more than 4,300 digits.

  Example:
    >>> whole_number("42"), whole_number("²"), whole_number("-1"), whole_number("")
    (42, None, None, None)
  """
  is_plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
  return int(text) if is_plain else None


def mismatch(value: Any, shape: Any, name: str = "it") -> str | None:
  """Describe how a JSON value differs from a shape; None if it does not.

  Args:
    value: the value, of any type.
    shape: a type, or a tuple of alternatives; `int` means 64 bits and not bool, `float`
      means any number, and `None` means null. For an object, a dict with the shape of each
      required key (or `{str: shape}` for all values); for an array, a list with the shape
      of its items.
    name: name of the value in the description.

  Example:
    >>> mismatch({"step": 3, "loss": 0.5}, {"step": int})
    >>> mismatch({"a": {"b": ["x"]}}, {"a": {"b": [int]}})
    "a.b[0] is 'x'"
  """
  if isinstance(shape, dict):
    if not isinstance(value, dict):
      return f"{name} is not a JSON object"
    prefix = "" if name == "it" else f"{name}."
    for key, inner in shape.items():
      for k in list(value) if key is str else [key]:
        if k not in value:
          return f"no {prefix}{k} in it"
        if problem := mismatch(value[k], inner, f"{prefix}{k}"):
          return problem
    return None
  if isinstance(shape, list):
    if not isinstance(value, list):
      return f"{name} is not a JSON list"
    items = (mismatch(v, shape[0], f"{name}[{i}]") for i, v in enumerate(value))
    return next(filter(None, items), None)
  shapes = shape if isinstance(shape, tuple) else (shape,)
  return None if any(_is(value, s) for s in shapes) else f"{name} is {value!r:.40}"


def _is(value: Any, shape: Any) -> bool:
  if isinstance(shape, (dict, list)):
    return mismatch(value, shape) is None
  if shape is None:
    return value is None
  if isinstance(value, bool):
    return shape is bool
  if isinstance(value, int):
    return shape in (int, float) and -(2**63) <= value < 2**63
  return isinstance(value, shape)


def parse_json(text: str | bytes) -> Any:
  """Parse JSON in UTF-8.

  Raises:
    ValueError: the text is not JSON, or is nested more than 100 levels deep.
  """
  text = text.decode() if isinstance(text, bytes) else text
  with contextlib.suppress(RecursionError):
    value = json.loads(text)
    if text.count("[") + text.count("{") <= _DEEPEST or _depth(value) <= _DEEPEST:
      return value
  raise ValueError(f"nested more than {_DEEPEST} levels deep")


def _depth(value: Any) -> int:
  if not isinstance(value, (dict, list)):
    return 0
  return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def require_json(path: Path, shape: Any, remedy: str) -> Any:
  """Read a JSON file that must have a shape (see `mismatch`).

  Args:
    path: the file.
    shape: the required shape.
    remedy: what to do if the file is missing or damaged; the end of the error line.

  Raises:
    ConfigError: the file is missing, damaged, or has a different shape.
  """
  try:
    value = parse_json(read_bytes(path))
    problem = mismatch(value, shape)
  except PermissionError as e:
    problem, remedy = e.strerror, "have its owner make it readable (chmod)"
  except OSError as e:
    problem = e.strerror
  except ValueError as e:
    problem = f"not readable as JSON ({e})"
  if problem:
    raise ConfigError(f"{path}: {problem}; {remedy}")
  return value


def read_json(path: Path, shape: Any = None) -> dict[str, Any]:
  """Read the object in a JSON file; {} if it is missing, damaged or has a different shape.

  Example:
    >>> read_json(Path("no/such/summary.json"))
    {}
  """
  return next(iter(json_objects([readable_text(path)], shape)), {})


def read_json_lines(
  path: Path, last_bytes: int | None = None, shape: Any = None
) -> list[dict[str, Any]]:
  """Read the objects in a file with one JSON object per line, such as `metrics.jsonl`.

  Truncated lines are skipped, and a missing file gives [].

  Args:
    path: the file.
    last_bytes: number of bytes to read from the end; None means the whole file.
    shape: skip objects that do not have this shape (see `mismatch`); None means no check.
  """
  return json_objects(_lines(path, last_bytes), shape)


def _lines(path: Path, last_bytes: int | None) -> Iterator[str]:
  """Yield lines up to the first one of more than `MOST_BYTES`, such as a hole in the file."""
  with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
    if last_bytes is not None:
      file.seek(max(file.seek(0, 2) - last_bytes, 0))
    rest = 0  # bytes of a line that is too long
    while rest < MOST_BYTES and (line := file.readline(_LONGEST)):
      is_whole = line[-1:] == b"\n" or len(line) < _LONGEST
      if is_whole and not rest:
        yield line.decode(errors="replace")
      rest = 0 if is_whole else rest + len(line)


def json_objects(texts: Iterable[str], shape: Any = None) -> list[dict[str, Any]]:
  """Parse texts as JSON objects; skip those that fail or do not have the shape."""
  objects = []
  for text in texts:
    with contextlib.suppress(ValueError):
      objects.append(parse_json(text))
  return [value for value in objects if mismatch(value, shape or {}) is None]


def readable_text(path: Path, last_bytes: int | None = None) -> str:
  """Return a file's text, or its last bytes; "" if it is missing or cannot be read."""
  with contextlib.suppress(OSError, ValueError):
    return read_bytes(path, last_bytes).decode(errors="replace")
  return ""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
  """Open a regular file for reading, as `open_descriptor` does."""
  return open(open_descriptor(path), "rb")


def open_descriptor(path: str | os.PathLike[str]) -> int:
  """Return a descriptor that reads a regular file; links to one are followed.

  Raises:
    OSError: the file cannot be read, or is a pipe or a device, which may never end.
    ValueError: the path contains a NUL.
  """
  # O_NONBLOCK: a pipe without a writer, or another user's lease on the file, would block.
  number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  if stat.S_ISREG(mode := os.fstat(number).st_mode):
    return number
  os.close(number)
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
  raise OSError(errno.EINVAL, "not a file", str(path))


def check_regular(paths: Iterable[Path]) -> None:
  """Check files, and all entries of folders, before a library opens them by their names.

  Raises:
    OSError: an entry is a pipe, a device or a socket, which libraries would wait for; or a file
      that they would read at once is larger than 64 MiB.
  """
  left, known = [*paths], set[str]()
  while left:
    path = left.pop()
    if not path.is_dir():
      os.close(open_descriptor(path))
      continue
    with os.scandir(path) as entries:
      for entry in entries:
        if entry.is_dir() and (where := os.path.realpath(entry.path)) not in known:
          known.add(where)  # A link may lead to a folder that contains it.
          left.append(Path(entry.path))
        elif not (entry.is_file() or entry.is_dir()) and os.path.exists(entry.path):
          raise OSError(errno.EINVAL, "not a file", entry.path)
        elif entry.name.endswith(_READ_AT_ONCE) and entry.is_file():
          _check_size(entry.stat().st_size, MOST_BYTES, entry.path)


def read_bytes(path: Path, last_bytes: int | None = None, most: int = MOST_BYTES) -> bytes:
  """Return a file's content, or its last bytes.

  Args:
    path: the file.
    last_bytes: number of bytes to read from the end; None means the whole file.
    most: the size in bytes above which a whole file is refused. A file of holes may have any
      size and take no place on the disk.

  Raises:
    OSError: as in `open_descriptor`; or the file is too large.
    ValueError: the path contains a NUL; or as in `refuse_pointer`.
  """
  with open_regular(path) as file:
    size = os.fstat(file.fileno()).st_size
    if last_bytes is not None:
      file.seek(max(size - last_bytes, 0))
      size = last_bytes
    else:
      _check_size(size, most, str(path))
    # No more than that, in case the file grows meanwhile; files in /proc have the size 0.
    return refuse_pointer(path, file.read(size or 4 << 20))


def _check_size(size: int, most: int, path: str) -> None:
  if size > most:
    raise OSError(errno.EFBIG, f"larger than {most >> 20:,} MiB", path)


def read_at(descriptor: int, buffer: memoryview, position: int, name: str) -> None:
  """Fill a buffer with the bytes of a file from a position on.

  Unlike a memory map, which ends the process by SIGBUS if the file became shorter.

  Raises:
    TruncatedError: the file ends before.
    OSError: the disk failed.
  """
  while len(buffer):
    if not (count := os.preadv(descriptor, [buffer], position)):
      raise TruncatedError(name)
    buffer, position = buffer[count:], position + count


def refuse_pointer(path: object, content: bytes) -> bytes:
  """Return the content of a file, or its beginning, unless it is a Git LFS pointer.

  Raises:
    ConfigError: the file is a pointer, e.g. in a repository cloned without Git LFS.
  """
  if content.startswith(b"version https://git-lfs."):
    fix = "run `git lfs pull` in its repository, or download the file itself"
    raise invalid(str(path), ..., "is a Git LFS pointer, not the file", fix)
  return content


def sync(path: Path) -> None:
  """Sync a file or folder to disk, so that it survives a power failure.

  Raises:
    OSError: the path is missing, or the disk failed.
  """
  is_folder = path.is_dir()
  with contextlib.suppress(*([PermissionError] if is_folder else [])):
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
      os.fsync(number)
    except OSError as e:  # some file systems do not support fsync of folders
      if not is_folder or e.errno not in (errno.EINVAL, errno.ENOTSUP):
        raise
    finally:
      os.close(number)


def expand(path: str | os.PathLike) -> str:
  """Replace a leading `~` in a path by the home directory.

  Shells do not expand it in `--workdir=~/x` and in variables of a job script.

  Raises:
    ConfigError: the home directory or the user is unknown.
  """
  text = os.path.expanduser(path)
  if text.startswith("~") and os.sep in text:
    fix = "set HOME, or write the whole path (./~ for a folder of that name)"
    raise invalid("path", text, "has no home directory", fix)
  return text


def output_path(path: str | os.PathLike) -> Path:
  """Return the path of an output file, and create its parent folders.

  Raises:
    OSError: the folders cannot be created.
  """
  path = Path(expand(path))
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
  """Open a new file that replaces `path` atomically once it is complete.

  Links at `path` are not followed. The umask determines the permissions.

  Args:
    path: the file to replace.
    durable: sync to disk, so that a power failure leaves the old or the new file.

  Raises:
    OSError: writing failed; the error has the name `path`, and no file is left behind.
  """
  # Like tempfile, but with the mode from the umask instead of 0600.
  scratch = path.with_name(f".{secrets.token_hex(8)}.tmp")
  flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
  try:
    with open(os.open(scratch, flags, 0o666), "wb") as file:
      yield file
      if durable:
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    if durable:
      sync(path.parent)
  except BaseException as e:
    with contextlib.suppress(OSError):
      scratch.unlink()
    if isinstance(e, OSError) and e.filename in (None, scratch, str(scratch)):
      raise OSError(e.errno, e.strerror, str(path)) from None
    raise


def write_json(path: Path, value: Any) -> None:
  """Replace a JSON file atomically: a reader sees the old file or the new one.

  This also holds after a power failure, since runs cannot resume without some of these files.
  """
  replace_text(path, json.dumps(value, indent=2) + "\n", durable=True)


def append_json_line(path: Path, line: Mapping[str, Any]) -> None:
  """Append a line to a file of JSON lines, without following links."""
  with open(open_to_append(path), "a") as file:
    file.write(json.dumps(line) + "\n")


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
  """Replace a file's content by a text atomically; see `replacing` for `durable`."""
  with replacing(path, durable=durable) as file:
    file.write(text.encode())


def open_to_append(path: Path) -> int:
  """Open a descriptor that appends to a file, without following links.

  Raises:
    OSError: as in `os.open`; or the path is a pipe or a device, which may block forever.
  """
  flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
  number = os.open(path, flags | os.O_NONBLOCK, 0o666)
  if not stat.S_ISREG(os.fstat(number).st_mode):
    os.close(number)
    raise OSError(errno.EINVAL, "not a file", str(path))
  return number


def output_of(*command: str, timeout_s: float, **variables: str) -> str | None:
  r"""Return the standard output of a command; None if it is missing, fails or is too slow.

  Args:
    command: the program and its arguments.
    timeout_s: the seconds after which the command is ended.
    variables: environment variables to set for it.

  Example:
    >>> output_of("echo", "5", timeout_s=60.0), output_of("no-such-program", timeout_s=60.0)
    ('5\n', None)
  """
  options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
  try:
    done = subprocess.run(command, timeout=timeout_s, env=os.environ | variables, **options)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout if done.returncode == 0 else None
