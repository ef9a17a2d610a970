"""Stop runs, queued or running; a running run saves a checkpoint first."""

from __future__ import annotations

from jaxscale.cli.parser import Namespace, Parser
from jaxscale.cli.status import RUN, SEE_STATUS
from jaxscale.cli.submit import add_runs


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.words("names", "RUN", RUN, missing=SEE_STATUS)
  add_runs(parser)


def run(args: Namespace) -> None:
  """Stop each run."""
  from jaxscale.jobs import folder as folders
  from jaxscale.jobs.job_handle import Job

  for path in folders.find_all(args.names, args.runs):
    asked = "asked to save and stop" if Job(path).cancel() else "has already ended"
    print(f"{path.name}: {asked}")
