"""Submit one config at several numbers of nodes: a scaling study, one run per size.

`jaxscale report NAME` prints its table and draws its picture.
"""

from __future__ import annotations

import argparse

from jaxscale.cli import submit
from jaxscale.cli.parser import Parser, value


def add_arguments(parser: Parser) -> None:
  """The options."""
  sizes = value(_sizes, "several sizes, e.g. 1,2,4,8")
  parser.option("--nodes N,N", "sizes of the runs", sizes, missing="try --nodes 1,2,4")
  text = "fixed: the global batch stays (strong scaling); grows: with the nodes (weak)"
  parser.option("--batch KIND", text, choices=("fixed", "grows"), default="fixed")
  submit.add_job_arguments(parser)


def _sizes(text: str) -> list[int]:
  sizes = [int(part) for part in text.split(",")]
  if min(sizes) < 1 or len({*sizes}) < len(sizes):
    raise ValueError
  return sizes


def run(args: argparse.Namespace) -> None:
  """Submit the runs of the study."""
  from jaxscale.launch import scaling_study

  options = submit.job_options(args)
  prepared = scaling_study.prepare(args.config, args.nodes, batch=args.batch, **options)
  if args.dry_run:
    for one in prepared.runs:
      submit.show(one)
    return
  study = scaling_study.launch(prepared)
  for job, one in zip(study.jobs, prepared.runs, strict=True):
    submit.print_submitted(job, one)
  print(f"  {study.folder}")
  submit.print_next(args, study.name, "status", "cancel", "report")
