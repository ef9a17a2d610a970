"""Train one experiment, or resume the run in the workdir."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, value

EXIT_CODES = """\
exit code: 0 done, 2 invalid usage or configuration, 85 stopped and saved, 86 hung,
93 do not restart, 130 Ctrl-C, 1 any other error"""


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.exit_codes = EXIT_CODES
  parser.config()
  add_workdir(parser)
  counts = value(_count, "a whole number >= 1, or auto", lambda count: count != 0)
  text = "the processes to start (default: auto, one per GPU)"
  parser.option("--processes-per-node N", text, counts)
  parser.option("--plan FILE.json", "the plan to compare the run with (default: none)")
  add_accept_changes(parser)


def _count(text: str) -> int | None:
  return None if text == "auto" else max(int(text), 0)


def add_accept_changes(parser: Parser) -> None:
  """Add --accept-changes, which allows a resume after a change of data or code."""
  is_known = {"data", "code"}.issuperset
  kinds = value(lambda text: tuple(text.split(",")), "data, code or data,code", is_known)
  text = "the changes to accept on resume: data, code or data,code (default: none)"
  parser.option("--accept-changes KINDS", text, kinds, default=())


def add_workdir(parser: Parser) -> None:
  """Add --workdir, whose default follows from the config."""
  text = "the directory of the run (default: runs/CONFIG)"
  parser.option("--workdir DIR", text, directory)


def default_workdir(config: str) -> str:
  """Return `runs/digits` for configs/digits.py, `runs/x-8k` for configs/x.py:8k.

  Settings of a run train in a new workdir: `runs/x-again` for runs/x/config.json. It is in the
  current folder for a run of another user, who may have made a link beside it.
  """
  from jaxscale.config.loading import recorded_run

  if run := recorded_run(config):
    is_own = run.lstat().st_uid in (os.geteuid(), 0)
    return f"{run}-again" if is_own else f"runs/{run.resolve().name}-again"
  file, _, arg = config.partition(":")
  return f"runs/{Path(file).stem}" + (f"-{arg}" if arg else "")


def run(args: Namespace) -> int | None:
  """Train, and print the outcome in one line."""
  from jaxscale.run.gc_pause import paused_gc

  with paused_gc():
    return _run(args)


def _run(args: Namespace) -> int | None:
  from jaxscale import cluster
  from jaxscale.cluster import local_launch
  from jaxscale.config.loading import load_config
  from jaxscale.run.session import open_session, report_stop

  local_launch.end_with_launcher()
  config = load_config(args.config, args.overrides, trust=args.trust)
  workdir = Path(args.workdir or default_workdir(args.config))
  plan = None
  if args.plan:
    from jaxscale.planning.stored import read_plan  # Its TOML parser costs a start 6 ms.

    plan = read_plan(Path(args.plan))
  if (count := local_launch.choose_count(args.processes_per_node)) > 1:
    words = shlex.split(args.command_line)[len(args.program.split()) :]
    # As in `jaxscale`, and unlike in `python -m`, the current folder is not imported.
    is_safe = sys.flags.safe_path or not args.program.startswith("python")
    python = [sys.executable, *["-P"] * is_safe, "-m", "jaxscale"]
    return local_launch.run([*python, *words], count)
  with open_session(config, workdir) as watch:
    from jaxscale.run.fit import fit  # Imports JAX, once all processes have joined.

    summary = fit(config, workdir, plan=plan, accept_changes=args.accept_changes).summary
    if summary["outcome"] == "interrupted":
      step = summary["step"]
      saved = f"saved step {step}" if step else "nothing to save before the first step"
      remedy = f"to {'resume' if step else 'start again'}: {args.command_line}"
      return report_stop(config, watch.stop.agreed, saved, remedy)
    if cluster.is_leader():
      files = [workdir / "metrics.png", workdir / "summary.json"]
      print(_done(summary, next(filter(Path.exists, files))), flush=True)


def _done(summary, file: Path) -> str:
  from jaxscale.metrics import headline, is_reached

  accuracy, loss = summary["target_accuracy"], summary.get("target_loss")
  is_good, reached = is_reached(summary, accuracy, loss), ""
  if is_good is not None:
    target = f"loss {loss:g}" if loss is not None else f"accuracy {accuracy:.2%}"
    reached = f" (target {target}: {'reached' if is_good else 'missed'})"
  if summary["stopped_by"]:
    reached += f" (stopped by {summary['stopped_by']})"
  after = f"after {summary['step']} steps, {summary['seconds']} s; see "
  return f"done: validation {headline(summary['evaluation'])}{reached} {after}{file}"
