"""Learning rates of configs against the epoch, in one picture.

python -m jaxscale.cli.plot_schedule --config FILE[:arg] [--config ...] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.config import TFDS, Config
from jaxscale.config.loading import load_config
from jaxscale.config.validation import nearest
from jaxscale.errors import EXIT_DONE, EXIT_USER, ConfigError, leave, one_line_errors

OPTIONS = ("--config", "--out", "--num-train", "--help")
USAGE = """\
usage: python -m jaxscale.cli.plot_schedule --config FILE[:arg] [--config FILE[:arg] ...]
                                        [--out FILE] [--num-train N]
                                        [--config.FIELD=VALUE ...]

Draws the learning rate of every config against the epoch.

  --config FILE[:arg]     Python file with get_config([arg]) -> Config; may be
                          given several times, and without --config before it
  --out FILE              the picture (default: schedule.png)
  --num-train N           training examples, where the data is not here to be
                          counted
  --config.FIELD=VALUE    replace a setting of every config, as in jaxscale.train

exit code: 0 done, 2 a mistake in what was asked for, 1 anything else"""
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

  from jaxscale.experiment import parts
  from jaxscale.experiment.derive import derive

  # One device and micro-batch: what a batch is divided by changes no rate.
  derived = derive(_undivided(config), num_train, 1, 1)
  epochs, rates = [], []
  for phase in derived.phases:
    steps = np.arange(phase.start, phase.stop)
    seen = phase.examples + (steps - phase.start) * phase.batch_size
    epochs.append(seen / num_train)
    rates.append(jax.vmap(parts.phase_schedule(config, derived, phase))(steps))
  return Curve(np.concatenate(epochs), np.concatenate(rates))


def _undivided(config: Config) -> Config:
  import dataclasses

  return dataclasses.replace(config, accumulate_steps=1, noise_scale=False)


def num_examples(config: Config) -> int:
  """Training examples of a config's data, counted or known.

  Raises:
    ConfigError: the data is not here.
  """
  from jaxscale.experiment import parts

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


class Request(NamedTuple):
  """What a command line asks for.

  Attributes:
    configs: `FILE` or `FILE:arg`, in the order given.
    overrides: settings by dotted field, put into every config.
    out: the picture.
    num_train: training examples; None: count them.
  """

  configs: tuple[str, ...]
  overrides: dict[str, str]
  out: str = "schedule.png"
  num_train: int | None = None


def parse(argv: Sequence[str]) -> Request:
  """Split the command line.

  Raises:
    ConfigError: no config, an option that does not exist, or lacks its value.

  Example:
    >>> parse(["a.py", "--config", "b.py:x", "--out=rates.png"]).configs
    ('a.py', 'b.py:x')
  """
  configs, overrides, options, args = [], {}, {"out": "schedule.png"}, list(argv)
  while args:
    arg = args.pop(0)
    if not arg.startswith("-"):
      configs.append(arg)
      continue
    name, given, value = arg.partition("=")
    if name not in OPTIONS and not name.startswith("--config."):
      raise ConfigError(f"{arg}: not an option, {nearest(name, OPTIONS)}")
    if not given:
      if not args or args[0].startswith("--"):
        raise ConfigError(f"{name}: a value is missing, write {name}=VALUE")
      value = args.pop(0)
    if name == "--config":
      configs.append(value)
    elif name.startswith("--config."):
      overrides[name.removeprefix("--config.")] = value
    else:
      options[name.removeprefix("--")] = value
  if not configs:
    raise ConfigError("--config: missing; try --config configs/digits.py")
  number = options.get("num-train")
  if number is not None and not (number.isdecimal() and int(number)):
    raise ConfigError(f"--num-train={number}: give a whole number >= 1")
  count = None if number is None else int(number)
  return Request(tuple(configs), overrides, options["out"], count)


@one_line_errors
def main(argv: list[str]) -> int:
  """Draw what the command line asks for; returns the exit code."""
  if not argv or "--help" in argv or "-h" in argv:
    print(USAGE)
    return EXIT_DONE if argv else EXIT_USER
  request = parse(argv)
  curves = {}
  for path in request.configs:
    config = load_config(path, request.overrides)
    curves[path] = curve(config, request.num_train or num_examples(config))
  try:
    print(plot(curves, request.out))
  except (OSError, ValueError) as e:  # no such directory, no such format
    raise ConfigError(f"--out={request.out}: {e}") from None
  return EXIT_DONE


if __name__ == "__main__":
  leave(main)
