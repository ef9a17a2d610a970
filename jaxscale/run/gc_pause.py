"""Pause garbage collection while a run starts.

Imports, tracing and lowering create some hundred thousand objects and little garbage.
Python's collector scans all of them repeatedly, which took a sixth of the time to the
first step (benchmarks/startup.py).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_paused = False


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
  """Pause garbage collection until `resume_gc` or the end of the block."""
  global _paused
  _paused = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    resume_gc()


def resume_gc() -> None:
  """Resume collection and mark existing objects as old, so that no step waits for a scan."""
  global _paused
  if _paused:
    gc.freeze()
    gc.unfreeze()  # Moves all objects to the oldest generation without a scan.
    gc.enable()
  _paused = False
