"""Files that others may have damaged or replaced: read within limits, written whole.

What a run leaves is read again after a kill, a full disk or somebody's editor, and by
other users. So nothing is taken for granted: the type of each value is checked, nesting
and numbers are bounded, and whatever is wrong is one line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxscale.errors import ConfigError, invalid

_DEEPEST = 100  # levels of JSON: what walks over it may recurse
_MOST_DIGITS = 18  # of a whole number in text: any such number has 64 bits


def whole_number(text: str) -> int | None:
  """The number that ASCII digits stand for; None: the text is anything else.

  `str.isdigit` takes "²", and `int` raises for more than 4,300 digits.

  Example:
    >>> whole_number("42"), whole_number("²"), whole_number("-1"), whole_number("")
    (42, None, None, None)
  """
  is_plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
  return int(text) if is_plain else None


def mismatch(value: Any, shape: Any, name: str = "it") -> str | None:
  """How a value out of JSON differs from a shape, as words; None: it does not.

  Args:
    value: of any type.
    shape: a type, or a tuple of alternatives: `int` is of 64 bits and no bool, `float`
      any number and `None` is null. Of an object a dict with the shape of each key
      that it must have (or of all its values: `{str: shape}`), of an array a list with
      the shape of its items.
    name: of the value.

  Example:
    >>> mismatch({"step": 3, "loss": 0.5}, {"step": int})
    >>> mismatch({"a": {"b": ["x"]}}, {"a": {"b": [int]}})
    "a.b[0] is 'x'"
  """
  if isinstance(shape, dict):
    if not isinstance(value, dict):
      return f"{name} is no JSON object"
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
      return f"{name} is no JSON list"
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
  """A value out of JSON, in UTF-8.

  Raises:
    ValueError: it is none, or nested more than 100 deep.
  """
  text = text.decode() if isinstance(text, bytes) else text
  try:
    value = json.loads(text)
  except RecursionError:
    value = None
  else:
    if text.count("[") + text.count("{") <= _DEEPEST:
      return value
    level = [value]
    for _ in range(_DEEPEST):
      nodes = [v.values() if isinstance(v, dict) else v for v in level]
      level = [x for n in nodes for x in n if isinstance(x, (dict, list))]
      if not level:
        return value
  raise ValueError(f"nested more than {_DEEPEST} deep")


def require_json(path: Path, shape: Any, remedy: str) -> Any:
  """What is in a JSON file, if it has this shape (`mismatch`).

  Raises:
    ConfigError: it is missing or damaged; the line ends with the remedy.
  """
  try:
    value = parse_json(read_bytes(path))
    why = mismatch(value, shape)
  except PermissionError as e:
    why, remedy = e.strerror, "have its owner make it readable (chmod)"
  except OSError as e:
    why = e.strerror
  except ValueError as e:
    why = f"not readable as JSON ({e})"
  if why:
    raise ConfigError(f"{path}: {why}; {remedy}")
  return value


def read_json(path: Path, shape: Any = None) -> dict[str, Any]:
  """The object in a JSON file; empty if it is missing, damaged or of another shape.

  Example:
    >>> read_json(Path("no/such/summary.json"))
    {}
  """
  return next(iter(json_objects([readable_text(path)], shape)), {})


def read_json_lines(
  path: Path, last_bytes: int | None = None, shape: Any = None
) -> list[dict[str, Any]]:
  """The objects in a file with one JSON object per line, as in `metrics.jsonl`.

  A line that was cut short is left out, and so is everything in a missing file.

  Args:
    path: the file.
    last_bytes: read only this many bytes from its end; None: all.
    shape: leave out what is not of it (`mismatch`); None: any object will do.
  """
  return json_objects(readable_text(path, last_bytes).split("\n"), shape)


def json_objects(texts: Iterable[str], shape: Any = None) -> list[dict[str, Any]]:
  """The JSON objects of a shape among texts; the rest is left out."""
  found = []
  for text in texts:
    with contextlib.suppress(ValueError):
      found.append(parse_json(text))
  return [value for value in found if mismatch(value, shape or {}) is None]


def readable_text(path: Path, last_bytes: int | None = None) -> str:
  """A file's text, or its last bytes; empty if it is missing or cannot be read."""
  with contextlib.suppress(OSError, ValueError):
    return read_bytes(path, last_bytes).decode(errors="replace")
  return ""


def read_bytes(path: Path, last_bytes: int | None = None) -> bytes:
  """What is in a file, or its last bytes.

  Raises:
    OSError: it cannot be read, or is a pipe or a device, which may never end.
    ValueError: there is no such path: a NUL is in it. Or as `refuse_pointer`.
  """
  number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  with open(number, "rb") as file:
    if not stat.S_ISREG(os.fstat(number).st_mode):
      raise OSError(None, "not a file", str(path))
    if last_bytes is not None:
      file.seek(max(file.seek(0, 2) - last_bytes, 0))
    return refuse_pointer(path, file.read())


def refuse_pointer(path: object, content: bytes) -> bytes:
  """Return the content of a file, or its beginning, unless Git LFS has the file.

  Raises:
    ConfigError: it is a pointer, as of a repository cloned without Git LFS.
  """
  if content.startswith(b"version https://git-lfs."):
    fix = "run `git lfs pull` in its repository, or download the file itself"
    raise invalid(str(path), ..., "is a pointer of Git LFS, not the file", fix)
  return content


def sync(path: Path) -> None:
  """Have the disk keep a file or folder, so that it survives a loss of power.

  Raises:
    OSError: it is not there, or the disk failed.
  """
  is_folder = path.is_dir()
  with contextlib.suppress(*([PermissionError] if is_folder else [])):
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
      os.fsync(number)
    except OSError as e:  # some file systems keep folders by themselves
      if not is_folder or e.errno not in (errno.EINVAL, errno.ENOTSUP):
        raise
    finally:
      os.close(number)


def expand(path: str | os.PathLike) -> str:
  """Return a path with the home directory in place of a leading `~`.

  Shells leave it in `--workdir=~/x`, and in variables of a job script.

  Raises:
    ConfigError: there is no home directory, or no such user.
  """
  text = os.path.expanduser(path)
  if text.startswith("~") and os.sep in text:
    fix = "set HOME, or write the whole path (./~ for a folder of that name)"
    raise invalid("path", text, "has no home directory", fix)
  return text


def output_path(path: str | os.PathLike) -> Path:
  """Return the path of a file that the user asked for, with its parents made.

  Raises:
    OSError: they cannot be made.
  """
  path = Path(expand(path))
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
  """A file to write that takes the place of `path` when it is whole.

  It is a new one: no link that somebody has put there is followed. The umask decides
  who may read it, as of any file.

  Args:
    path: of the file.
    durable: have the disk keep it, too: a loss of power leaves the old or the new one.

  Raises:
    OSError: nothing is left behind; it names `path`.
  """
  # As tempfile makes them, but for the mode, which is 0600 there.
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
  """Replace a JSON file as a whole: a reader sees the old one or the new one.

  So does who reads it after a loss of power: runs cannot resume without some of them.
  """
  replace_text(path, json.dumps(value, indent=2) + "\n", durable=True)


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
  """Replace a file by a text; `durable` as of `replacing`."""
  with replacing(path, durable=durable) as file:
    file.write(text.encode())


def open_to_append(path: Path) -> int:
  """A descriptor that appends to a file, not through a link that somebody put there.

  Raises:
    OSError: as `os.open`, or it is a pipe or a device, which may take nothing for ever.
  """
  flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
  number = os.open(path, flags | os.O_NONBLOCK, 0o666)
  if not stat.S_ISREG(os.fstat(number).st_mode):
    os.close(number)
    raise OSError(errno.EINVAL, "not a file", str(path))
  return number


def who_else_writes(path: Path, *, group: bool = True, is_folder: bool = False) -> str | None:
  """Who can put something else in the place of a file, as words; None: nobody.

  Args:
    path: of a file; whoever can write to its folder can replace it.
    is_folder: it is of a folder, into which nobody else may put anything.
    group: whether the file's group counts. False: whoever shares a folder with a
      group trusts it, and with it the group's members.

  Raises:
    OSError: it is not there.
  """
  me, folder = (os.geteuid(), 0), path.parent.stat()
  file, writers = path.lstat(), 0o022 if group else 0o002
  if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(file.st_mode):
    return f"{path} is not a {'folder' if is_folder else 'file'}"
  # Of a folder like /tmp nobody removes what is another's.
  is_shared = folder.st_mode & writers and not folder.st_mode & stat.S_ISVTX
  is_mine = file.st_uid in me and folder.st_uid in me
  if not group:  # a colleague's, unless anybody could have put it there
    is_mine = file.st_uid in me or not folder.st_mode & writers
  if not is_mine:
    return f"{path} is another user's"
  if is_shared or file.st_mode & writers:
    return f"others can write to {path.parent if is_shared else path}"
  return None
