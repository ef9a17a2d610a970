"""Documents turned into tokens once, and kept as one file of them.

The file lies in `cache_dir`, or else in $XDG_CACHE_HOME/jaxscale/text or
~/.cache/jaxscale/text, under a name made of what went into it: `<name>.bin` has the
tokens of all documents in their order and nothing else, as nanoGPT keeps them, and
`<name>.json` how many tokens, documents and bytes of text that is. Processes that
want the same one wait for the first that began to write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.data.dataset import user_cache
from jaxscale.data.stream import Stream, of_files
from jaxscale.data.tokenizer import Tokenizer, smallest_dtype
from jaxscale.errors import ConfigError


def packed(
  name: str,
  batches: Iterable[Sequence[bytes]],
  tokenizer: Tokenizer,
  identity: Sequence[Any],
  cache_dir: str | None = None,
) -> Stream:
  """The documents as one stream of tokens, each with the separator after it.

  Args:
    name: for messages.
    batches: the documents in their order, several at a time; read only if they
      are not kept yet.
    tokenizer: makes the tokens.
    identity: what the documents are of; another one is another file.
    cache_dir: where to keep the tokens; None: in the user's cache.

  Raises:
    ConfigError: the directory cannot be written to.
  """
  folder = Path(cache_dir).expanduser() if cache_dir else user_cache() / "text"
  key = hashlib.sha256(repr((*identity, tokenizer.key)).encode()).hexdigest()[:32]
  kept, dtype = folder / f"{key}.bin", smallest_dtype(tokenizer.vocab_size)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if (counts := _counts(kept, dtype)) is None:
      with _alone(folder / f"{key}.lock"):
        if (counts := _counts(kept, dtype)) is None:  # not written meanwhile
          print(f"packing {name} once into {kept}", flush=True)
          counts = _write(kept, batches, tokenizer, dtype)
  except OSError as e:
    raise ConfigError(
      f"{name}: its tokens cannot be kept in {folder} ({e.strerror}); set cache_dir "
      "to a directory with room for them"
    ) from None
  is_bytes = tokenizer.key == "bytes"
  # A byte 0 between documents counts as a byte where bytes are the tokens.
  ratio = 1.0 if is_bytes else counts["bytes"] / max(counts["tokens"], 1)
  return of_files([kept], dtype, tokenizer.separator, ratio)


def _counts(kept: Path, dtype: str) -> dict[str, int] | None:
  """What the file holds, or None if it is not there or not whole."""
  try:
    counts = json.loads(kept.with_suffix(".json").read_text())
    whole = kept.stat().st_size == counts["tokens"] * np.dtype(dtype).itemsize
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return counts if whole else None


def _write(
  kept: Path, batches: Iterable[Sequence[bytes]], tokenizer: Tokenizer, dtype: str
) -> dict[str, int]:
  """Write both files, the counts last; returns them."""
  counts = {"tokens": 0, "documents": 0, "bytes": 0}
  number, scratch = tempfile.mkstemp(dir=kept.parent)
  try:
    with os.fdopen(number, "wb") as file:
      for documents in batches:
        tokens = tokenizer.encode(documents).astype(dtype, copy=False)
        file.write(tokens.tobytes())
        counts["tokens"] += len(tokens)
        counts["documents"] += len(documents)
        counts["bytes"] += sum(map(len, documents))
    os.replace(scratch, kept)
  except BaseException:
    os.unlink(scratch)
    raise
  number, scratch = tempfile.mkstemp(dir=kept.parent)
  with os.fdopen(number, "w") as file:
    json.dump(counts, file)
  os.replace(scratch, kept.with_suffix(".json"))
  return counts


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
  """Held by one process at a time; the system lets go of it when that ends."""
  with open(path, "w") as file:
    # A file system without locks: then each writes its own, and the last one stays.
    with contextlib.suppress(OSError):
      fcntl.flock(file, fcntl.LOCK_EX)
    yield
