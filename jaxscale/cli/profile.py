"""Trace the next steps of a running run, to be read by XProf or Perfetto.

The command prints the folder of the trace, and how to open it. `pip install xprof` installs
XProf; `xprof --logdir WORKDIR/profile` then shows all traces of a run.
"""

from __future__ import annotations

import functools

from jaxscale.cli.parser import Namespace, Parser, number, value, whole
from jaxscale.cli.status import SEE_STATUS
from jaxscale.cli.submit import add_runs
from jaxscale.errors import ConfigError


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  from jaxscale.config.running import MOST_TRACED_STEPS

  parser.words("names", "RUN", "the name or directory of a run", missing=SEE_STATUS)
  steps = number(f"in [1, {MOST_TRACED_STEPS}]", int)
  parser.option("--steps N", "the number of steps to trace", steps, default=10)
  ranks = value(_ranks, "whole numbers separated by commas", lambda _: True)
  parser.option("--processes LIST", "the processes that trace, e.g. 0,3", ranks, default="0")
  parser.option("--timeout SECONDS", "the longest wait in seconds", whole(1), default=600)
  parser.option("--task N", "the number of the trial in a sweep, from 0", whole(), default=0)
  add_runs(parser)
  parser.flag("--trust", "write the request into the workdir of another user")


def _ranks(text: str) -> tuple[int, ...]:
  ranks = tuple(sorted({int(part) for part in text.split(",")}))
  if ranks[0] < 0:
    raise ValueError
  return ranks


def run(args: Namespace) -> None:
  """Trace, and print how to open the trace."""
  from jaxscale.jobs import profile

  if len(args.names) != 1:
    raise ConfigError(f"{args.names[1]}: profile takes one run; give {args.names[0]} alone")
  workdir = profile.find_workdir(args.names[0], args.runs, args.task)
  options = args.steps, args.processes, args.timeout
  log = functools.partial(print, flush=True)
  print(profile.trace(workdir, *options, log, trust=args.trust))
  print(
    f"open it by `xprof --logdir {workdir}/profile` (pip install xprof), or open its "
    "*.trace.json.gz at ui.perfetto.dev"
  )
