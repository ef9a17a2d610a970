"""The command line: `python -m jaxscale.train --config FILE [--workdir DIR]`."""

from __future__ import annotations

from pathlib import Path

from jaxscale import cluster
from jaxscale.config.loading import command, help_text, load_config, parse_args
from jaxscale.errors import EXIT_DONE, ConfigError, leave, one_line_errors


@one_line_errors
def main(argv: list[str]) -> int:
  """Run what the command line asks for; returns the exit code."""
  options, overrides, wants_help = parse_args(argv)
  path = options.get("config")
  config = load_config(path, overrides) if path else None
  if wants_help:
    print(help_text(config))
    return EXIT_DONE
  if config is None or path is None:
    raise ConfigError("--config: missing; try --config configs/digits.py")
  if "describe" in options:
    return show(config, Path(options.get("workdir", default_workdir(path))))
  workdir = Path(options.get("workdir", default_workdir(path)))
  return run(config, workdir, argv)


def default_workdir(path: str) -> str:
  """`runs/digits` for configs/digits.py, `runs/x-8k` for configs/x.py:8k."""
  file, _, arg = path.partition(":")
  return f"runs/{Path(file).stem}" + (f"-{arg}" if arg else "")


def show(config, workdir: Path) -> int:
  """Print what the layout does with the model; trains nothing."""
  from jaxscale.run.session import joined

  with joined(config, workdir):
    from jaxscale.experiment import build
    from jaxscale.experiment.abstract_data import stand_in
    from jaxscale.planning import describe  # JAX: only once all have met

    page = describe.describe(build.experiment(config, datasets=stand_in(config)))
    if cluster.is_leader():
      print(page, flush=True)
  return EXIT_DONE


def run(config, workdir: Path, argv: list[str]) -> int:
  """Train, and say in one line how it ended."""
  from jaxscale.run.session import joined, stopped

  with joined(config, workdir) as watch:
    from jaxscale.run.fit import fit  # JAX: only once all have met

    summary = fit(config, workdir).summary
    if summary["outcome"] == "interrupted":
      step, again = summary["step"], command(argv)
      line = f"saved step {step}; to go on: {again}"
      if step == 0:
        line = f"nothing to save before the first step; to start again: {again}"
      return stopped(config, watch.stop.reason, line)
    if cluster.is_leader():
      print(_done(summary, workdir), flush=True)
  return EXIT_DONE


def _done(summary, workdir: Path) -> str:
  from jaxscale.metrics import headline, is_reached

  accuracy, loss = summary["target_accuracy"], summary.get("target_loss")
  is_good, reached = is_reached(summary, accuracy, loss), ""
  if is_good is not None:
    target = f"loss {loss:g}" if loss is not None else f"{accuracy:.2%}"
    reached = f" (target {target}: {'reached' if is_good else 'missed'})"
  found = f"accuracy {summary['accuracy']:.2%}"
  if "perplexity" in summary or loss is not None:
    found = headline(summary)
  return (
    f"done: held-out {found}{reached} after "
    f"{summary['step']} steps, {summary['seconds']} s; see {workdir}/metrics.png"
  )


if __name__ == "__main__":
  leave(main)
