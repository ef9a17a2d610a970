"""Trace the next steps of a running run and print the slowest operations.

The trace is for XProf and TensorBoard (`xprof WORKDIR/profile`). The command prints the ten
slowest operations of the compiled step, the parts of the step that they belong to,
and the share of time in which devices are idle. --summary reads an existing trace: RUN is
then a trace, or a run that has one.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, number, value, whole
from jaxscale.cli.status import SEE_STATUS
from jaxscale.cli.submit import add_runs
from jaxscale.errors import ConfigError


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  from jaxscale.config.running import MOST_TRACED_STEPS

  text = "the name or directory of a run, or with --summary the directory of a trace"
  parser.words("names", "RUN", text, missing=SEE_STATUS)
  parser.flag("--summary", "summarize the newest existing trace instead of tracing")
  steps = number(f"in [1, {MOST_TRACED_STEPS}]", int)
  parser.option("--steps N", "the number of steps to trace", steps, default=10)
  ranks = value(_ranks, "whole numbers separated by commas", lambda _: True)
  parser.option("--processes LIST", "the processes that trace, e.g. 0,3", ranks, default="0")
  parser.option("--timeout SECONDS", "the longest wait in seconds", whole(1), default=600)
  parser.option("--task N", "the number of the trial in a sweep, from 0", whole(), default=0)
  add_runs(parser)


def _ranks(text: str) -> tuple[int, ...]:
  ranks = tuple(sorted({int(part) for part in text.split(",")}))
  if ranks[0] < 0:
    raise ValueError
  return ranks


def run(args: Namespace) -> None:
  """Trace and print the summary."""
  from jaxscale.jobs import profile

  if len(args.names) != 1:
    raise ConfigError(f"{args.names[1]}: profile takes one run; give {args.names[0]} alone")
  (name,) = args.names
  is_trace = args.summary and os.path.exists(name) and not os.path.exists(f"{name}/run.json")
  folder = Path(name) if is_trace else profile.find_workdir(name, args.runs, args.task)
  if not args.summary:
    options = args.steps, args.processes, args.timeout
    folder = profile.trace(folder, *options, log=lambda line: print(line, flush=True))
    print(folder, flush=True)
  from jaxscale.planning import trace  # Imports JAX.

  print(trace.text(trace.summarize(trace.find(folder))))
