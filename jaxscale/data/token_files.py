"""Text in files: .txt, .jsonl and .parquet, or tokens in .bin and .npy.

A split is a file such as `NAME.bin` or `NAME.jsonl`, or a directory NAME of such files, in the
order of their names, including nested folders. A .txt file is one document in UTF-8 or in the
configured `encoding`. In .jsonl and .parquet files, each row is a document (`rows.read_rows`).

A .bin file has only tokens, as in nanoGPT: little-endian uint16, or uint32 if the vocabulary
has more than 65,536 tokens, or the configured `dtype`. A file that looks like a different type
is rejected. The headers of np.save and llm.c define their own type. Tokens are read from the
file on demand. Unless the separator of documents is given, the very first token is not predicted.
"""

from __future__ import annotations

import codecs
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxscale.data import rows
from jaxscale.data.dataset import Dataset, file_identity
from jaxscale.data.npy_files import StoredArray, stored_array
from jaxscale.data.packing import text_windows
from jaxscale.data.split_files import SplitFiles, split_files
from jaxscale.data.stream import PREPARED, Packing, Stream, TokenFile, of_files, of_prepared, packed
from jaxscale.data.tokenizer import read_tokenizer
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import open_regular, read_bytes, whole_number
from jaxscale.metrics.text import listed

_AT_ONCE = 64 << 20  # bytes of text per batch
_MOST_TEXT = 8 << 30  # bytes of a .txt file, which is read at once
_TOKENS = ".bin", ".npy"
TEXT_KINDS = (".txt",), rows.ENDINGS
KINDS = _TOKENS, *TEXT_KINDS
# The first number of llm.c's header of 256 int32, and the type of the tokens after it, for
# GPT-2 and for Llama 3 (karpathy/llm.c, dev/data/data_common.py).
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
_LLM_C_HEADER = 1024  # bytes
_NPY = b"\x93NUMPY"
# The first bytes of other kinds of files, and the advice for them.
_OTHERS = {
  b"\x1f\x8b": ("gzip", "gunzip it"),
  b"\x28\xb5\x2f\xfd": ("zstd", "unzstd it"),
  b"\xfd7zXZ\0": ("xz", "unxz it"),
  b"BZh": ("bzip2", "bunzip2 it"),
  b"\x04\x22\x4d\x18": ("lz4", "unlz4 it"),
  b"PK\x03\x04": ("a zip archive, such as .npz or PyTorch's", "save its array as .npy"),
  b"\x80\x04": ("a pickle", "save its array as .npy"),
}
_SAMPLE = 1 << 18  # bytes of a .bin file that are checked before training
_ENOUGH = 16  # tokens that are enough to recognize a type


def text_files(
  directory: str | os.PathLike,
  split: str,
  *,
  tokenizer: str = "bytes",
  separator: str | None = None,
  vocab_size: int | None = None,
  dtype: str = "auto",
  encoding: str = "utf-8",
  field: str = "text",
  sequence_length: int = 256,
  packing: Packing = "stream",
  cache_dir: str | None = None,
) -> Dataset:
  """Create a dataset of token windows from the text files of a split.

  Args:
    directory: the directory of the splits.
    split: the name of a file without its extension, or of a directory of files.
    tokenizer: the tokenizer of text: "bytes" or the path of a tokenizer.json.
    separator: the tokenizer's token between documents; None finds it by its usual names. For
      .bin and .npy files, the token ID; None if it is not known.
    vocab_size: the size of the vocabulary of .bin and .npy files.
    dtype: NumPy's name of the token type in .bin files without a header, e.g. "uint32", or
      ">u2" for big-endian; "auto" uses uint16 for a vocabulary up to 65,536, else uint32.
    encoding: Python's name of the encoding of .txt files; "bytes", with the tokenizer of this
      name, takes the bytes as they are.
    field: the field of .jsonl and the column of .parquet files with the text.
    sequence_length: the tokens per example.
    packing: the way from documents to windows, as for `packing.text_windows`.
    cache_dir: the directory for the tokens of text; None uses the user's cache.

  Raises:
    ConfigError: there are no files, files of several kinds, settings for the other kind, or
      files with an unexpected type or encoding.

  Example:
    >>> text_files("data/openwebtext", "val", vocab_size=50257)   # doctest: +SKIP
  """
  files = split_files(Path(directory), split, KINDS, "TextFiles")
  base, is_text = Path(directory) / split, files.endings != _TOKENS
  if is_prepared := (base / PREPARED).exists():
    _refuse(f"is set by {base / PREPARED}", encoding=encoding, field=field)
    _refuse(f"is set by {base / PREPARED}", dtype=dtype, vocab_size=vocab_size)
    files = files._replace(notes=())
  elif is_text:
    problem = f"is for token files, but {files.paths[0]} is text"
    _refuse(problem, dtype=dtype, vocab_size=vocab_size)
  elif any(base.glob("*.lengths")):
    raise invalid(files.name, ..., "is not complete", "run jaxscale prepare tokens again")
  if not (is_text or is_prepared):
    problem = f"is for text, but {files.paths[0]} has tokens"
    _refuse(problem, tokenizer=tokenizer, encoding=encoding, field=field)
    stream, size = _token_stream(files, separator, vocab_size, dtype), vocab_size or 0
  else:
    tokens = read_tokenizer(tokenizer, separator, field="TextFiles.tokenizer")
    size = tokens.vocab_size
    if is_prepared:
      stream = of_prepared(base, files.paths, tokens, tokenizer)
    else:
      notes: list[str] = []
      documents = text_documents(files.paths, encoding, field, tokenizer, notes)
      identity = "files", encoding, *files.stamps, *([field] * (files.endings == rows.ENDINGS))
      stream = packed(files.name, documents, tokens, identity, cache_dir, notes)
  stream = stream._replace(notes=(*files.notes, *stream.notes))
  dataset = text_windows(files.name, stream, size, sequence_length, packing, "TextFiles.packing")
  return dataset._replace(identity=lambda: {**stream.facts, **file_identity(files.paths)})


# The settings that text and tokens do not share, and their defaults.
_DEFAULTS = {"tokenizer": "bytes", "encoding": "utf-8", "field": "text", "dtype": "auto"}


def _refuse(problem: str, **settings: object) -> None:
  """Raise a ConfigError for settings that do not have their defaults."""
  for name, value in settings.items():
    if value != _DEFAULTS.get(name):
      raise invalid(f"TextFiles.{name}", value, problem, "omit it")


def _token_stream(
  files: SplitFiles, separator: str | None, vocab_size: int | None, dtype: str
) -> Stream:
  """Return the stream of token files."""
  first = files.paths[0]
  if vocab_size is None:
    fix = "set the vocabulary size, e.g. 50257 for GPT-2's tokenizer"
    raise ConfigError(f"TextFiles.vocab_size=None: {first} contains token IDs; {fix}")
  end = None if separator is None else whole_number(separator)
  if separator is not None and (end is None or end >= vocab_size):
    problem = f"is not a token ID below {vocab_size:,}, but {first} has tokens"
    raise invalid("TextFiles.separator", separator, problem, "give the ID, e.g. '0', or omit it")
  parts = [_token_file(path, dtype, vocab_size) for path in files.paths]
  stream = of_files(parts, end)
  if types := {np.dtype(file.dtype).name for file in parts if file.offset}:
    note = f"{files.name}: tokens of {listed(sorted(types))}, as the headers say"
    stream = stream._replace(notes=(note,))
  types = ",".join({file.dtype: 0 for file in parts})
  return stream._replace(facts={"tokens": stream.num_tokens, "dtype": types})


def _token_file(path: Path, dtype: str, vocab_size: int) -> TokenFile:
  """Determine how to read a token file: by its header, the setting or its size.

  Raises:
    ConfigError: the file has a different type, or is not a token file.
  """
  if dtype != "auto":
    _check_integer("TextFiles.dtype", dtype, dtype)
  with open_regular(path) as file:
    head, size = file.read(_SAMPLE), os.fstat(file.fileno()).st_size
  if head.startswith(_NPY):
    return _with_header(path, dtype, *_token_type(path))
  if path.suffix.lower() == ".npy":
    raise invalid(str(path), ..., "has no header of np.save", "rename it to .bin")
  for magic, (kind, fix) in _OTHERS.items():
    if head.startswith(magic) and dtype == "auto":
      raise invalid(str(path), ..., f"is {kind}", f"{fix}, or set TextFiles.dtype")
  numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
  if len(head) >= _LLM_C_HEADER and (kind := _LLM_C.get(int(numbers[0]))):
    count = (size - _LLM_C_HEADER) // np.dtype(kind).itemsize
    if numbers[2] != count:
      problem = f"has {count:,} tokens, but its header says {numbers[2]:,}"
      raise invalid(str(path), ..., problem, "copy it again")
    return _with_header(path, dtype, kind, _LLM_C_HEADER)
  if dtype == "auto":
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    _check_type(path, head, dtype, vocab_size)
  return TokenFile(path, np.dtype(dtype).str)


def _with_header(path: Path, dtype: str, kind: str, offset: int) -> TokenFile:
  if dtype != "auto" and np.dtype(dtype) != np.dtype(kind):
    problem = f"is not {np.dtype(kind)}, as the header of {path} says"
    raise invalid("TextFiles.dtype", dtype, problem, "leave it out")
  return TokenFile(path, kind, offset)


def _token_type(path: Path) -> tuple[str, int]:
  """Return the token type of an np.save file, and the offset of the tokens."""
  try:
    array = stored_array(path)
  except Exception as e:  # NumPy's parser raises any exception on damaged headers.
    problem = f"is damaged ({(str(e).splitlines() or ['no header'])[0]})"
    raise invalid(str(path), ..., problem, "save the tokens again") from None
  if not isinstance(array, StoredArray) or array.ndim != 1:
    problem = f"has shape {array.shape}, but must have one dimension"
    raise invalid(str(path), ..., problem, "save the flattened array (.ravel())")
  _check_integer(str(path), ..., array.dtype.str)
  return array.dtype.str, array.offset


def _check_integer(field: str, value: object, dtype: str) -> None:
  try:
    is_integer = np.dtype(dtype).kind in "iu"
  except TypeError:
    is_integer = False
  if not is_integer:
    fix = "use uint8, uint16, uint32, int32 or int64, or '>u2' for big-endian"
    raise invalid(field, value, f"is not an integer type ({dtype})", fix)


def _check_type(path: Path, head: bytes, dtype: str, vocab_size: int) -> None:
  """Check that tokens do not look like a different type."""
  if len(head) < _ENOUGH * np.dtype(dtype).itemsize:
    return
  with contextlib.suppress(UnicodeDecodeError):
    if b"\0" not in head and codecs.getincrementaldecoder("utf-8")().decode(head):
      fix = "rename it to .txt, or set TextFiles.dtype"
      raise invalid(str(path), ..., "is text and not tokens", fix)
  if _looks_like(dtype, head, vocab_size):
    return
  shown = {np.dtype(kind): kind for kind in ("uint8", "uint16", "uint32", "int64")}
  others = [*shown, *map(np.dtype, (">u2", ">u4", ">i8"))]
  fitting = [o for o in others if _looks_like(o.str, head, vocab_size)]
  name = np.dtype(dtype).name
  if not fitting:
    most = int(np.frombuffer(head[: len(head) // 8 * 8], dtype).max())
    problem = f"has the token {most:,} (as {name}), but the vocabulary has {vocab_size:,}"
    raise invalid(str(path), ..., problem, "set TextFiles.vocab_size, or TextFiles.dtype")
  # The wrong byte order makes numbers larger.
  own = min(fitting, key=lambda o: np.frombuffer(head[: len(head) // 8 * 8], o).max())
  best = shown.get(own, own.str)
  fix = f"set TextFiles.dtype={best!r} if it is, else {name!r}"
  raise invalid(str(path), ..., f"looks like {best} and not {name}", fix)


def _looks_like(dtype: str, head: bytes, vocab_size: int) -> bool:
  """Return whether bytes could be tokens of a type."""
  tokens = np.frombuffer(head[: len(head) // 8 * 8], dtype)
  # In halves of wider numbers, every second one is 0 or one of a few values.
  halves = tokens[::2], tokens[1::2]
  kinds = [len(np.unique(half)) for half in halves]
  is_wider = max(kinds) > 4 * min(kinds) or halves[0].any() != halves[1].any()
  is_narrower = tokens.itemsize == 1 and vocab_size > 256  # Any bytes could be such tokens.
  is_token = tokens.min() >= 0 and tokens.max() < vocab_size
  return is_token and not is_wider and not is_narrower


def _check_encoding(encoding: str, tokenizer: str) -> None:
  try:
    if encoding != "bytes" or tokenizer != "bytes":
      "".encode(encoding)
  except (LookupError, ValueError):  # Also for "base64", which is not a text encoding.
    fix = "use 'utf-8', 'utf-16', 'latin-1' or 'cp1252'"
    problem = "is not a text encoding"
    if encoding == "bytes":
      problem, fix = "needs TextFiles.tokenizer='bytes'", f"{fix} with {tokenizer}"
    raise invalid("TextFiles.encoding", encoding, problem, fix) from None


def text_documents(
  paths: Sequence[Path], encoding: str, field: str, tokenizer: str, notes: list[str]
) -> Iterator[list[bytes]]:
  """Return an iterator over the documents of text files as UTF-8, several at a time.

  Args:
    paths: .txt files, or files of rows.
    encoding: the encoding of .txt files.
    field: the field of the text in files of rows.
    tokenizer: the name of the tokenizer.
    notes: a list to which lines about damaged rows are added.

  Raises:
    ConfigError: a setting is for the other kind of files, or the encoding is unknown.
  """
  _check_encoding(encoding, tokenizer)
  if is_rows := paths[0].name.lower().endswith(rows.ENDINGS):
    _refuse(f"is for .txt files, but {paths[0]} has UTF-8", encoding=encoding)
  else:
    _refuse(f"is for .jsonl and .parquet files, but {paths[0]} is plain text", field=field)

  def documents(path: Path) -> Iterable[bytes]:
    if is_rows:
      return rows.read_rows(path, [field], rows.text_of(field), notes, "TextFiles.field")
    content = read_bytes(path, most=_MOST_TEXT)
    return [content if encoding == "bytes" else _utf8(path, content, encoding, tokenizer)]

  return _batches(document for path in paths for document in documents(path))


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
  """Yield lists of documents of about `_AT_ONCE` bytes."""
  waiting: list[bytes] = []
  size = 0
  for document in documents:
    waiting.append(document)
    size += len(document)
    if size >= _AT_ONCE:
      yield waiting
      waiting, size = [], 0
  if waiting:
    yield waiting


def _utf8(path: Path, content: bytes, encoding: str, tokenizer: str) -> bytes:
  """Convert a text to UTF-8, without its byte order mark.

  Raises:
    ConfigError: the text has a different encoding.
  """
  name = codecs.lookup(encoding).name
  try:
    text = content.decode(encoding)
  except UnicodeError as e:
    position = f" at byte {e.start:,}" if isinstance(e, UnicodeDecodeError) else ""
    fixes = [fix for magic, (_, fix) in _OTHERS.items() if content.startswith(magic)]
    guess = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1"
    remedy = f"set TextFiles.encoding, e.g. {guess!r}"
    if codecs.lookup(guess).name == name:
      remedy = "fix the file, or set a different TextFiles.encoding"
    if tokenizer == "bytes":
      remedy += ", or 'bytes' to take them as they are"
    remedy = fixes[0] if fixes else remedy
    raise invalid(str(path), ..., f"is not {encoding}{position}", remedy) from None
  if name == "utf-8" and content.count(0) > len(content) // 8:  # It is valid, but not text.
    fix = "set TextFiles.encoding='utf-16-le' if it is text"
    raise invalid(str(path), ..., "has many zero bytes, like UTF-16", fix)
  return (content if name == "utf-8" else text.encode()).removeprefix(codecs.BOM_UTF8)
