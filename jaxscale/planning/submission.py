"""Convert a plan to its job: the input of `jaxscale submit --plan`, and its command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from jaxscale import config as cfg
from jaxscale.config.record import flat, to_plain
from jaxscale.planning.plan import Plan


def submission(
  plan: Plan,
  base: cfg.Config,
  config: str,
  overrides: Mapping[str, str],
  site: str | None,
  gpus_per_node: int = 0,
) -> dict[str, Any]:
  """Return the run of a plan, as `jaxscale submit --plan` reads it.

  Args:
    plan: the plan.
    base: the config of the command line, with its overrides.
    config: the config's file as `FILE[:ARG]`.
    overrides: the overrides of the command line.
    site: the site's profile; None if there is none.
    gpus_per_node: the profile's GPUs per node; 0 requests those of the plan's nodes.
  """
  changed = changes(base, plan.config)
  result: dict[str, Any] = {"config": config, "overrides": {**overrides, **changed}}
  result["nodes"] = plan.step.nodes
  if site:
    result["site"] = site
  if not gpus_per_node and plan.chips.chip.platform == "cuda":
    result["gpus_per_node"] = min(plan.rates.per_node, plan.step.devices)
  if plan.chips.chip.platform == "tpu":
    result["tpus"] = plan.chips.name
  if plan.job:
    minutes = -(-int(3600 * plan.job.limit) // 60)
    result["time"] = f"{minutes // 60}:{minutes % 60:02}:00"
  return result


def changes(base: cfg.Config, planned: cfg.Config) -> dict[str, str]:
  """Return the settings changed by a search, as on the command line.

  Example:
    >>> import dataclasses
    >>> from jaxscale.config.loading import load_config
    >>> base = load_config("configs/text.py")
    >>> changes(base, dataclasses.replace(base, accumulate_steps=2))
    {'accumulate_steps': '2'}
  """
  old, new = (flat(to_plain(config)) for config in (base, planned))
  return {name: str(value) for name, value in new.items() if old[name] != value}


def command(submit: Mapping[str, Any]) -> str:
  """Return the command line that submits a plan.

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
