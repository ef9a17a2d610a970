"""Submit a config at several numbers of nodes: a scaling study with one run per size.

`jaxscale report NAME` prints the table of the study and draws its picture.
"""

from __future__ import annotations

import functools

from jaxscale.cli import submit
from jaxscale.cli.parser import Namespace, Parser, distinct, value


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  sizes = value(distinct, "several sizes, e.g. 1,2,4,8")
  parser.option("--nodes N,N", "the numbers of nodes", sizes, missing="try --nodes 1,2,4")
  text = "the global batch size: fixed (strong scaling), or grows with the nodes (weak scaling)"
  parser.option("--batch KIND", text, choices=("fixed", "grows"), default="fixed")
  submit.add_job_arguments(parser)


def run(args: Namespace) -> None:
  """Submit the runs of the study."""
  from jaxscale.jobs import scaling_study

  options = submit.job_options(args)
  study = scaling_study.prepare(args.config, args.nodes, batch=args.batch, **options)
  launch = functools.partial(scaling_study.launch, study)
  submit.finish(args, study.runs, launch, "status", "cancel", "report")
