"""Predict memory, step time and cost on hardware that you do not have.

The train step is compiled for the chips. Memory and communication are taken from the
compiled program. Times are estimated as a range, from published and assumed speeds of the
chip or from the speeds in a site's file. No memory is allocated. Text datasets need not be
present, because the config has their vocabulary size or tokenizer, and sequence length.
Other datasets, except ImageNet, must be present: shapes and the number of classes are read
from them.

--search compares layouts that compute the same step: mesh, sharding, rematerialization
and micro-batches. Layouts that cannot fit are dropped. The layouts with the best estimates
are compiled until --minutes are over, and the best compiled layout is planned. `jaxscale
submit --plan plan.json` submits the plan that --json plan.json writes.
"""

from __future__ import annotations

import os
import shlex

from jaxscale.cli.parser import Namespace, Parser, distinct, file, number, picture, value
from jaxscale.errors import EXIT_CRASH, EXIT_DONE


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.exit_codes = "exit code: 0 it fits, 1 it does not fit, 2 invalid usage or configuration"
  parser.config()
  parser.option("--chips KIND-N", "the chips, e.g. h100-16", missing="try --chips v5e-16")
  parser.option("--site NAME|FILE.toml", "the site with its speeds (default: $JAXSCALE_SITE)")
  nodes = value(distinct, "whole numbers, as 1,2,4")
  parser.option("--nodes N,N", "the numbers of nodes to compare (default: powers of 2)", nodes)
  parser.option("--json FILE", "the plan to write, for `submit` and `train` (default: none)", file)
  parser.option("--png FILE", "the picture of the plan to write (default: none)", picture)
  parser.flag("--search", "search for the fastest layout, and plan it")
  parser.option("--minutes N", "the time limit of --search in minutes", number("> 0"), default=10)


def run(args: Namespace) -> int:
  """Compile and print the plan."""
  # Compiling needs no device, and another process may be using the one of this machine.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  # For chips whose programs XLA compiles for the CPU.
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
  # Programs for absent chips cannot be read from JAX's cache, and each gives a warning.
  os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  from jaxscale.config.loading import load_config
  from jaxscale.files import output_path, write_json
  from jaxscale.jobs.site import load_site
  from jaxscale.planning.plan import as_json, make_plan
  from jaxscale.planning.topologies import find_chips

  site, chips = load_site(args.site), find_chips(args.chips)
  base = config = load_config(args.config, args.overrides, trust=args.trust)
  if args.search:
    from jaxscale.planning import search

    limits = {"machine": site.machine, "minutes": args.minutes}
    best = search.search(config, chips, **limits, log=lambda x: print(x, flush=True))
    print(f"\n{search.text(best)}\n", flush=True)
    config = best.config
  plan = make_plan(config, chips, machine=site.machine, nodes=args.nodes or ())
  # Imports NumPy and Matplotlib, which only a finished plan needs.
  from jaxscale.planning import plan_report, submission

  print(plan_report.text(plan), flush=True)
  asked = args.config, args.overrides, args.site
  job = submission.submission(plan, base, *asked, site.gpus_per_node)
  if args.search:
    print(f"\nto submit it:\n  {submission.command(job)}\n")
  if args.json:
    write_json(output_path(args.json), as_json(plan) | {"submit": job})
    print(f"{args.json}: `jaxscale submit --plan {shlex.quote(args.json)}` submits it")
  if args.png:
    plan_report.draw(plan, args.png)
    print(args.png)
  return EXIT_DONE if plan.fit.is_good else EXIT_CRASH
