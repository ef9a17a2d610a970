"""Read the plan in a run's workdir, plan.json, without JAX.

A run is compared with a plan only if both take the same step: on the same chip, with the same
settings that determine the step time, and with a planned number of devices and batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.record import flat
from jaxscale.config.validation import shown
from jaxscale.errors import ConfigError, printable
from jaxscale.files import require_json
from jaxscale.metrics import text
from jaxscale.metrics.chips import peak_flops
from jaxscale.planning.machine import CORNERS, Corner, chip_kind
from jaxscale.planning.topologies import CHIPS, kind_of

FILE = "plan.json"
_REMEDY = "create it again with `jaxscale plan`"
_CORNERS = dict.fromkeys(CORNERS, float)
_STEP = dict(devices=int, batch_size=int, seconds=_CORNERS, parts={str: float}, memory=float)
_SHAPE = dict(chips=str, config={"class": str}, step=_STEP, strong=[_STEP], weak=[_STEP])
_SHAPE |= dict(run=(None, {"steps": int}), job=(None, {"hours": _CORNERS}))

# Settings that do not determine the step time, by the first word of their names. The batch size
# is compared together with the number of devices.
_FREE = """
batch_size epochs steps seed schedule evaluation checkpoint checks faults log callbacks compilation
input_threads init_from init_head gpu_settings lr_scaling lr_reference_batch_size layer_decay
layer_order target_accuracy target_loss stop_at_target
"""
# Settings of which only the class matters; an optimizer's learning rate does not, for example.
_CLASS_ALONE = ("optimizer", "loss", "data")
# Settings that determine, with the steps, how long a run takes.
_LENGTH = ("epochs", "steps", "evaluation", "checkpoint")


class PlannedStep(NamedTuple):
  """Step on a number of devices, as in `step_plan.Step`."""

  devices: int
  batch_size: int
  seconds: Mapping[Corner, float]
  parts: Mapping[str, float]
  memory: float

  @property
  def rate(self) -> float:
    """Expected examples per second."""
    return self.batch_size / self.seconds["expected"]


def read_plan(path: Path) -> dict[str, Any]:
  """Read a plan from its file.

  Raises:
    ConfigError: the file is missing or damaged, or is not a plan.
  """
  plan = require_json(path, _SHAPE, _REMEDY)
  numbers = [*(plan["job"] or {"hours": {}})["hours"].values()]
  for size in _sizes(plan):
    numbers += [size.batch_size, *size.seconds.values()]
  if bad := [x for x in numbers if not 0 < x < 1e12]:
    raise ConfigError(f"{path}: {bad[0]:g} is out of range for a batch size or a time; {_REMEDY}")
  return plan


def _sizes(plan: Mapping[str, Any]) -> list[PlannedStep]:
  """Return the step on the planned chips, then on other numbers of devices."""
  steps = plan["step"], *plan["strong"], *plan["weak"]
  return [PlannedStep(**{name: step[name] for name in _STEP}) for step in steps]


class Match(NamedTuple):
  """Counterpart of a run in a plan.

  Attributes:
    step: the planned step; None if the run cannot be compared with the plan.
    reason: the reason why it cannot, in one line; "" if it can.
    chips: the chips of the plan, such as "h100-256".
    hours: the planned hours of the run, by corner; None if the plan is for another length.
  """

  step: PlannedStep | None = None
  reason: str = ""
  chips: str = ""
  hours: Mapping[Corner, float] | None = None


def match(
  plan: Mapping[str, Any],
  config: Mapping[str, Any],
  *,
  devices: int,
  batch_size: int,
  kind: str = "",
  steps: int | None = None,
) -> Match:
  """Find the step of a plan that a run takes, or the reason why there is none.

  Args:
    plan: the plan, from `read_plan`.
    config: the run's config, as in config.json.
    devices: the number of the run's devices.
    batch_size: the examples per step.
    kind: the `jax.Device.device_kind` of the devices; "" if it is not known.
    steps: the steps of the whole run; None if they are not known.
  """
  if kind and (other := _other_chip(plan["chips"], kind)):
    return Match(reason=f"the plan is for {other}, the run is on {kind}")
  planned, settings = _of_step(plan["config"]), _of_step(config)
  if planned.get("data.class") == "Synthetic":  # Synthetic data represent any data.
    planned["data.class"] = settings.get("data.class")
  for name in {**planned, **settings}:
    if (old := planned.get(name)) != (new := settings.get(name)):
      both = f"{name} is {shown(old)} in the plan and {shown(new)} in the run"
      return Match(reason=f"the plan has a different config: {both}")
  first, *others = _sizes(plan)
  for step in (first, *others):
    if (step.devices, step.batch_size) == (devices, batch_size):
      is_whole = step == first and plan["job"] and plan["run"]
      is_whole = is_whole and steps in (None, plan["run"]["steps"])
      alike = all(plan["config"].get(name) == config.get(name) for name in _LENGTH)
      return Match(step, "", plan["chips"], plan["job"]["hours"] if is_whole and alike else None)
  size = f"batch {batch_size:,} on {text.plural(devices, 'device')}"
  return Match(reason=f"the plan has no {size}")


def _other_chip(chips: str, kind: str) -> str | None:
  """Return the kind of chip in a plan if it differs from the run's devices."""
  try:
    chip = kind_of(chips)
  except ConfigError:
    return chips
  if CHIPS[chip].platform == "cpu":
    return None if "cpu" in kind.lower() else chip
  planned = chip_kind(chip)
  is_same = planned in kind or peak_flops(planned) == (peak_flops(kind) or -1.0)
  return None if is_same else planned


def _of_step(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return the settings that determine the step time, by dotted name."""
  return {
    name: value
    for name, value in flat(config).items()
    if (words := name.split("."))[0] not in _FREE.split()
    and (words[0] not in _CLASS_ALONE or words[1:] == ["class"])
  }


def not_compared(reason: str) -> str:
  """Return the line about a plan that cannot be compared with a run."""
  return printable(f"{FILE}: {reason}; nothing is compared with it")
