"""Learning rates of configs against the epoch, in one picture.

python -m jaxscale.plot_schedule CONFIG[:arg] ... [--out FILE] [--num-train N]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.config import TFDS, Config
from jaxscale.overrides import load_config
from jaxscale.settings import ConfigError, nearest

USAGE = """usage: python -m jaxscale.plot_schedule CONFIG[:arg] ... [--out FILE]
                                       [--num-train N]

Draws the learning rate of every config against the epoch.

  --out FILE      the picture (default: schedule.png)
  --num-train N   training examples, where the data is not here to be counted"""
NUM_IMAGENET = 1_281_167  # training images of ILSVRC 2012


class Curve(NamedTuple):
  """The learning rate of every step.

  Attributes:
    epochs: [steps], passes over the training examples before each.
    rates: [steps].
  """

  epochs: np.ndarray
  rates: np.ndarray


def curve(config: Config, num_train: int) -> Curve:
  """The learning rate of every step of a run.

  Args:
    config: the experiment.
    num_train: training examples.
  """
  import jax

  from jaxscale import parts
  from jaxscale.derive import derive

  # One device and micro-batch: what a batch is divided by changes no rate.
  derived = derive(_undivided(config), num_train, 1, 1)
  epochs, rates = [], []
  for stage in derived.stages:
    steps = np.arange(stage.start, stage.stop)
    seen = stage.examples + (steps - stage.start) * stage.batch_size
    epochs.append(seen / num_train)
    rates.append(jax.vmap(parts.stage_schedule(config, derived, stage))(steps))
  return Curve(np.concatenate(epochs), np.concatenate(rates))


def _undivided(config: Config) -> Config:
  import dataclasses

  return dataclasses.replace(config, accumulate_steps=1, noise_scale=False)


def num_examples(config: Config) -> int:
  """Training examples of a config's data, counted or known.

  Raises:
    ConfigError: the data is not here.
  """
  from jaxscale import parts

  if isinstance(config.data, TFDS) and config.data.name == "imagenet2012":
    return NUM_IMAGENET
  return parts.make_data(config)[0].num_examples


def plot(curves: dict[str, Curve], path: str | Path) -> Path:
  """Draw the curves, one under another, into a picture.

  Args:
    curves: by title.
    path: of the picture; its suffix chooses the format.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  rows = len(curves)
  figure, axes = plt.subplots(
    rows, 1, figsize=(8, 1.2 + 2 * rows), layout="constrained", squeeze=False
  )
  for axis, (title, c) in zip(axes[:, 0], curves.items(), strict=True):
    axis.plot(c.epochs, c.rates, color="#c8553d")
    peak = int(c.rates.argmax())
    axis.set_title(
      f"{title}: peak {c.rates[peak]:.4g} at step {peak:,} of {len(c.rates):,}",
      loc="left",
      fontsize=10,
    )
    axis.set_ylim(bottom=0)
    axis.set_ylabel("learning rate")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
  axes[-1, 0].set_xlabel("epoch")
  path = Path(path)
  figure.savefig(path, dpi=120)
  plt.close(figure)
  return path


def main(argv: list[str]) -> int:
  """Draw what the command line asks for; returns the exit code."""
  options, configs, args = {"out": "schedule.png", "num-train": ""}, [], list(argv)
  if not args or "--help" in args or "-h" in args:
    print(USAGE)
    return 0 if args else 2
  try:
    while args:
      arg = args.pop(0)
      if not arg.startswith("--"):
        configs.append(arg)
        continue
      name, equals, value = arg.removeprefix("--").partition("=")
      if name not in options:
        known = [f"--{n}" for n in options]
        raise ConfigError(f"{arg}: not an option, {nearest(arg, known)}")
      if not equals and not args:
        raise ConfigError(f"{arg}: a value is missing")
      options[name] = value if equals else args.pop(0)
    counted = options["num-train"]
    if counted and not (counted.isdecimal() and int(counted)):
      raise ConfigError(f"--num-train={counted}: give a whole number >= 1")
    if not configs:
      raise ConfigError("no config given; try configs/digits.py")
    curves = {}
    for path in configs:
      config = load_config(path)
      curves[path] = curve(config, int(counted) if counted else num_examples(config))
    print(plot(curves, options["out"]))
  except ConfigError as e:
    print(f"error: {e}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
