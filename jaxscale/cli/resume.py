"""Submit stopped runs again; each resumes from its last checkpoint.

Of a sweep, the trials that are not done.
"""

from __future__ import annotations

from jaxscale.cli import submit
from jaxscale.cli.cancel import add_arguments as add_names
from jaxscale.cli.parser import Namespace, Parser, whole


def add_arguments(parser: Parser) -> None:
  """The options."""
  add_names(parser)
  parser.option("--nodes N", "another number of nodes", whole(1))
  parser.option("--spares N", "another number of spare nodes", whole())
  submit.add_site_arguments(parser)


def run(args: Namespace) -> None:
  """Submit each run again."""
  from jaxscale.launch import folder as folders
  from jaxscale.launch.jobs import Job

  for path in folders.find_all(args.names, args.runs):
    Job(path).resume(**submit.given(args, "nodes", "spares"))
    print(f"{path.name}: submitted again as {folders.last_job(path)}")
