"""Tokenize text in advance, in several processes, for training with `TextFiles`.

    jaxscale prepare tokens PATH --to DIR [--tokenizer FILE] [--workers N]

Each file of a split becomes `DIR/SPLIT/00000.bin`, `00001.bin`, …, with the lengths of its
documents and its counts next to it. After an interruption, finished files are kept. At the end,
`tokens.json` states the tokenizer (the SHA-256 of its file), vocabulary, separator, dtype and
counts. The files do not depend on the number of processes.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

from jaxscale.data.split_files import split_files
from jaxscale.data.stream import PREPARED, counts_of, encoded, write_tokens
from jaxscale.data.token_files import TEXT_KINDS, text_documents
from jaxscale.data.tokenizer import read_tokenizer, smallest_dtype
from jaxscale.errors import invalid
from jaxscale.files import write_json
from jaxscale.metrics.text import plural


def prepare_tokens(
  directory: str | os.PathLike,
  split: str,
  to: str | os.PathLike,
  *,
  tokenizer: str = "bytes",
  separator: str | None = None,
  encoding: str = "utf-8",
  field: str = "text",
  num_workers: int = 1,
) -> str:
  """Tokenize the text files of a split.

  Args:
    directory: the directory of the splits, as for `TextFiles.path`.
    split: the name of a file without its ending, or of a directory of files.
    to: the directory to write to; the files are in a subdirectory `split`.
    tokenizer: "bytes" or the path of a tokenizer.json.
    separator: the tokenizer's token between documents; None finds it by its usual names.
    encoding: Python's name of the encoding of .txt files.
    field: the field of .jsonl and the column of .parquet files with the text.
    num_workers: the number of processes; with more than 1, a script that calls this function
      needs `if __name__ == "__main__":`.

  Returns:
    A line with the counts, for the user.

  Raises:
    ConfigError: files or settings are invalid, as for `text_files`, or a process was killed.
    OSError: the files cannot be written.
  """
  paths = split_files(Path(directory), split, TEXT_KINDS, "prepare tokens").paths
  tokens = read_tokenizer(tokenizer, separator, field="--tokenizer")
  folder = Path(to) / split
  folder.mkdir(parents=True, exist_ok=True)
  (folder / PREPARED).unlink(missing_ok=True)  # Until the end, the folder is not complete.
  text = {"tokenizer": tokenizer, "separator": separator, "encoding": encoding, "field": field}
  work = functools.partial(_tokenize, **text)
  files = [folder / f"{i:05}.bin" for i in range(len(paths))]
  context = multiprocessing.get_context("spawn")
  options = num_workers, context, _limit_threads, (num_workers,)
  try:
    with concurrent.futures.ProcessPoolExecutor(*options) as pool:
      counts = list((pool.map if num_workers > 1 else map)(work, paths, files))
  except concurrent.futures.BrokenExecutor:
    problem = "a process was killed, perhaps for its memory"
    raise invalid("--workers", num_workers, problem, "start again with fewer") from None
  facts: dict[str, Any] = {name: sum(x[name] for x in counts) for name in ("tokens", "documents")}
  facts |= {"bytes": sum(x["bytes"] for x in counts), "files": len(files)}
  facts |= {"tokenizer": tokens.key, "tokenizer_file": os.path.abspath(tokenizer)}
  facts |= {"vocab_size": tokens.vocab_size, "separator": tokens.separator}
  facts |= {"dtype": smallest_dtype(tokens.vocab_size)}
  write_json(folder / PREPARED, facts | {"notes": [n for x in counts for n in x["notes"]]})
  documents = plural(facts["documents"], "document")
  return f"{folder}: {facts['tokens']:,} tokens of {documents} in {plural(len(files), 'file')}"


def _limit_threads(num_workers: int) -> None:
  """Divide the cores by the processes; the package `tokenizers` uses all in each."""
  os.environ["RAYON_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // num_workers, 1))


def _tokenize(
  path: Path, kept: Path, tokenizer: str, separator: str | None, encoding: str, field: str
) -> dict[str, Any]:
  """Return the counts of the tokens of a file; write them unless that is done."""
  tokens, status = read_tokenizer(tokenizer, separator, field="--tokenizer"), path.stat()
  source = [path.name, status.st_size, status.st_mtime_ns, tokens.key, encoding, field]
  dtype, notes = smallest_dtype(tokens.vocab_size), []
  if (counts := counts_of(kept, dtype, source=source)) is None:
    documents = text_documents([path], encoding, field, tokenizer, notes)
    counts = write_tokens(kept, encoded(documents, tokens), dtype, notes, source=source)
    print(f"{kept}: {counts['tokens']:,} tokens of {path}", flush=True)
  return counts
