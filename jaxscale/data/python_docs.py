"""Embedded text: the documentation in CPython.

The text has 308 documents, 1.2 MB of English: the topics of the Language Reference that
`help()` shows (pydoc_data/topics.py), and one document per module with the docstrings of the
standard library, of CPython 3.11.7; Copyright © 2001-2023 Python Software Foundation, licence
PSF-2.0 (python_docs.LICENSE). Modules with their own copyright notice are left out. Topics
contain other topics, so paragraphs that a longer document contains are left out; no validation
text is in the training text. tests/support/python_docs.py has the rules, and a test generates
the documents again from the interpreter.

Documents are sorted by title; every tenth one is for validation (30 of 308).
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Literal

import numpy as np

from jaxscale.data.dataset import Dataset
from jaxscale.data.stream import of_array, windows

# SHA-256 of the documents, joined by a byte 0.
SHA256 = "45592bfaf06542437ba28e79d4c936d567ac725855fce68bc498d56939f6f65a"
SEPARATOR = 0  # a byte that no document contains


def text(split: Literal["train", "test"], *, sequence_length: int = 256) -> Dataset:
  """Create a dataset of Python's documentation as bytes: 1,106,000 to train, 116,000 to validate.

  Args:
    split: "train" or "test".
    sequence_length: the bytes per example.

  Returns:
    A dataset with batches {"tokens", "targets"}, int32 [n, sequence_length].

  Example:
    >>> text("test", sequence_length=512).info.vocab_size
    256
  """
  held_out = split == "test"
  chosen = [d for i, d in enumerate(documents()) if (i % 10 == 9) is held_out]
  tokens = np.frombuffer(b"".join(d + b"\0" for d in chosen), np.uint8)
  stream = of_array(tokens, SEPARATOR, bytes_per_token=1.0)
  return windows("text", stream, 256, sequence_length)


@functools.cache
def documents() -> tuple[bytes, ...]:
  """Return all documents, each with its title as the first line, sorted by title."""
  path = resources.files("jaxscale.data") / "python_docs.npz"
  with resources.as_file(path) as file, np.load(file) as arrays:
    return tuple(arrays["text"].tobytes().split(b"\0"))
