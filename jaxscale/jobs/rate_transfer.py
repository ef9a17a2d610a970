"""Settings of a large config from the learning-rate sweep of a small one.

    jaxscale sweep --config small.py --sweep optimizer.lr=1e-3,2e-3,4e-3 --name rates
    jaxscale transfer rates --config large.py

Both configs have the same parametrization, which changes initialization and rates with width and
depth. A batch that is k times as large changes the settings by the rule of the optimizer:

    AdamW   lr sqrt(k), eps / sqrt(k), 1 - b1 and 1 - b2 times k   (arXiv:2205.10287, sqrt rule)
            weight_decay sqrt(k): lr times decay per epoch stays   (arXiv:2405.13698)
    Muon    lr and weight_decay sqrt(k), an assumption by analogy with AdamW
    SGD     lr k                                                   (arXiv:1706.02677, section 2.1)

No rule is applied to the length of the run; the warm-up keeps its share of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.config import Config, Standard
from jaxscale.config.plain import to_plain
from jaxscale.config.record import describe_run, flat
from jaxscale.errors import invalid
from jaxscale.files import read_json
from jaxscale.jobs import folder as folders
from jaxscale.metrics import text

_DERIVED = dict(derived=dict(peak_lr=float, total_steps=int, warmup_steps=int))
_SOURCES = dict(adam="arXiv:2205.10287", muon="assumed as for AdamW", sgd="arXiv:1706.02677")
_FIX = "use one optimizer that has a rule, and one CompleteP or MuP, for the sweep and the config"
Rows = dict[str, tuple[Any, Any, str]]  # value in the sweep, value for the config, rule


def read(names: Sequence[str], runs: str) -> tuple[Any, Any, dict[float, float | None]]:
  """Read the runs of a sweep of the learning rate, given as its name or as workdirs.

  Returns:
    The settings of a run, as config.json has them, its derived numbers, and the mean
    validation losses over seeds by peak learning rate; None if a run did not end.

  Raises:
    ConfigError: a run has not started, or runs differ in more than learning rate and seed.
  """
  workdirs, losses, configs = [], {}, []
  for path in folders.find_all(names, runs, workdirs=True):
    spec = folders.read_spec(path) if (path / "run.json").exists() else None
    workdirs += [spec.workdir(task) for task in spec.tasks] if spec else [path]
  for workdir in workdirs:
    record = describe_run(workdir)
    configs.append(flat(record.config) | {"optimizer.lr": 0, "seed": 0})
    if different := [k for k, v in configs[0].items() if configs[-1].get(k) != v]:
      problem = f"differs from {workdirs[0].name} in {different[0]}"
      raise invalid(str(workdir), ..., problem, "give runs that differ in optimizer.lr and seed")
    derived = read_json(workdir / "config.json", _DERIVED)["derived"]
    summary = read_json(workdir / "summary.json", dict(outcome=str, loss=float))
    losses.setdefault(derived["peak_lr"], []).append(summary.get("loss", math.nan))
  means = {rate: statistics.fmean(each) for rate, each in sorted(losses.items())}
  return record.config, derived, {r: x if math.isfinite(x) else None for r, x in means.items()}


def optimum(losses: Mapping[float, float | None]) -> tuple[float, float, float]:
  """Fit a parabola in log2(rate) to the losses at the best rate and up to two on either side.

  Returns:
    The best rate of the parabola, and the measured rates beside the best one.

  Raises:
    ConfigError: the best rate is the lowest or the highest one with a loss.

  Example:
    >>> optimum({1.0: 3.0, 2.0: 2.0, 4.0: 3.0})
    (2.0, 1.0, 4.0)
  """
  known = [(r, x) for r, x in losses.items() if x is not None] or [(0, 0)]
  rates, values = zip(*known, strict=True)
  best = values.index(min(values))
  if not 0 < best < len(rates) - 1:
    problem = "is not between two other rates with a loss"
    raise invalid("best learning rate", rates[best], problem, "sweep optimizer.lr further")
  near = slice(max(best - 2, 0), best + 3)
  curve = np.polyfit(np.log2(rates[near]), values[near], 2)
  low, high = rates[best - 1], rates[best + 1]
  rate = 2 ** (-curve[1] / (2 * curve[0])) if curve[0] > 0 else rates[best]
  return round(float(np.clip(rate, low, high)), 12), low, high


def settings(old: Any, derived: Any, rate: float, config: Config) -> Rows:
  """Return the settings of a config by its rules for the batch size.

  Args:
    old: the settings of the sweep.
    derived: the numbers derived from them.
    rate: the best peak learning rate of the sweep.
    config: the large config.

  Raises:
    ConfigError: optimizer or parametrization differ, or have no rule for a difference.
  """
  new, rule = to_plain(config), config.optimizer.update_rule
  old = {"parametrization": to_plain(Standard())} | old
  wrong = {
    "optimizer": rule not in _SOURCES or old["optimizer"]["class"] != new["optimizer"]["class"],
    "parametrization": old["parametrization"] != new["parametrization"]
    or (isinstance(config.parametrization, Standard) and old["model"] != new["model"]),
  }
  for part in (part for part, is_wrong in wrong.items() if is_wrong):
    problem = f"cannot transfer from {old[part]['class']} and {old['model']['class']}"
    raise invalid(f"Config.{part}", new[part]["class"], problem, _FIX)
  k, before = config.batch_size / old["batch_size"], old["optimizer"]
  root, name = (k, "k") if rule == "sgd" else (math.sqrt(k), "sqrt(k)")
  rows: Rows = {"batch_size": (old["batch_size"], config.batch_size, f"k = {k:g}")}
  rows["optimizer.lr"] = rate, rate * root, f"{name}, {_SOURCES[rule]}"
  if rule != "sgd" and "weight_decay" in before:
    decay = before["weight_decay"]
    rows["optimizer.weight_decay"] = decay, decay * root, "sqrt(k), arXiv:2405.13698"
  if rule == "adam" and {"eps", "b1", "b2"} <= before.keys():
    rows["optimizer.eps"] = before["eps"], before["eps"] / root, "1 / sqrt(k), arXiv:2205.10287"
    moments = {b: 1 - k * (1 - before[b]) for b in ("b1", "b2")}
    fits = min(moments.values()) >= 0
    why = "1 - k (1 - b), arXiv:2205.10287" if fits else "kept: k (1 - b) > 1, outside the rule"
    for b, x in moments.items():
      rows[f"optimizer.{b}"] = before[b], x if fits else before[b], why
  if config.steps is not None:
    was, warmup = derived["total_steps"], derived["warmup_steps"]
    why = f"{k * config.steps / was:g} times the examples, no rule applied"
    rows["steps"] = was, config.steps, why
    rows["schedule.warmup_steps"] = warmup, round(warmup / was * config.steps), "its share"
  return rows


def report(names: Sequence[str], runs: str, config: Config, shown: str) -> str:
  """Return the sweep, its optimum, the settings with their rules, and the command.

  Args:
    names: the name of the sweep, or workdirs.
    runs: the directory of all runs.
    config: the large config.
    shown: the config as `FILE[:ARG]`.

  Raises:
    ConfigError: the sweep or the config does not allow a transfer.
  """
  before, derived, losses = read(names, runs)
  rate, low, high = optimum(losses)
  rows = settings(before, derived, rate, config)
  old, new = flat(before), flat(to_plain(config))
  others = [n for n in new if n in old and old[n] != new[n] and n not in rows]
  cells = [(n, *(f"{x:.6g}" for x in values), why) for n, (*values, why) in rows.items()]
  changed = {n: value for n, (_, value, _) in rows.items() if n not in ("batch_size", "steps")}
  given = " ".join(f"--config.{n}={value:.6g}" for n, value in changed.items())
  return "\n".join([
    text.table(("peak lr", "loss"), [(f"{r:.4g}", text.cell(x, ".4f")) for r, x in losses.items()]),
    f"best lr {rate:.4g} (parabola in log2), between {low:.4g} and {high:.4g}, the rates beside it",
    f"{type(config.parametrization).__name__}, for a config that differs in",
    *(f"  {n}: {old[n]} to {new[n]}" for n in others or ["batch_size"]),
    text.table(("setting", "sweep", "config", "rule"), cells, left=(0, 3)),
    f"jaxscale train --config {shown} --config.lr_scaling=none {given}",
  ])  # fmt: skip
