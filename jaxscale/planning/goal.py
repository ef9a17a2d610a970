"""What a search ranks by: time, chip-hours, or time to a target.

A larger batch has more examples a second and needs more of them. With S steps to the
target at a batch of B examples,

    S = S_min (1 + B_noise / B)

(McCandlish et al., arXiv:1812.06162, eq. 2.7 and 2.11), S_min and B_noise from a
`jaxscale batch-study`, or B_noise from a run's `noise_scale`, and then S relative to
the steps of the config at its own batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import require_json

Rank = Literal["time", "chip-hours", "target"]
RANKS: tuple[Rank, ...] = ("time", "chip-hours", "target")
UNKNOWN_STEPS = 1000  # of a run whose text is not here, as in a plan


class Goal(NamedTuple):
  """What is to be least.

  Attributes:
    rank: "time" of the run, its "chip-hours", or the time to "target".
    noise_scale: examples, B_noise above; None: the run takes the config's examples.
    least_steps: S_min; None: relative to the config's steps.
  """

  rank: Rank = "time"
  noise_scale: float | None = None
  least_steps: float | None = None

  def steps(self, batch_size: int, base_size: int, base_steps: int) -> float:
    """Steps of a run at a batch size.

    Args:
      batch_size: examples of a step.
      base_size: of the config.
      base_steps: that it takes at that size.

    Example:
      >>> goal = Goal("target", noise_scale=1000.0)
      >>> goal.steps(1000, 1000, 500), round(goal.steps(4000, 1000, 500), 1)
      (500.0, 312.5)
    """
    if self.noise_scale is None:
      return base_steps * base_size / batch_size
    grown = 1 + self.noise_scale / batch_size
    if self.least_steps is not None:
      return self.least_steps * grown
    return base_steps * grown / (1 + self.noise_scale / base_size)

  def measure(self, steps: float, seconds: float, chips: float) -> float:
    """What is compared: hours of the steps, or chip-hours.

    Example:
      >>> Goal("chip-hours").measure(3600, 2.0, 8)
      16.0
    """
    return steps * seconds / 3600 * (chips if self.rank == "chip-hours" else 1)

  @property
  def title(self) -> str:
    """Of a column."""
    titles = {"time": "hours", "target": "hours to target"}
    return titles.get(self.rank, self.rank)


def goal_of(
  rank: Rank, noise_scale: float | None = None, study: str | Path | None = None
) -> Goal:
  """A goal, from what is known of the batch size.

  Args:
    rank: one of `RANKS`.
    noise_scale: examples, of a run's log.
    study: the study.json of a `jaxscale batch-study`.

  Raises:
    ConfigError: a target without either, or a study that found no critical batch.
  """
  if rank != "target":
    return Goal(rank)
  if study is not None:
    path, remedy = Path(study), "give the study.json of a `jaxscale batch-study`"
    shape = {"sizes": [{}], "fit": ({"b_crit": float, "s_min": float}, None)}
    fit = require_json(path, shape, remedy)["fit"]
    if fit is None:
      why = "found no critical batch size; train more sizes, or give --noise-scale"
      raise ConfigError(f"--study={study}: {why}")
    return Goal(rank, float(fit["b_crit"]), float(fit["s_min"]))
  if noise_scale is None:
    why = "steps against batch size are not known; give --study FILE or --noise-scale N"
    raise ConfigError(f"--rank=target: {why}")
  return Goal(rank, noise_scale)
