"""Train one experiment; where DIR holds a part of it already, resume it."""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, value

EXIT_CODES = """\
exit code: 0 done, 2 a mistake in what was asked for, 85 asked to stop and saved,
86 hung, 93 not to be started again, 130 Ctrl-C, 1 anything else"""


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.epilog = EXIT_CODES
  parser.config()
  add_workdir(parser)
  text = "of this run, by `jaxscale plan`: `report` and `status` compare it with that"
  parser.option("--plan FILE.json", text)
  add_accept_changes(parser)


def add_accept_changes(parser: Parser) -> None:
  """--accept-changes, of what a run was trained on."""
  is_known = {"data", "code"}.issuperset
  kinds = value(lambda text: tuple(text.split(",")), "data, code or data,code", is_known)
  text = "resume although these have changed since the run began: data (examples, class "
  text += "names, tokenizer), code (of your own classes) or data,code"
  parser.option("--accept-changes KINDS", text, kinds, default=())


def add_workdir(parser: Parser) -> None:
  """--workdir, with a default by the config."""
  text = "of checkpoints, metrics and plots (default: runs/ and the config's name)"
  parser.option("--workdir DIR", text, directory)


def help_page(parser: Parser, args: Namespace) -> str:
  """The options, and every setting: of the config, or of all alternatives."""
  from jaxscale.config.choice import own_choices
  from jaxscale.config.config_file import load_file
  from jaxscale.config.help import settings_help
  from jaxscale.config.loading import load_config
  from jaxscale.config.validation import UnsetError

  config, own, chosen = None, {}, {}
  if args.config:
    try:
      config = load_config(args.config, args.overrides)
    except UnsetError:  # what must be given is what the page is to show
      config, chosen = load_config(args.config), args.overrides
    own = own_choices(vars(load_file(Path(args.config.partition(":")[0]))))
  title = "settings:" if config else "settings (--config FILE --help shows the file's):"
  settings = settings_help(config, own, chosen=chosen)
  return f"{parser.format_help()}\n{title}\n{settings}\n"


def default_workdir(config: str) -> str:
  """`runs/digits` for configs/digits.py, `runs/x-8k` for configs/x.py:8k."""
  file, _, arg = config.partition(":")
  return f"runs/{Path(file).stem}" + (f"-{arg}" if arg else "")


def run(args: Namespace) -> int | None:
  """Train, and print in one line how it ended."""
  from jaxscale.run.gc_pause import paused_gc

  with paused_gc():
    return _run(args)


def _run(args: Namespace) -> int | None:
  from jaxscale import cluster
  from jaxscale.config.loading import load_config
  from jaxscale.run.session import open_session, report_stop

  config = load_config(args.config, args.overrides)
  workdir = Path(args.workdir or default_workdir(args.config))
  plan = None
  if args.plan:
    from jaxscale.planning.stored import read_plan

    plan = read_plan(Path(args.plan))
  with open_session(config, workdir) as watch:
    from jaxscale.run.fit import fit  # JAX: only once all processes have joined

    summary = fit(config, workdir, plan=plan, accept_changes=args.accept_changes).summary
    if summary["outcome"] == "interrupted":
      text = f"saved step {summary['step']}; to resume"
      if summary["step"] == 0:
        text = "nothing to save before the first step; to start again"
      return report_stop(config, watch.stop.agreed, f"{text}: {args.command_line}")
    if cluster.is_leader():
      file = "metrics.png" if config.log.plot else "summary.json"
      print(_done(summary, workdir / file), flush=True)


def _done(summary, file: Path) -> str:
  from jaxscale.metrics import headline, is_reached

  accuracy, loss = summary["target_accuracy"], summary.get("target_loss")
  is_good, reached = is_reached(summary, accuracy, loss), ""
  if is_good is not None:
    target = f"loss {loss:g}" if loss is not None else f"accuracy {accuracy:.2%}"
    reached = f" (target {target}: {'reached' if is_good else 'missed'})"
  after = f"after {summary['step']} steps, {summary['seconds']} s; see "
  return f"done: validation {headline(summary['evaluation'])}{reached} {after}{file}"
