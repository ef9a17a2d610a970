"""No garbage collection while a run starts.

Imports, tracing and lowering make some hundred thousand objects and little garbage.
Python's collector goes through all of them again and again, which took a sixth of the
time until the first step (benchmarks/startup.py).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_paused = False


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
  """Inside, nothing is collected until `resume_gc`; as before where it was off."""
  global _paused
  if not gc.isenabled():
    yield
    return
  gc.disable()
  _paused = True
  try:
    yield
  finally:
    resume_gc()


def resume_gc() -> None:
  """Collect again; all that is there counts as old, so that no step waits for it."""
  global _paused
  if _paused:
    gc.freeze()
    gc.unfreeze()  # into the oldest generation, without a look at it
    gc.enable()
  _paused = False
