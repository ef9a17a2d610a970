"""Show state, progress and speed of submitted runs, one line per run or trial."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, whole
from jaxscale.cli.submit import add_runs
from jaxscale.errors import printable

SEE_STATUS = "`jaxscale status` lists them"
RUN = "name or directory of a run, or of a scaling study for all of its runs"


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.words("names", "RUN", f"{RUN} (default: all)")
  add_runs(parser)
  parser.flag("--watch", "the table, again and again")
  parser.option("--every SECONDS", "between two tables", whole(1), default=5)


def _width() -> int | None:
  """Columns of the terminal; None where there is none, and nothing is cut."""
  return max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else None


def run(args: Namespace) -> None:
  """Print the table; with --watch until all runs have ended."""
  from jaxscale.jobs import folder as folders
  from jaxscale.jobs.status import statuses

  while True:
    paths = folders.find_all(args.names, args.runs)
    found = statuses(paths or folders.all_folders(args.runs))
    shown = found.shown(_width())
    if not paths and (others := folders.unsubmitted(args.runs)):
      note = f"without a job, by `jaxscale train`: {', '.join(map(printable, others))}; "
      note += f"see `jaxscale report {Path(args.runs, others[0])}`"
      shown = f"{shown}\n{note}" if found else note
    if len(found) == 1 and found[0].goodput:
      shown = "\n".join([shown, *textwrap.wrap(str(found[0].goodput), _width() or 10_000)])
    if not args.watch:
      print(shown)
      return
    # Home, clear what was there, and the time: a terminal shows one table.
    clear = "\033[H\033[J" if sys.stdout.isatty() else ""
    print(f"{clear}{shown}\n{time.strftime('%H:%M:%S')}", flush=True)
    if all(row.ended for row in found):
      return
    time.sleep(args.every)
