"""Text in files: plain .txt, or .bin of tokens, as nanoGPT keeps them.

A split is `NAME.bin`, `NAME.txt` or a directory NAME of such files, in the order of
their names. A .txt file is one document. A .bin file is tokens and nothing else,
uint16 or, where the vocabulary has more than 65,536, uint32, little-endian, and is read
in place. The token that separates documents there is not known, so the first token of
all is not predicted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxscale.data.dataset import Dataset, file_identity
from jaxscale.data.stream import of_files, packed, text_windows
from jaxscale.data.tokenizer import read_tokenizer
from jaxscale.errors import ConfigError

_AT_ONCE = 64 << 20  # bytes of text


def text_files(
  directory: str | os.PathLike,
  split: str,
  *,
  tokenizer: str = "bytes",
  separator: str | None = None,
  vocab_size: int | None = None,
  sequence_length: int = 256,
  cache_dir: str | None = None,
) -> Dataset:
  """A split of text in files, as windows of tokens.

  Args:
    directory: of the splits.
    split: name of a file without its ending, or of a directory of files.
    tokenizer: of .txt files: "bytes" or the path of a tokenizer.json.
    separator: the tokenizer's token between documents; None: by its usual names.
    vocab_size: of .bin files, whose tokens are below it.
    sequence_length: tokens of an example.
    cache_dir: where tokens of .txt files are kept; None: the user's cache.

  Raises:
    ConfigError: no such files, both kinds of them, or settings of the other kind.

  Example:
    >>> text_files("data/openwebtext", "val", vocab_size=50257)   # doctest: +SKIP
  """
  paths = split_files(Path(directory), split)
  called = str(Path(directory) / split)
  if paths[0].suffix == ".bin":
    if vocab_size is None:
      raise ConfigError(
        f"TextFiles.vocab_size=None: {paths[0]} has numbers of tokens; give how many "
        "there are, e.g. 50257 for GPT-2's"
      )
    if tokenizer != "bytes":
      raise ConfigError(
        f"TextFiles.tokenizer={tokenizer!r}: {paths[0]} has tokens already, omit it"
      )
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    stream = of_files(paths, dtype, None)
    made, kind = text_windows(called, stream, vocab_size, sequence_length), dtype
    return _identified(made, paths, {"tokens": stream.num_tokens, "dtype": kind})
  if vocab_size is not None:
    raise ConfigError(
      f"TextFiles.vocab_size={vocab_size}: {paths[0]} is text with the vocabulary "
      "of the tokenizer; leave it out"
    )
  tokens = read_tokenizer(tokenizer, separator, field="TextFiles.tokenizer")
  stamps = [(str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
  stream = packed(called, _documents(paths), tokens, ("files", *stamps), cache_dir)
  made = text_windows(called, stream, tokens.vocab_size, sequence_length)
  facts = {"tokens": stream.num_tokens, "tokenizer": tokens.key}
  return _identified(made, paths, facts)


def _identified(made: Dataset, paths: Sequence[Path], facts: dict[str, Any]) -> Dataset:
  return made._replace(identity=lambda: facts | file_identity(paths))


def split_files(directory: Path, split: str) -> list[Path]:
  """The files of a split, by name, all .bin or all .txt.

  Raises:
    ConfigError: there are none, or there are both.
  """
  if not directory.is_dir():
    raise ConfigError(f"TextFiles.path={str(directory)!r}: no such directory")
  kinds = ".bin", ".txt"
  found = [p for kind in kinds if (p := directory / f"{split}{kind}").is_file()]
  found += sorted(p for p in (directory / split).glob("*") if p.suffix in kinds)
  if not found:
    there = sorted({p.stem for p in directory.iterdir()})
    raise ConfigError(
      f"TextFiles: neither {split}.bin, {split}.txt nor such files in a directory "
      f"{split} of {directory}; there is {', '.join(there[:10]) or 'nothing'}"
    )
  if len({(path.parent, path.suffix) for path in found}) > 1:
    both = f"{found[0].name} and {found[-1].name}"
    raise ConfigError(f"TextFiles: {split!r} of {directory} is {both}; leave one kind")
  return found


def _documents(paths: Sequence[Path]) -> Iterator[list[bytes]]:
  """The files' contents in their order, some at a time."""
  waiting: list[bytes] = []
  for path in paths:
    try:
      waiting.append(path.read_bytes())
    except OSError as e:
      raise ConfigError(f"{path}: {e.strerror}") from None
    if sum(map(len, waiting)) >= _AT_ONCE:
      yield waiting
      waiting = []
  if waiting:
    yield waiting
