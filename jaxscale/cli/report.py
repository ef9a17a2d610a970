"""Report the results of runs, and compare runs of one config at several sizes.

For one run the command prints outcome, metrics with curves, speed, goodput and problems.
For several it prints a table of throughput, efficiency, exposed communication and the
spread between processes; a study also gets a CSV file and a picture. For a batch study the
command prints the cost of each batch size and the critical batch size, and writes
study.json.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory
from jaxscale.cli.status import SEE_STATUS
from jaxscale.cli.submit import add_runs
from jaxscale.errors import invalid, printable


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  text = "the runs or their workdirs, or one scaling study or batch study"
  parser.words("names", "RUN", text, missing=SEE_STATUS)
  text = "the directory for scaling.csv and scaling.png (default: that of the study, if it is one)"
  parser.option("--to DIR", text, directory)
  add_runs(parser)


def run(args: Namespace) -> None:
  """Print the report and write its files."""
  from jaxscale.jobs import batch_study, run_report
  from jaxscale.jobs import folder as folders
  from jaxscale.jobs.prediction import comparison
  from jaxscale.jobs.scaling_report import CSV, PNG, report

  if folder := batch_study.find(args.names, args.runs):
    if args.to:
      problem = "does not apply to a batch study, whose report is a table and study.json"
      raise invalid("--to", args.to, problem, "leave it out")
    _show(batch_study.report(folder))
    return
  paths = folders.find_all(args.names, args.runs, workdirs=True)
  if len(paths) == 1 and not args.to:
    _show(run_report.describe(paths[0]))
  else:
    study = folders.find_study(args.names[0], args.runs) if len(args.names) == 1 else None
    title, folder = (study[0].name if study else "scaling", args.to or (study and study[0]))
    _show(report(title, paths, folder))
    if folder:
      print(Path(folder, CSV), Path(folder, PNG), sep="\n")
  if len(paths) == 1 and (planned := comparison(paths[0])):
    _show(f"\n{planned}")


def _show(text: object) -> None:
  """Print a text with names and commands from the files of runs, which others may have written."""
  print(printable(str(text), keep="\n"))
