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
RUN = "the name or directory of a run, or of a scaling study for all its runs"


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.words("names", "RUN", f"{RUN} (default: all)")
  add_runs(parser)
  parser.flag("--watch", "print the table repeatedly until all runs have ended")
  parser.option("--every SECONDS", "the time between two tables in seconds", whole(1), default=5)


def _width() -> int | None:
  """Return the columns of the terminal; None without a terminal, so that nothing is cut."""
  return max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else None


def run(args: Namespace) -> None:
  """Print the table; with --watch, until all runs have ended."""
  from jaxscale.jobs import folder as folders
  from jaxscale.jobs.status import statuses

  while True:
    paths = folders.find_all(args.names, args.runs)
    table = statuses(paths or folders.all_folders(args.runs))
    shown = table.shown(_width())
    if not paths and (others := folders.unsubmitted(args.runs)):
      note = f"not submitted, started by `jaxscale train`: {', '.join(map(printable, others))}; "
      note += f"see `jaxscale report {Path(args.runs, others[0])}`"
      shown = f"{shown}\n{note}" if table else note
    if len(table) == 1 and table[0].goodput:
      shown = "\n".join([shown, *textwrap.wrap(str(table[0].goodput), _width() or 10_000)])
    if not args.watch:
      print(shown)
      return
    # Move the cursor home and clear the screen, so that a terminal shows one table.
    clear = "\033[H\033[J" if sys.stdout.isatty() else ""
    print(f"{clear}{shown}\n{time.strftime('%H:%M:%S')}", flush=True)
    if all(row.ended for row in table):
      return
    time.sleep(args.every)
