"""Runs the command line, and notes each program that JAX compiles or loads.

python tests/support/compilations.py FILE COMMAND ...; a line of FILE is "compiled NAME"
or "loaded NAME", of FILE.RANK where there are several processes.
"""

import os
import sys
import threading
from collections import Counter
from pathlib import Path

_hits = threading.local()


def watch(path):
  """Append to a file from here on."""
  from jax import monitoring

  def event(name, **_):
    if name == "/jax/compilation_cache/cache_hits":
      _hits.any = True

  def duration(name, _, fun_name="", **__):
    if name == "/jax/core/compile/backend_compile_duration":
      what = "loaded" if getattr(_hits, "any", False) else "compiled"
      _hits.any = False
      with open(path, "a") as file:
        file.write(f"{what} {fun_name}\n")

  monitoring.register_event_listener(event)
  monitoring.register_event_duration_secs_listener(duration)


def counts(path) -> dict[str, Counter]:
  """How often each program was compiled, and loaded."""
  found = {"compiled": Counter(), "loaded": Counter()}
  for line in Path(path).read_text().splitlines():
    what, _, name = line.partition(" ")
    found[what][name] += 1
  return found


if __name__ == "__main__":
  from jaxscale.cli.start import entry

  rank = os.environ.get("JAXSCALE_PROCESS_ID")
  watch(sys.argv.pop(1) + (f".{rank}" if rank else ""))
  entry()
