"""What follows from the settings, the data and the number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.errors import ConfigError
from jaxscale.experiment import microbatches
from jaxscale.experiment.phases import Phase, plan
from jaxscale.mesh import batch_norm_span, mesh_shape


class Derived(NamedTuple):
  """What follows from a Config, the data and the devices.

  Attributes:
    num_train: training examples.
    num_eval: held-out examples.
    total_steps: optimizer steps of the run.
    warmup_steps: steps of Config.batch_size until the peak rate.
    peak_lr: learning rate at the end of the warm-up, at Config.batch_size.
    eval_every: steps between evaluations (in the first phase).
    save_every: steps between checkpoints (in the first phase).
    num_devices: over all processes.
    row_blocks: in how many parts they split the rows of a batch.
    start_devices: over all processes when the run began; on fewer of them there are
      more micro-batches per step, so that none is larger than then (microbatches.py).
    device_batch_size: examples per device and step (in the first phase).
    micro_batch_size: examples per device and micro-batch (in the first phase).
    eval_batch_size: over all devices, rounded up to a multiple of them; no more
      than there are examples.
    phases: stretches of steps of one shape; one, unless something changes.
  """

  num_train: int
  num_eval: int
  total_steps: int
  warmup_steps: int
  peak_lr: float
  eval_every: int
  save_every: int
  num_devices: int
  row_blocks: int
  start_devices: int
  device_batch_size: int
  micro_batch_size: int
  eval_batch_size: int
  phases: tuple[Phase, ...]


def derive(
  config: cfg.Config,
  num_train: int,
  num_eval: int,
  num_devices: int,
  chosen: Sequence[int] = (),
  start_devices: int | None = None,
) -> Derived:
  """Compute what follows from the settings.

  Args:
    config: the settings.
    num_train: training examples.
    num_eval: held-out examples.
    num_devices: over all processes.
    chosen: batch sizes that an adaptive run has settled on so far, a phase each.
    start_devices: over all processes when the run began; None: it begins now.

  Raises:
    ConfigError: a batch does not divide over devices and micro-batches, or has
      more examples than there are; a text is no longer than one example; or the run
      is too long to be counted.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> config = load_config("configs/digits.py")
    >>> derive(config, 1437, 360, 2, start_devices=8).phases[0].accumulate_steps
    4
  """
  start = start_devices or num_devices
  # What is wrong with the grid is reported where it is made.
  shape = mesh_shape(num_devices, **dataclasses.asdict(config.mesh))
  blocks, each = shape.row_blocks, shape.stage * shape.model
  start_blocks = max(start // each, 1)
  _check_length(config, num_train)
  _check_text(config, num_train)
  _check_batch(config.batch_size, num_train, start_blocks, config.accumulate_steps)
  phases = _phases(config, num_train, chosen)
  _check_phases(config, phases, num_train, start_blocks)
  phases = over_devices(config, phases, blocks, start_blocks)
  warmup_steps = round(config.schedule.warmup_epochs * num_train / config.batch_size)
  all_steps = config.epochs * num_train / config.batch_size
  if warmup_steps >= all_steps > 1:
    raise ConfigError(
      f"schedule.warmup_epochs={config.schedule.warmup_epochs}: {warmup_steps} "
      f"steps of a run of {phases[-1].stop}, make it shorter"
    )
  first = phases[0]
  return Derived(
    num_train=num_train,
    num_eval=num_eval,
    total_steps=phases[-1].stop,
    warmup_steps=warmup_steps,
    peak_lr=optim.scale_learning_rate(
      config.optimizer.lr,
      config.batch_size,
      config.lr_reference_batch_size,
      config.lr_scaling,
    ),
    eval_every=steps_of(config.evaluation.every_epochs, num_train, first),
    save_every=steps_of(config.checkpoint.every_epochs, num_train, first),
    num_devices=num_devices,
    row_blocks=blocks,
    start_devices=start,
    device_batch_size=first.batch_size // blocks,
    micro_batch_size=first.batch_size // (blocks * first.accumulate_steps),
    eval_batch_size=-(-min(config.evaluation.batch_size, num_eval) // blocks) * blocks,
    phases=phases,
  )


def over_devices(
  config: cfg.Config, phases: Sequence[Phase], num_blocks: int, start_blocks: int
) -> tuple[Phase, ...]:
  """The phases, as asked for, with the micro-batches that a step has here.

  Args:
    config: says what is to stay as it was.
    phases: whose batches divide over `start_blocks`.
    num_blocks: parts that devices split the rows in now.
    start_blocks: when the run began.

  Raises:
    ConfigError: a batch does not divide over these devices.
  """
  if num_blocks == start_blocks:
    return tuple(phases)
  span = _bn_span(config) or "device"

  def keeps(phase: Phase, devices: int, micros: int) -> bool:
    if config.noise_scale and devices * micros == 1:
      return False
    if span == "global":  # its statistics are over a micro-batch of all devices
      return micros == phase.accumulate_steps
    rows = phase.batch_size // (devices * micros)
    try:
      grid = dataclasses.asdict(config.mesh) | {"stage": 1, "model": 1}
      shape = mesh_shape(devices, **grid)
      batch_norm_span(span, rows, replica=shape.replica, data=shape.data * shape.fsdp)
    except ConfigError:
      return False
    return True

  return microbatches.over_devices(phases, num_blocks, start_blocks, keeps)


def device_summary(config: cfg.Config, derived: Derived) -> str | None:
  """One line for the log, where the run began on another number of devices."""
  each = derived.num_devices // derived.row_blocks  # devices that share their rows
  here, start = derived.row_blocks, max(derived.start_devices // each, 1)
  if here == start:
    return None
  asked = [s._replace(accumulate_steps=_asked(config, s)) for s in derived.phases]
  text = microbatches.summary(asked, derived.phases, here, start)
  before, now = (
    {s.batch_size // (n * s.accumulate_steps) for s in phases}
    for phases, n in ((asked, start), (derived.phases, here))
  )
  if _bn_span(config) == "device" and before != now:
    text += "; BatchNorm's statistics, of a device's examples at a time, are others"
  return text


def steps_of(epochs: float, num_train: int, phase: Phase) -> int:
  """Steps of a phase that make so many epochs, one at least."""
  return max(round(epochs * num_train / phase.batch_size), 1)


def _bn_span(config: cfg.Config) -> Any:
  """As the model has it; None: it has no BatchNorm."""
  has = getattr(config.model, "batch_norm", True)
  return getattr(config.model, "bn_span", None) if has else None


def _asked(config: cfg.Config, phase: Phase) -> int:
  """The micro-batches a step that the config has for a phase."""
  asked = getattr(config.phases, "accumulate_steps", ())
  return asked[phase.ordinal] if asked else config.accumulate_steps


def _check_length(config: cfg.Config, num_train: int) -> None:
  """Refuse more steps than the state's int32 counts."""
  phases = config.phases
  sizes = phases.batch_sizes if isinstance(phases, cfg.Phases) else ()
  at_most = config.epochs * num_train / min((config.batch_size, *sizes))
  if at_most >= 2**31 - 1:
    raise ConfigError(
      f"Config.epochs={config.epochs}: more steps than an int32 counts, give fewer"
    )


def _check_text(config: cfg.Config, num_train: int) -> None:
  """Refuse examples as long as the text, for which no batch would be small enough."""
  length = getattr(config.data, "sequence_length", None)
  if length is not None and num_train == 1 < config.batch_size:
    raise ConfigError(
      f"data.sequence_length={length}: the training text is not longer and makes one "
      f"example, but a batch has {config.batch_size}; give a smaller length"
    )


def _check_phases(
  config: cfg.Config, phases: Sequence[Phase], num_train: int, num_devices: int
) -> None:
  """Refuse phases whose batches do not fit devices and data, as the first's must."""
  for phase in phases:
    field = "Phases.batch_sizes"
    check_divisible(phase.batch_size, num_devices, phase.accumulate_steps, field)
    if isinstance(config.phases, cfg.Phases):  # or else trials chose the size
      _check_batch(
        phase.batch_size, num_train, num_devices, phase.accumulate_steps, field
      )
    if config.noise_scale and num_devices * phase.accumulate_steps == 1:
      raise ConfigError(
        "Config.noise_scale=True: one device and one micro-batch have no two "
        "gradients to compare, set accumulate_steps to 2 or more (in every phase)"
      )


def _check_batch(
  batch_size: int,
  num_train: int,
  num_devices: int,
  micros: int,
  field: str = "Config.batch_size",
) -> None:
  """Refuse a batch that would have examples twice, or does not divide."""
  if batch_size > num_train:
    # So many micro-batches may belong to so large a batch alone.
    unit = num_devices * (micros if num_devices * micros <= num_train else 1)
    most = num_train // unit * unit
    raise ConfigError(
      f"{field}={batch_size}: a step would see some of the {num_train:,} training "
      "examples twice; "
      + (f"give {most} or less" if most else "use more data or fewer devices")
    )
  check_divisible(batch_size, num_devices, micros, field)


def check_divisible(
  batch_size: int, num_devices: int, micros: int, field: str = "Config.batch_size"
) -> None:
  """Refuse a batch that does not divide over devices and micro-batches."""
  unit = num_devices * micros
  if batch_size % unit:
    below = batch_size // unit * unit
    raise ConfigError(
      f"{field}={batch_size}: not divisible by {num_devices} devices x "
      f"{micros} accumulate_steps; give "
      + (f"{below} or {below + unit}" if below else f"{unit}")
    )


def _phases(
  config: cfg.Config, num_train: int, chosen: Sequence[int]
) -> tuple[Phase, ...]:
  settings = config.phases
  if isinstance(settings, cfg.AdaptiveBatch):
    count = max(-(-config.epochs // settings.every_epochs), 1)
    epochs = [i * settings.every_epochs for i in range(int(count))]
    known = list(chosen) or [config.batch_size]
    sizes = known + [known[-1]] * (len(epochs) - len(known))
    return plan(
      epochs, sizes, [config.accumulate_steps] * len(epochs), [None] * len(epochs),
      total_epochs=config.epochs, num_train=num_train,
    )  # fmt: skip
  n = len(settings.epochs)
  return plan(
    settings.epochs,
    settings.batch_sizes or (config.batch_size,) * n,
    settings.accumulate_steps or (config.accumulate_steps,) * n,
    settings.image_sizes or (None,) * n,
    total_epochs=config.epochs,
    num_train=num_train,
  )
