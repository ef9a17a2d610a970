"""Plan a step, a run and a job on chips that are not here; or the largest model there.

The train step is compiled for the chips. Memory and what is communicated are the
compiler's; seconds are a model's, with a range, from published and assumed rates of the
chip, or those of a site's file. Nothing is allocated, and text is not read: vocabulary
and length of sequences are in the config. (Of image datasets the size of images and
the number of classes are not: those must be there, but for ImageNet.)

With --search every layout that the settings offer is considered: mesh, what is split,
remat, micro-batches, exchange, and --nodes. What cannot be is refused before it is
compiled, the best by estimate are compiled until --minutes are over, and the best of
those is planned. With --json plan.json, `jaxscale submit --plan plan.json` submits it.

With --calibrate the chip that it runs on is measured, and, of several processes (under
srun, or with JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID), the
links between them: --site is the file whose table [machine] then has it. What else the
file has stays.

With --over only memory is planned: the values of a setting are tried, from the
smallest to the largest; of four and more, by bisection: more memory for a larger value
is taken for granted.
"""

from __future__ import annotations

import os
import shlex
from typing import Any

from jaxscale.cli.parser import (
  Namespace,
  Parser,
  distinct,
  file,
  number,
  picture,
  value,
)
from jaxscale.config.validation import nearest
from jaxscale.errors import EXIT_CRASH, EXIT_DONE, ConfigError

_SIMULATED = "8"  # devices, of chips that XLA's compiler for CPUs compiles for


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.epilog = "exit code: 0 it fits, 1 it does not, 2 a mistake in the command line"
  parser.config(missing=None)
  parser.option("--chips KIND-N", "e.g. h100-16")
  parser.option("--site NAME|FILE.toml", "whose [machine] has rates and prices")
  parser.flag("--calibrate", "measure chip and links here, into the file of --site")
  nodes = value(distinct, "whole numbers, as 1,2,4")
  parser.option("--nodes N,N", "also plan these (default: powers of two)", nodes)
  parser.option("--json FILE", "the whole plan, for submit, train and report", file)
  parser.option("--png FILE", "its picture", picture)
  _add_search(parser)
  over = value(_over, "FIELD=NUMBER,NUMBER, e.g. model.num_layers=16,24,32")
  parser.option("--over FIELD=N,N", "try these values", over, default=("", [""]))


def _add_search(parser: Parser) -> None:
  from jaxscale.planning.goal import RANKS

  group = parser.add_argument_group("with --search")
  parser.flag(
    "--search", "find the best layout; --nodes are then to choose from", group
  )
  text = "by what: time, chip-hours, or hours to a target"
  parser.option("--rank RANK", text, choices=RANKS, default="time", group=group)
  sizes = value(distinct, "whole numbers, as 512,1024")
  text = "to choose from, with --rank target"
  parser.option("--batch-sizes N,N", text, sizes, group=group)
  text = "examples, as a run logs it with noise_scale=True"
  parser.option("--noise-scale N", text, number("> 0"), group=group)
  parser.option("--study FILE", "a batch-study's study.json, instead", group=group)
  text = "to choose from (default: the config's, and HalfPrecision)"
  parser.option("--exchanges NAME,NAME", text, group=group)
  text = "after which no more is compiled"
  parser.option("--minutes N", text, number("> 0"), default=10, group=group)


def _over(text: str) -> tuple[str, list[str]]:
  """A setting and its values, the smallest first."""
  field, _, values = text.partition("=")
  return field, sorted(values.split(","), key=float)


def run(args: Namespace) -> int:
  """Compile, and print what is planned; or measure."""
  if args.calibrate:
    return _calibrate(args)
  for name, hint in (
    ("config", "try --config digits"),
    ("chips", "try --chips v5e-16"),
  ):
    if not getattr(args, name):
      raise ConfigError(f"--{name}: missing; {hint}")
  # What compiles needs no device, and one that is here is not to be taken.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", _SIMULATED)
  # JAX writes programs for absent chips to its cache, and warns that none can be read.
  os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  return _largest(args) if args.over[0] else _plan(args)


def _calibrate(args: Namespace) -> int:
  from jaxscale import cluster

  if not (args.site or "").endswith(".toml"):
    raise ConfigError("--site: give the FILE.toml that is to be written")
  with cluster.open_session():
    from jaxscale.launch.site_file import write_machine
    from jaxscale.planning.calibrate import calibrate

    fields = calibrate(f"jaxscale plan --calibrate --site {args.site}")
    found = fields["calibrated"]
    if cluster.is_leader():
      write_machine(args.site, fields)
      links = f", links of {found.processes} processes" if found.processes > 1 else ""
      off = f", loops within {found.off:.0%}" if found.off else ""
      print(f"{args.site}: {found.machine}{links}; repeated to {found.spread:.1%}{off}")
  return EXIT_DONE


def _plan(args: Namespace) -> int:
  from jaxscale.config.loading import load_config
  from jaxscale.files import output_path, write_json
  from jaxscale.launch.site import load_site
  from jaxscale.planning.plan import as_json, make_plan
  from jaxscale.planning.topologies import find_chips

  site = load_site(args.site)
  machine = site.machine
  chips = find_chips(args.chips)
  base = config = load_config(args.config, args.overrides)
  nodes, found = args.nodes or (), {}
  if args.search:
    config, chips, found = _search(args, config, chips, machine)
    nodes = ()
  plan = make_plan(config, chips, machine=machine, nodes=nodes)
  # NumPy and more: once there is a plan.
  from jaxscale.planning import plan_report, search_report

  print(plan_report.text(plan), flush=True)
  asked = args.config, args.overrides, args.site
  job = search_report.submission(plan, base, *asked, site.gpus_per_node)
  if args.search:
    print(f"\nto submit it:\n  {search_report.command(job)}\n")
  if args.json:
    write_json(output_path(args.json), as_json(plan) | {"submit": job} | found)
    print(f"{args.json}: `jaxscale submit --plan {shlex.quote(args.json)}` submits it")
  if args.png:
    plan_report.draw(plan, args.png)
    print(args.png)
  return EXIT_DONE if plan.fit.is_good else EXIT_CRASH


def _search(args: Namespace, config: Any, chips: Any, machine: Any) -> Any:
  """(config, chips, JSON) of the best layout; prints what was considered."""
  from jaxscale import config as cfg
  from jaxscale.planning import search_report
  from jaxscale.planning.goal import goal_of
  from jaxscale.planning.search import search

  known = cfg.Exchange.built_in()
  names = args.exchanges.split(",") if args.exchanges else []
  for name in names:
    if name not in known:
      raise ConfigError(f"--exchanges={name}: {nearest(name, known)}")
  found = search(
    config, chips, machine=machine, nodes=args.nodes or (),
    batch_sizes=args.batch_sizes or (), exchanges=[known[name]() for name in names],
    goal=goal_of(args.rank, args.noise_scale, args.study), minutes=args.minutes,
    say=lambda line: print(line, flush=True),
  )  # fmt: skip
  print(f"\n{search_report.text(found)}\n", flush=True)
  return found.config, found.chips, {"search": search_report.as_json(found)}


def _largest(args: Namespace) -> int:
  from jaxscale.config.loading import load_config
  from jaxscale.planning.fits import compile_for, largest, line
  from jaxscale.planning.topologies import find_chips

  chips = find_chips(args.chips)
  field, values = args.over

  def fits(value: str) -> bool:
    config = load_config(args.config, args.overrides | {field: value})
    fit = compile_for(config, chips)
    print(f"{field}={value}: {line(fit, chips)}", flush=True)
    return fit.is_good

  found = largest(values, fits)
  answer = "none of them fits" if found is None else f"the largest is {field}={found}"
  print(f"{answer} on each of {chips.name}")
  return EXIT_CRASH if found is None else EXIT_DONE
