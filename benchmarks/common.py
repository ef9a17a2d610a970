"""Machine, versions and date of a benchmark, and its result as one JSON line."""

from __future__ import annotations

import datetime
import json
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxscale.files import read_json_lines

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str | int]:
  """Return the processor, its cores, and the versions of Python and JAX."""
  import os

  cpu = platform.processor() or platform.machine()
  info = Path("/proc/cpuinfo")
  if info.exists():
    names = [x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x]
    cpu = names[0] if names else cpu
  return {
    "cpu": cpu,
    "cores": len(os.sched_getaffinity(0)),
    "python": platform.python_version(),
    "jax": metadata.version("jax"),
  }


def _shown(word: str) -> str:
  """Return a word of the command line, an absolute path by its last part alone.

  Results are kept in the repository, where folders of one machine have no meaning.
  """
  return Path(word).name if word.startswith("/") else word


def report(
  name: str, *, keep: bool = True, folder: Path | None = None, show: bool = True, **results
) -> None:
  """Print the result as one JSON line, and keep it in a folder.

  Args:
    name: the name of the benchmark and of its file.
    keep: whether to write the file; runs at sizes without meaning only print.
    folder: the folder of the file; None is benchmarks/results/.
    show: whether to print.
    results: the measurements.
  """
  line = {
    "benchmark": name,
    "date": datetime.date.today().isoformat(),
    "command": " ".join(["python", *(_shown(word) for word in sys.argv)]),
    **results,
    **machine(),
  }
  text = json.dumps(line)
  if keep:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(text + "\n")
  if show:
    print(text)


def runs_done(name: str) -> list[dict[str, Any]]:
  """Return the runs of a benchmark that `keep_run` has kept, in their order."""
  return read_json_lines(RESULTS / f"{name}_runs.jsonl")


def keep_run(name: str, row: dict[str, Any]) -> None:
  """Append a run to benchmarks/results/NAME_runs.jsonl, so that it is not repeated."""
  with (RESULTS / f"{name}_runs.jsonl").open("a") as file:
    file.write(json.dumps(row) + "\n")


def free_address() -> str:
  """Return an unused local address for the coordinator of processes."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{s.getsockname()[1]}"
