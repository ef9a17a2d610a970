"""Submit a run of `jaxscale train` to Slurm, or to the background of this machine.

The run has a directory of its own, runs/NAME, with a copy of the code and all that it
writes. With --plan it is the run of a plan: its config, settings, nodes and time limit.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxscale.cli.parser import Namespace, Parser, directory, whole
from jaxscale.errors import ConfigError

# Options of `jobs.submit` in addition to those of the site's profile.
_OPTIONS = ("name", "runs", "site", "executor", "requeue", "spares", "preflight")


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.option("--plan FILE", "the plan.json of `jaxscale plan`, in place of --config")
  parser.option("--nodes N", "of the run (default: the plan's, or 1)", whole(1))
  add_job_arguments(parser, missing=None)


def add_job_arguments(parser: Parser, missing: str | None = "try --config digits") -> None:
  """The options of every command that submits runs."""
  parser.config(missing)
  parser.option("--name NAME", "of the run (default: the config's name and the time)")
  add_runs(parser)
  parser.option("--site NAME|FILE.toml", "its profile (default: $JAXSCALE_SITE)")
  from jaxscale.jobs.executors import EXECUTORS

  text = f"{' or '.join(EXECUTORS)} (default: the first that is here)"
  parser.option("--executor NAME", text, choices=tuple(EXECUTORS))
  parser.option("--requeue N", "at most so many restarts (default: 10)", whole())
  parser.option("--spares N", "more nodes, which train when others are lost", whole())
  parser.flag("--preflight", "run `jaxscale doctor` on the nodes first", default=None)
  parser.flag("--dry-run", "print the script and what would be made; make nothing")
  add_site_arguments(parser)


def add_sweep_arguments(parser: Parser) -> None:
  """The options of every command that submits several trials as one job."""
  parser.option("--at-most N", "trials at a time (default: all; on this machine 1)", whole(1))
  parser.option("--nodes N", "of each run", whole(1), default=1)
  add_job_arguments(parser)


def add_runs(parser: Parser) -> None:
  """--runs, the directory of all runs."""
  parser.option("--runs DIR", "where the runs are", directory, default="runs")


def add_site_arguments(parser: Parser) -> None:
  """What a job asks of its site."""
  from jaxscale.config.validation import field_docs
  from jaxscale.jobs.site import OPTIONS, Site

  title = "for the job, instead of what the site's profile has"
  group, docs = parser.add_argument_group(title), field_docs(Site)
  for name in OPTIONS:
    parser.option(f"--{name.replace('_', '-')} VALUE", docs.get(name, ""), group=group)


def given(args: Namespace, *names: str) -> dict[str, Any]:
  """The options of these names, and of the site, that were given."""
  from jaxscale.jobs.site import OPTIONS

  values = {name: getattr(args, name) for name in (*names, *OPTIONS)}
  return {name: value for name, value in values.items() if value is not None}


def job_options(args: Namespace) -> dict[str, Any]:
  """What all submissions have, as `jobs.submit` takes it."""
  return given(args, *_OPTIONS) | {"overrides": args.overrides, "made_by": args.command_line}


def run(args: Namespace, *commands: str, **options: Any) -> None:
  """Submit what was asked for as one job, or print its script.

  Args:
    args: the command line.
    commands: what one may type next, after the usual ones.
    options: further ones of `jobs.submit`.
  """
  from jaxscale.jobs import job_handle

  if plan := getattr(args, "plan", None):  # `sweep` has none
    _take_plan(args)
  elif not args.config:
    raise ConfigError("--config: missing; try --config digits, or --plan plan.json")
  nodes = args.nodes or 1
  options |= job_options(args)
  job = job_handle.prepare(args.config, nodes=nodes, plan=plan, **options)
  finish(args, [job], lambda: job_handle.launch(job), "status", "logs -f", "cancel", *commands)


def _take_plan(args: Namespace) -> None:
  """What a plan says of its run, where the command line does not.

  Raises:
    ConfigError: it is no plan, or there is a --config as well.
  """
  from jaxscale.files import require_json

  if args.config:
    raise ConfigError(f"--config={args.config}: --plan has its own; give one of them")
  shape = {"submit": {"config": str, "overrides": {str: str}, "nodes": int}}
  submit = require_json(Path(args.plan), shape, "give the plan.json of `jaxscale plan`")["submit"]
  if "tpus" in submit:
    what = f"note: {submit['tpus']} are TPUs, whose hosts Slurm does not know"
    print(f"{what}; on a pod use launch/tpu_pod.sh", file=sys.stderr)
  args.config = submit["config"]
  args.overrides = submit["overrides"] | args.overrides
  args.nodes = args.nodes or submit["nodes"]
  for name, kind in (("site", str), ("time", str), ("gpus_per_node", int)):
    if getattr(args, name) is None and isinstance(submit.get(name), kind):
      setattr(args, name, submit[name])


def finish(
  args: Namespace, prepared: Sequence[Any], launch: Callable[[], Any], *commands: str
) -> None:
  """Launch what is prepared, or print what that would make.

  Args:
    args: the command line.
    prepared: the jobs, `jobs.job_handle.Prepared`.
    launch: makes and submits them; returns the handle of the job or of the study.
    commands: what one may type next.
  """
  from jaxscale.jobs import folder as folders

  trials = [f", {len(p.spec.trials)} trials" * bool(p.spec.trials) for p in prepared]
  if args.dry_run:
    for one, count in zip(prepared, trials, strict=True):
      spec, files = one.spec, folders.sources(None if one.source else one.config)
      print(one.script)
      print(f"# would make {spec.folder} with {len(files)} files of code{count}")
      print(f"# and submit it to {spec.executor}: {spec.processes} processes")
    return
  made = launch()
  for job, count in zip(getattr(made, "jobs", [made]), trials, strict=True):
    print(f"{job.name}: submitted as {folders.last_job(job.folder)}{count}")
  print(f"  {made.folder}")
  where = "" if args.runs == "runs" else f" --runs {shlex.quote(args.runs)}"
  for command in commands:
    print(f"  {args.program} {command} {made.name}{where}")
