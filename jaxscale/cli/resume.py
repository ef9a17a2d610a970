"""Submit stopped runs again; each resumes from its last checkpoint.

In a sweep, only the trials that are not done are resumed.
"""

from __future__ import annotations

from jaxscale.cli import submit
from jaxscale.cli.cancel import add_arguments as add_names
from jaxscale.cli.parser import Namespace, Parser, whole
from jaxscale.cli.train import add_accept_changes


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_names(parser)
  parser.option("--nodes N", "the number of nodes (default: as before)", whole(1))
  parser.option("--spares N", "the number of spare nodes (default: as before)", whole())
  add_accept_changes(parser)
  parser.trust()
  submit.add_site_arguments(parser)


def run(args: Namespace) -> None:
  """Submit each run again."""
  from jaxscale.jobs import folder as folders
  from jaxscale.jobs.job_handle import Job

  for path in folders.find_all(args.names, args.runs):
    options = submit.given(args, "nodes", "spares", "accept_changes", "trust")
    Job(path).resume(**options)
    print(f"{path.name}: submitted again as {folders.last_job(path)}")
