"""Print the output of the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, whole
from jaxscale.cli.status import SEE_STATUS
from jaxscale.cli.submit import add_runs
from jaxscale.errors import ConfigError


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.words("names", "RUN", "the name or directory of a run", missing=SEE_STATUS)
  add_runs(parser)
  parser.flag("-f --follow", "print new output until the run ends")
  parser.option("--rank N|all|batch", "the process, all, or the batch script (default: 0)")
  parser.option("--task N", "the number of the trial in a sweep, from 0", whole(), default=0)
  parser.option("-n --lines N", "the number of last lines to print (default: all)", whole(1))


def run(args: Namespace) -> None:
  """Print or follow the output."""
  from jaxscale.jobs import folder as folders
  from jaxscale.jobs import logs
  from jaxscale.jobs.job_handle import Job

  (path, *others) = folders.find_all(args.names, args.runs)
  if others:
    names = ", ".join(p.name for p in (path, *others))
    raise ConfigError(f"{args.names[-1]}: logs prints one run at a time; give one of {names}")
  spec = folders.read_spec(path)
  files = logs.choose(spec, args.rank or "0", args.task)
  if args.follow:
    lines = logs.follow(files, lambda: all(r.ended for r in Job(path).status()))
  else:
    if not _printed(files) and args.rank is None:
      # Another rank may report why this one was killed, or the script why none started.
      every, batch = (logs.choose(spec, rank, args.task) for rank in ("all", "batch"))
      files = every if _printed(every) else batch
    if not _printed(files):
      raise ConfigError(f"{spec.name}: nothing printed yet; see `jaxscale status {spec.name}`")
    lines = logs.last(files, args.lines)
  for line in lines:
    print(line, flush=args.follow)
  if args.rank is None and (line := logs.failure(spec, args.task)):
    print(line)


def _printed(files: Sequence[tuple[str, Path]]) -> bool:
  return any(path.exists() and path.stat().st_size for _, path in files)
