"""Counts of the programs that JAX compiles, and of those that it loads.

python tests/support/compilations.py FILE COMMAND ... runs the command line; a line of
FILE, or of FILE.RANK in each of several processes, is "compiled NAME" or "loaded NAME".
"""

import contextlib
import os
import sys
import threading
from collections import Counter
from pathlib import Path

_hits = threading.local()


@contextlib.contextmanager
def watched(note):
  """Call note("compiled" or "loaded", name) for each program that is compiled or loaded inside."""
  from jax import monitoring

  def event(name, **_):
    if name == "/jax/compilation_cache/cache_hits":
      _hits.any = True

  def duration(name, _, fun_name="", **__):
    if name == "/jax/core/compile/backend_compile_duration":
      note("loaded" if getattr(_hits, "any", False) else "compiled", fun_name)
      _hits.any = False

  monitoring.register_event_listener(event)
  monitoring.register_event_duration_secs_listener(duration)
  try:
    yield
  finally:
    monitoring.unregister_event_listener(event)
    monitoring.unregister_event_duration_listener(duration)


def counts(path) -> dict[str, Counter]:
  """Count how often each program was compiled, and loaded, by a file."""
  found = {"compiled": Counter(), "loaded": Counter()}
  for line in Path(path).read_text().splitlines():
    what, _, name = line.partition(" ")
    found[what][name] += 1
  return found


def main():
  from jaxscale.cli.start import entry

  rank = os.environ.get("JAXSCALE_PROCESS_ID")
  path = sys.argv.pop(1) + (f".{rank}" if rank else "")

  def note(what, name):
    with open(path, "a") as file:
      file.write(f"{what} {name}\n")

  with watched(note):
    entry()


if __name__ == "__main__":
  main()
