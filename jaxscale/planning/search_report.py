"""A search for people, and as JSON: every layout, and what became of it."""

from __future__ import annotations

import collections
import re
import shlex
from collections.abc import Mapping
from typing import Any

from jaxscale import config as cfg
from jaxscale.metrics.text import short_time, table
from jaxscale.planning import candidates
from jaxscale.planning.plan import Plan
from jaxscale.planning.search import Considered, Search
from jaxscale.planning.topologies import gib

_ESTIMATED = 10  # layouts that are shown, of those that were not compiled
_EXAMPLES = 12  # reasons of refusal that are shown


def text(search: Search) -> str:
  """The tables that `jaxscale plan --search` prints, before the plan of the best.

  Example:
    >>> print(text(search(config, "h100-64")))                   # doctest: +SKIP
  """
  states = collections.Counter(x.state for x in search.layouts)
  made = sum(len(x.compiled) for x in search.layouts)
  head = (
    f"searched {len(search.layouts):,} layouts, {search.candidates:,} with remat and "
    f"micro-batches, in {search.seconds:.0f} s: {states['refused']:,} refused, "
    f"{states['estimated']:,} estimated only, {states['compiled']:,} compiled "
    f"({made} programs); {search.ended}; {search.goal.title} of {search.steps:,} steps "
    "of the config's batch"
  )
  if states["compiled"] < 2:
    head += (
      "\nnothing was compared: one layout was compiled, and estimates of others say "
      "nothing next to its plan; give more --minutes"
    )
  return "\n\n".join([head, _compiled(search), _estimated(search), _refused(search)])


def _compiled(search: Search) -> str:
  rows = []
  for layout in search.layouts:
    for one in sorted(layout.compiled, key=lambda c: c.hours):
      c, step = one.candidate, one.step
      cells = ["–", "–", "–"]
      if step:
        took = short_time(step.seconds["expected"])
        cells = [f"{one.hours:,.4g}", took, gib(step.memory)]
      note = "" if step else one.reason.split(":")[0]
      note = "; ".join(filter(None, [note, *re.findall(r"\(([^)]*)\)$", one.reason)]))
      sizes = [f"{c.devices:,}", f"{c.batch_size:,}"]
      rows.append((c.name, c.layout.remat, f"{c.micros:,}", *sizes, *cells, note))
  rows.sort(key=lambda r: (r[5] == "–", float(r[5].replace(",", "").replace("–", "0"))))
  head = ("layout", "remat", "micro-batches", "devices", "batch", search.goal.title,
          "step", "memory", "")  # fmt: skip
  return "compiled, the best first\n" + _indented(table(head, rows, left=(0, 1, 8)))


def _estimated(search: Search) -> str:
  found = [x for x in search.layouts if x.state == "estimated"]
  if not found:
    return "estimated and not compiled: none"
  lines = [f"  {x.family.name}: {x.reason}" for x in found[:_ESTIMATED]]
  title = f"estimated and not compiled, the best first{_how_far(search)}"
  more = len(found) - len(lines)
  lines += [f"  and {more:,} more, which --json has"] * (more > 0)
  return "\n".join([title, *lines])


def _how_far(search: Search) -> str:
  """How far estimates were off where the layout was compiled as well."""
  compiled = [c for x in search.layouts for c in x.compiled]
  off = [c.hours / c.guess for c in compiled if c.step and c.guess]
  if not off:
    return ""
  failed = sum(not c.step for c in compiled)
  text = f"; of those compiled, {failed} of {len(compiled)} did not fit or compile, "
  return f"{text}others take {min(off):.2g} to {max(off):.2g} times their estimate"


def _refused(search: Search) -> str:
  kinds: dict[str, list[Considered]] = {}
  for x in (x for x in search.layouts if x.state == "refused"):
    kinds.setdefault(re.sub(r"[\d,.]+", "N", x.reason), []).append(x)
  if not kinds:
    return "refused before compilation: none"
  ordered = sorted(kinds.values(), key=len, reverse=True)
  lines = [f"  {len(k):,} as {k[0].family.name}: {k[0].reason}" for k in ordered]
  more = len(lines) - _EXAMPLES
  lines = lines[:_EXAMPLES] + [f"  and {more:,} more reasons, which --json has"] * (
    more > 0
  )
  return "\n".join(["refused before compilation", *lines])


def _indented(lines: str) -> str:
  return "\n".join(f"  {x}" for x in lines.splitlines())


def as_json(search: Search) -> dict[str, Any]:
  """Every layout in a line, and the best one's settings."""
  return {
    "rank": search.goal.rank,
    "noise_scale": search.goal.noise_scale,
    "least_steps": search.goal.least_steps,
    "seconds": round(search.seconds, 1),
    "candidates": search.candidates,
    "steps": search.steps,
    "ended": search.ended,
    "best": search.best.candidate.name,
    "layouts": [_layout(x) for x in search.layouts],
  }


def _layout(layout: Considered) -> dict[str, Any]:
  one = layout.family
  found: dict[str, Any] = {
    "layout": one.name, "devices": one.devices, "batch_size": one.batch_size,
    "state": layout.state, "reason": layout.reason,
  }  # fmt: skip
  if layout.compiled:
    found["compiled"] = [
      {
        "remat": c.candidate.layout.remat,
        "micro_batches": c.candidate.micros,
        "measure": c.hours if c.step else None,
        "estimated": c.guess or None,
        "seconds": c.step.seconds if c.step else None,
        "memory": c.step.memory if c.step else None,
        "reason": c.reason,
      }
      for c in layout.compiled
    ]
  return found


def submission(
  plan: Plan,
  base: cfg.Config,
  config: str,
  overrides: Mapping[str, str],
  site: str | None,
  gpus_per_node: int = 0,
) -> dict[str, Any]:
  """What `jaxscale submit --plan` takes: the run of a plan.

  Args:
    plan: of the run.
    base: the config of the command line, with its overrides.
    config: `FILE[:ARG]` that it is from.
    overrides: that it was given.
    site: its profile, if one was given.
    gpus_per_node: that the profile has; 0: those of the plan's nodes are asked for.
  """
  changed = candidates.overrides(base, plan.config)
  found: dict[str, Any] = {"config": config, "overrides": {**overrides, **changed}}
  found["nodes"] = plan.step.nodes
  if site:
    found["site"] = site
  if not gpus_per_node and plan.chips.chip.platform == "cuda":
    found["gpus_per_node"] = min(plan.rates.per_node, plan.step.devices)
  if plan.chips.chip.platform == "tpu":
    found["tpus"] = plan.chips.name
  if plan.job:
    minutes = -(-int(3600 * plan.job.limit) // 60)
    found["time"] = f"{minutes // 60}:{minutes % 60:02}:00"
  return found


def command(submit: Mapping[str, Any]) -> str:
  """The command line that submits a plan.

  Example:
    >>> command({"config": "a.py", "nodes": 2, "overrides": {"epochs": "3"}})
    'jaxscale submit --config a.py --nodes 2 --config.epochs=3'
  """
  words = ["jaxscale", "submit", "--config", submit["config"]]
  words += ["--nodes", str(submit["nodes"])]
  for name in ("site", "time", "gpus_per_node"):
    option = f"--{name.replace('_', '-')}"
    words += [option, str(submit[name])] if name in submit else []
  words += [f"--config.{name}={value}" for name, value in submit["overrides"].items()]
  return shlex.join(words)
