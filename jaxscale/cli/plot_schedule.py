"""Draw the learning rate of each config against the epoch, in one picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.cli.parser import Namespace, Parser, picture, whole
from jaxscale.config import TFDS, Config
from jaxscale.config.loading import load_config
from jaxscale.data.dataset import IMAGENET_EXAMPLES
from jaxscale.errors import ConfigError
from jaxscale.files import output_path
from jaxscale.jobs.folder import one_line
from jaxscale.metrics.plot import figure


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.words("files", "FILE[:ARG]", "the configs; required without --config")
  parser.config("; required without FILE", action="append", default=[])
  parser.option("--out FILE", "the picture to write", picture, missing="try --out schedule.png")
  parser.option("--num-train N", "the training examples (default: the dataset's)", whole(1))


def run(args: Namespace) -> None:
  """Draw the picture and print its file name."""
  curves = {}
  if not (paths := args.config + args.files):
    raise ConfigError("--config: missing; try --config digits")
  for path in paths:
    config = load_config(path, args.overrides)
    curves[path] = curve(config, args.num_train or num_examples(config))
  with one_line(f"--out={args.out}", "give a different file"):
    plot(curves, args.out)
  print(args.out)


class Curve(NamedTuple):
  """Learning rate of every step.

  Attributes:
    epochs: [steps], the passes over the training examples before each step.
    rates: [steps], the learning rate of each step.
  """

  epochs: np.ndarray
  rates: np.ndarray


def curve(config: Config, num_train: int) -> Curve:
  """Return the learning rate of every step of a run.

  Args:
    config: the settings of the run.
    num_train: the number of training examples.
  """
  import jax

  from jaxscale.experiment.derive import derive
  from jaxscale.experiment.optimizer import phase_schedule

  # The learning rate does not depend on devices and micro-batches, so one of each is enough.
  undivided = dataclasses.replace(config, accumulate_steps=1, noise_scale=False)
  derived = derive(undivided, num_train, 1, 1)
  epochs, rates = [], []
  for phase in derived.phases:
    steps = np.arange(phase.start, phase.stop)
    epochs.append((phase.examples + (steps - phase.start) * phase.batch_size) / num_train)
    rates.append(jax.vmap(phase_schedule(config, derived, phase))(steps))
  return Curve(np.concatenate(epochs), np.concatenate(rates))


def num_examples(config: Config) -> int:
  """Return the number of training examples of a config's data, counted or known.

  Raises:
    ConfigError: the data are not available.
  """
  from jaxscale.experiment import build

  if isinstance(config.data, TFDS) and config.data.name == "imagenet2012":
    return IMAGENET_EXAMPLES["train"]
  return build.make_data(config)[0].num_examples


def plot(curves: dict[str, Curve], path: str | Path) -> Path:
  """Draw the curves into a picture, one below the other.

  Args:
    curves: the curves by title.
    path: the path of the picture, whose suffix sets the format.
  """
  rows = len(curves)
  with figure(output_path(path), rows, 1, (8, 1.2 + 2 * rows)) as axes:
    for axis, (title, c) in zip(axes[:, 0], curves.items(), strict=True):
      axis.plot(c.epochs, c.rates, color="#c8553d")
      peak = int(c.rates.argmax())
      text = f"{title}: peak {c.rates[peak]:.4g} at step {peak:,} of {len(c.rates):,}"
      axis.set_title(text, loc="left", fontsize=10)
      axis.set_ylim(bottom=0)
      axis.set_ylabel("learning rate")
    axes[-1, 0].set_xlabel("epoch")
  return Path(path)
