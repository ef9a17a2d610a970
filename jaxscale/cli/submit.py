"""Submit a run of `jaxscale train` to Slurm, or start it in the background on this machine.

The run gets its own directory, runs/NAME, with a copy of the code and all outputs. --plan
takes config, settings, nodes and time limit from a plan.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxscale.cli.parser import Namespace, Parser, directory, whole
from jaxscale.errors import ConfigError, invalid

# Options of `jobs.submit` in addition to those of the site's profile.
_OPTIONS = ("name", "runs", "site", "executor", "requeue", "spares", "preflight", "trust")


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.option("--plan FILE", "the plan.json of `jaxscale plan` (default: none)")
  parser.option("--nodes N", "the number of nodes (default: the plan's, or 1)", whole(1))
  add_job_arguments(parser, "; required without --plan")


def add_job_arguments(parser: Parser, note: str | None = None) -> None:
  """Add the options of every command that submits runs."""
  parser.config(note)
  parser.option("--name NAME", "the name of the run (default: the config's name and the time)")
  add_runs(parser)
  parser.option("--site NAME|FILE.toml", "the profile of the cluster (default: $JAXSCALE_SITE)")
  from jaxscale.jobs.executors import EXECUTORS

  text = f"the executor: {' or '.join(EXECUTORS)} (default: the first that is available)"
  parser.option("--executor NAME", text, choices=tuple(EXECUTORS))
  parser.option("--requeue N", "the largest number of restarts (default: 10)", whole())
  parser.option("--spares N", "the number of nodes that replace failed ones (default: 0)", whole())
  parser.flag("--preflight", "run `jaxscale doctor` on the nodes first", default=None)
  parser.flag("--dry-run", "print the script and what would be created, and exit")
  add_site_arguments(parser)


def add_sweep_arguments(parser: Parser) -> None:
  """Add the options of every command that submits several trials as one job."""
  parser.option("--at-most N", "the number of trials at a time (default: all; locally 1)", whole(1))
  parser.option("--nodes N", "the number of nodes of each run", whole(1), default=1)
  add_job_arguments(parser)


def add_runs(parser: Parser) -> None:
  """Add --runs, the directory of all runs."""
  parser.option("--runs DIR", "the directory of all runs", directory, default="runs")


def add_site_arguments(parser: Parser) -> None:
  """Add the options that override the site's profile."""
  from jaxscale.config.validation import field_docs
  from jaxscale.jobs.site import OPTIONS, Site

  title = "job options (default: those of the site's profile)"
  group, docs = parser.add_argument_group(title), field_docs(Site)
  for name in OPTIONS:
    parser.option(f"--{name.replace('_', '-')} VALUE", docs.get(name, ""), group=group)


def given(args: Namespace, *names: str) -> dict[str, Any]:
  """Return those of the named options, and of the site's, that were given."""
  from jaxscale.jobs.site import OPTIONS

  values = {name: getattr(args, name) for name in (*names, *OPTIONS)}
  return {name: value for name, value in values.items() if value is not None}


def job_options(args: Namespace) -> dict[str, Any]:
  """Return the options that all submissions share, as arguments of `jobs.submit`."""
  return given(args, *_OPTIONS) | {"overrides": args.overrides, "made_by": args.command_line}


def run(args: Namespace, *commands: str, **options: Any) -> None:
  """Submit one job, or print its script.

  Args:
    args: the parsed command line.
    commands: the commands to suggest after the usual ones.
    options: further arguments of `jobs.submit`.
  """
  from jaxscale.jobs import job_handle

  if plan := getattr(args, "plan", None):  # `sweep` has no --plan.
    _take_plan(args)
  elif not args.config:
    raise ConfigError("--config: missing; try --config digits, or --plan plan.json")
  nodes = args.nodes or 1
  options |= job_options(args)
  job = job_handle.prepare(args.config, nodes=nodes, plan=plan, **options)
  finish(args, [job], lambda: job_handle.launch(job), "status", "logs -f", "cancel", *commands)


def _take_plan(args: Namespace) -> None:
  """Take settings from the plan that the command line does not give.

  Raises:
    ConfigError: the file is not a plan, or --config is also given.
  """
  from jaxscale.files import require_json
  from jaxscale.owners import unsafe_owner

  if args.config:
    raise ConfigError(f"--config={args.config}: cannot be used with --plan; give one of them")
  shape = {"submit": {"config": str, "overrides": {str: str}, "nodes": int}}
  plan = Path(args.plan).resolve()  # once, as another user's link may change
  submit = require_json(plan, shape, "give the plan.json of `jaxscale plan`")["submit"]
  if not args.trust and (others := unsafe_owner(plan)):
    problem = f"has a config and a site, which are executed, and {others}"
    raise invalid("--plan", args.plan, problem, "add --trust, or give --config instead")
  if "tpus" in submit:
    what = f"note: {submit['tpus']} are TPUs, which Slurm does not manage"
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
  """Launch the prepared jobs, or print what would be submitted.

  Args:
    args: the parsed command line.
    prepared: the jobs, `jobs.job_handle.Prepared`.
    launch: a function that creates and submits them, and returns the handle of the job or
      study.
    commands: the commands to suggest.
  """
  from jaxscale.jobs import folder as folders

  trials = [f", {len(p.spec.trials)} trials" * bool(p.spec.trials) for p in prepared]
  if args.dry_run:
    for one, count in zip(prepared, trials, strict=True):
      spec, files = one.spec, folders.sources(None if one.source else one.config)
      print(one.script)
      print(f"# would create {spec.folder} with {len(files)} files of code{count}")
      print(f"# and submit it to {spec.executor}: {spec.processes} processes")
    return
  made = launch()
  for job, count in zip(getattr(made, "jobs", [made]), trials, strict=True):
    print(f"{job.name}: submitted as {folders.last_job(job.folder)}{count}")
  print(f"  {made.folder}")
  where = "" if args.runs == "runs" else f" --runs {shlex.quote(args.runs)}"
  for command in commands:
    print(f"  {args.program} {command} {made.name}{where}")
