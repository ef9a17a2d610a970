"""Submit a run of `jaxscale train` to Slurm, or to the background of this machine.

The run has a directory of its own, runs/NAME, with a copy of the code and all that it
writes.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from jaxscale.cli.parser import Parser, whole

# Options of `launch.submit` in addition to those of the site's profile.
_OPTIONS = ("name", "runs", "site", "executor", "requeue", "spares", "preflight")


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.option("--nodes N", "of the run", whole(1), default=1)
  add_job_arguments(parser)


def run(args: argparse.Namespace) -> None:
  """Submit the run."""
  submit(args)


def add_job_arguments(parser: Parser) -> None:
  """The options of every command that submits runs."""
  parser.config()
  parser.option("--name NAME", "of the run (default: the config's name and the time)")
  add_runs(parser)
  parser.option("--site NAME|FILE.toml", "its profile (default: $JAXSCALE_SITE)")
  from jaxscale.launch.executors import EXECUTORS

  text = f"{' or '.join(EXECUTORS)} (default: the first that is here)"
  parser.option("--executor NAME", text, choices=tuple(EXECUTORS))
  parser.option("--requeue N", "at most so many restarts (default: 10)", whole())
  parser.option("--spares N", "more nodes, which train when others are lost", whole())
  parser.flag("--preflight", "run `jaxscale doctor` on the nodes first", default=None)
  parser.flag("--dry-run", "print the script and what would be made; make nothing")
  add_site_arguments(parser)


def add_runs(parser: Parser) -> None:
  """--runs, the directory of all runs."""
  parser.option("--runs DIR", "where the runs are", default="runs")


def add_site_arguments(parser: Parser) -> None:
  """What a job asks of its site."""
  from jaxscale.config.help import field_docs
  from jaxscale.launch.site import OPTIONS, Site

  title = "for the job, instead of what the site's profile has"
  group, docs = parser.add_argument_group(title), field_docs(Site)
  for name in OPTIONS:
    parser.option(f"--{name.replace('_', '-')} VALUE", docs.get(name, ""), group=group)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
  """The options of these names, and of the site, that were given."""
  from jaxscale.launch.site import OPTIONS

  values = {name: getattr(args, name) for name in (*names, *OPTIONS)}
  return {name: value for name, value in values.items() if value is not None}


def job_options(args: argparse.Namespace) -> dict[str, Any]:
  """What all submissions have, as `launch.submit` takes it."""
  made = {"overrides": args.overrides, "made_by": args.command_line}
  return given(args, *_OPTIONS) | made


def submit(args: argparse.Namespace, **options: Any) -> None:
  """Submit what was asked for as one job, or print its script."""
  from jaxscale.launch import jobs

  prepared = jobs.prepare(args.config, nodes=args.nodes, **options, **job_options(args))
  if args.dry_run:
    show(prepared)
    return
  job = jobs.launch(prepared)
  print_submitted(job, prepared)
  print(f"  {job.folder}")
  print_next(args, job.name, "status", "logs -f", "cancel")


def show(prepared: Any) -> None:
  """Print what `--dry-run` does."""
  from jaxscale.launch import folder as folders

  spec = prepared.spec
  print(prepared.script)
  count = len(folders.sources(None if prepared.source else prepared.config))
  print(f"# would make {spec.folder} with {count} files of code{_trials(spec)}")
  print(f"# and submit it to {spec.executor}: {spec.processes} processes")


def print_submitted(job: Any, prepared: Any) -> None:
  """Print the number that the executor gave a job."""
  from jaxscale.launch import folder as folders

  number = folders.last_job(job.folder)
  print(f"{job.name}: submitted as {number}{_trials(prepared.spec)}")


def _trials(spec: Any) -> str:
  return f", {len(spec.trials)} trials" if spec.trials else ""


def print_next(args: argparse.Namespace, name: str, *commands: str) -> None:
  """Print what one may type next."""
  where = "" if args.runs == "runs" else f" --runs {shlex.quote(args.runs)}"
  for command in commands:
    print(f"  {args.program} {command} {name}{where}")
