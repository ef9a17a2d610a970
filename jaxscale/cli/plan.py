"""Predict memory, step time and cost on hardware that you do not have.

The train step is compiled for the chips. Memory and what is communicated are the
compiler's; seconds are a model's, with a range, from published and assumed rates of the
chip, or those of a site's file. Nothing is allocated, and text is not read: vocabulary
and length of sequences are in the config. (Of image datasets the size of images and
the number of classes are not: those must be present, but for ImageNet.)

With --search the layouts that compute the same step are compared: mesh, what is split,
remat and micro-batches. What cannot fit is left out, the best by estimate are compiled
until --minutes are over, and the best of those is planned. With --json plan.json,
`jaxscale submit --plan plan.json` submits it.

With --calibrate the chip is measured on which this runs and, of several processes
(under srun, or with JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES and
JAXSCALE_PROCESS_ID), the links between them. The table [machine] of a site's file that
comes of it is printed.

With --over only memory is planned: the values of a setting are tried, from the
smallest to the largest; of four and more, by bisection: more memory for a larger value
is taken for granted.
"""

from __future__ import annotations

import os
import shlex

from jaxscale.cli.parser import Namespace, Parser, distinct, file, number, picture, value
from jaxscale.errors import EXIT_CRASH, EXIT_DONE, ConfigError

_SIMULATED = "8"  # devices, of chips that XLA's compiler for CPUs compiles for


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.exit_codes = "exit code: 0 it fits, 1 it does not, 2 a mistake in the command line"
  parser.config(missing=None)
  parser.option("--chips KIND-N", "e.g. h100-16")
  parser.option("--site NAME|FILE.toml", "whose [machine] has rates and prices")
  nodes = value(distinct, "whole numbers, as 1,2,4")
  parser.option("--nodes N,N", "also plan these (default: powers of two)", nodes)
  parser.option("--json FILE", "the whole plan, for submit, train and report", file)
  parser.option("--png FILE", "its picture", picture)
  text = "a batch-study's study.json: also plan the steps to its target"
  parser.option("--study FILE", text, file)
  parser.flag("--search", "find the best layout first")
  text = "of --search, after which no more is compiled"
  parser.option("--minutes N", text, number("> 0"), default=10)
  parser.flag("--calibrate", "measure chip and links, and print [machine] for --site")
  over = value(_over, "FIELD=NUMBER,NUMBER, e.g. model.num_layers=16,24,32")
  parser.option("--over FIELD=N,N", "try these values", over, default=("", [""]))


def _over(text: str) -> tuple[str, list[str]]:
  """A setting and its values, the smallest first."""
  field, _, values = text.partition("=")
  return field, sorted(values.split(","), key=float)


def run(args: Namespace) -> int:
  """Compile, and print what is planned; or measure."""
  if args.calibrate:
    return _calibrate()
  for name, hint in (("config", "try --config digits"), ("chips", "try --chips v5e-16")):
    if not getattr(args, name):
      raise ConfigError(f"--{name}: missing; {hint}")
  # What compiles needs no device, and one that is here is not to be taken.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", _SIMULATED)
  # JAX writes programs for absent chips to its cache, and warns that none can be read.
  os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  return _largest(args) if args.over[0] else _plan(args)


def _calibrate() -> int:
  from jaxscale import cluster

  with cluster.open_session():
    from jaxscale.planning.calibrate import as_toml, calibrate

    constants = calibrate()
    if cluster.is_leader():
      print(as_toml(constants))
  return EXIT_DONE


def _plan(args: Namespace) -> int:
  from jaxscale.config.loading import load_config
  from jaxscale.files import output_path, write_json
  from jaxscale.jobs.site import load_site
  from jaxscale.planning.job import target_steps
  from jaxscale.planning.plan import as_json, make_plan
  from jaxscale.planning.topologies import find_chips

  site, chips = load_site(args.site), find_chips(args.chips)
  base = config = load_config(args.config, args.overrides)
  steps = target_steps(args.study, config.batch_size) if args.study else None
  found = {}
  if args.search:
    from jaxscale.planning import search

    limits = {"machine": site.machine, "minutes": args.minutes}
    best = search.search(config, chips, **limits, log=lambda x: print(x, flush=True))
    print(f"\n{search.text(best)}\n", flush=True)
    config, found = best.config, {"search": search.as_json(best)}
  plan = make_plan(config, chips, machine=site.machine, nodes=args.nodes or ())
  # NumPy and more: once there is a plan.
  from jaxscale.planning import plan_report, submission

  print(plan_report.text(plan), flush=True)
  if steps:
    hours = steps * plan.step.seconds["expected"] / 3600
    print(f"\nto the target of {args.study}: {steps:,.0f} steps, {hours:,.3g} hours")
    found["target"] = {"steps": steps, "hours": hours}
  asked = args.config, args.overrides, args.site
  job = submission.submission(plan, base, *asked, site.gpus_per_node)
  if args.search:
    print(f"\nto submit it:\n  {submission.command(job)}\n")
  if args.json:
    write_json(output_path(args.json), as_json(plan) | {"submit": job} | found)
    print(f"{args.json}: `jaxscale submit --plan {shlex.quote(args.json)}` submits it")
  if args.png:
    plan_report.draw(plan, args.png)
    print(args.png)
  return EXIT_DONE if plan.fit.is_good else EXIT_CRASH


def _largest(args: Namespace) -> int:
  from jaxscale.config.loading import load_config
  from jaxscale.planning.fits import compile_for, largest, line
  from jaxscale.planning.topologies import find_chips

  chips = find_chips(args.chips)
  field, values = args.over

  def fits(value: str) -> bool:
    fit = compile_for(load_config(args.config, args.overrides | {field: value}), chips)
    print(f"{field}={value}: {line(fit, chips)}", flush=True)
    return fit.is_good

  found = largest(values, fits)
  answer = "none of them fits" if found is None else f"the largest is {field}={found}"
  print(f"{answer} on each of {chips.name}")
  return EXIT_CRASH if found is None else EXIT_DONE
