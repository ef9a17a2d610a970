"""Numbers that follow from the settings, the data and the number of devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.errors import invalid
from jaxscale.experiment.microbatches import bn_span_of, over_devices
from jaxscale.experiment.own_classes import build, guarded
from jaxscale.experiment.phases import Phase, plan
from jaxscale.mesh import mesh_shape
from jaxscale.metrics.text import listed, plural


class Derived(NamedTuple):
  """Numbers that follow from a `Config`, the data and the devices.

  Attributes:
    num_train: number of training examples.
    num_eval: number of validation examples.
    total_steps: optimizer steps of the run.
    warmup_steps: steps of the warm-up, in steps of Config.batch_size.
    peak_lr: learning rate at the end of the warm-up, at Config.batch_size.
    eval_every: steps between evaluations (in the first phase).
    save_every: steps between checkpoints (in the first phase).
    num_devices: number of devices of all processes.
    row_blocks: number of parts into which the devices split the rows of a batch.
    start_devices: number of devices of all processes when the run started. On fewer
      devices a step has more micro-batches, so that none is larger (microbatches.py).
    device_batch_size: examples per device and step (in the first phase).
    micro_batch_size: examples per device and micro-batch (in the first phase).
    eval_batch_size: examples of all devices per evaluation step, at most the number of
      validation examples, rounded up to a multiple of the row blocks.
    phases: phases of the run; a single one unless batch or image sizes change.
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
  """Compute the numbers that follow from the settings.

  Args:
    config: the settings.
    num_train: number of training examples.
    num_eval: number of validation examples.
    num_devices: number of devices of all processes.
    chosen: batch sizes that an adaptive run has chosen so far, one per phase.
    start_devices: number of devices of all processes when the run started; None means that the run
      starts now.

  Raises:
    ConfigError: a batch cannot be divided over devices and micro-batches, or is larger
      than the training set; a text has only one example; or the run has too many steps.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> config = load_config("configs/digits.py")
    >>> derive(config, 1437, 360, 2, start_devices=8).phases[0].accumulate_steps
    4
  """
  start = start_devices or num_devices
  # Errors of the mesh are reported by make_mesh.
  shape = mesh_shape(num_devices, **dataclasses.asdict(config.mesh))
  blocks, each = shape.row_blocks, shape.stage * shape.model
  start_blocks = max(start // each, 1)
  sizes = config.batch_size, *getattr(config.phases, "batch_sizes", ())
  for unit in ("epochs", "steps"):
    length = getattr(config, unit) or 0
    steps = length * num_train / min(sizes) if unit == "epochs" else length
    if steps >= 2**31 - 1:
      problem = "has more steps than an int32 can count"
      raise invalid(f"Config.{unit}", length, problem, "give fewer")
  length = getattr(config.data, "sequence_length", None)
  if length is not None and num_train == 1 < config.batch_size:
    # A smaller batch size would not help.
    problem = f"gives one training example, but a batch needs {config.batch_size}"
    raise invalid("data.sequence_length", length, problem, "give more text or a smaller length")
  size, num_microbatches, lr = config.batch_size, config.accumulate_steps, config.optimizer.lr
  _check_batch("Config.batch_size", size, num_train, start_blocks, num_microbatches)
  warmup_steps, unit = config.schedule.warmup_steps, "steps"
  if warmup_steps is None:
    warmup_steps = round(config.schedule.warmup_epochs * num_train / size)
    unit = "epochs"
  phases = _phases(config, num_train, chosen, warmup_steps)
  check_phases(config, phases, num_train, start_blocks)
  phases = over_devices(config, phases, blocks, start_blocks)
  if warmup_steps >= schedule_steps(config, phases, num_train) > 1:
    value = getattr(config.schedule, f"warmup_{unit}")
    problem = f"takes {warmup_steps} of the run's {phases[-1].stop} steps"
    raise invalid(f"schedule.warmup_{unit}", value, problem, "make it shorter")
  first, reference = phases[0], config.lr_reference_batch_size
  return Derived(
    num_train=num_train,
    num_eval=num_eval,
    total_steps=phases[-1].stop,
    warmup_steps=warmup_steps,
    peak_lr=optim.scale_learning_rate(lr, size, reference, config.lr_scaling),
    eval_every=interval(config.evaluation, num_train, first),
    save_every=interval(config.checkpoint, num_train, first),
    num_devices=num_devices,
    row_blocks=blocks,
    start_devices=start,
    device_batch_size=first.batch_size // blocks,
    micro_batch_size=first.batch_size // (blocks * first.accumulate_steps),
    eval_batch_size=-(-min(config.evaluation.batch_size, num_eval) // blocks) * blocks,
    phases=phases,
  )


def interval(settings: cfg.Evaluation | cfg.Checkpoint, num_train: int, phase: Phase) -> int:
  """Return a phase's steps between evaluations or checkpoints, at least 1."""
  if settings.every_steps is not None:
    return settings.every_steps
  assert settings.every_epochs is not None  # checked by Config
  return max(round(settings.every_epochs * num_train / phase.batch_size), 1)


def schedule_steps(config: cfg.Config, phases: Sequence[Phase], num_train: int) -> float:
  """Return the length of the run in steps of Config.batch_size, the unit of schedules."""
  if config.epochs is not None:
    return config.epochs * num_train / config.batch_size
  last = phases[-1]
  examples = last.examples + (last.stop - last.start) * last.batch_size
  return examples / config.batch_size


def check_phases(
  config: cfg.Config, phases: Sequence[Phase], num_train: int, num_devices: int
) -> None:
  """Raise if the batch of a phase does not fit the devices and the data."""
  for phase in phases:
    size, num_microbatches = phase.batch_size, phase.accumulate_steps
    most = size if isinstance(config.phases, cfg.AdaptiveBatch) else num_train  # trials check
    _check_batch("Phases.batch_sizes", size, most, num_devices, num_microbatches)
    if config.noise_scale and num_devices * num_microbatches == 1:
      problem = "needs two gradients per step, but one device has one micro-batch"
      fix = "set accumulate_steps to 2 or more (in every phase)"
      raise invalid("Config.noise_scale", True, problem, fix)


def _check_batch(
  field: str, batch_size: int, num_train: int, num_devices: int, num_microbatches: int
) -> None:
  """Raise if a batch is larger than the training set or cannot be divided."""
  unit = num_devices * num_microbatches
  if batch_size > num_train:
    # A smaller batch may be used with fewer micro-batches.
    unit = unit if unit <= num_train else num_devices
    most, problem = num_train // unit * unit, f"is larger than the {num_train:,} training examples"
    fix = f"give {most} or less" if most else "use more data or fewer devices"
    raise invalid(field, batch_size, problem, fix)
  if batch_size % unit:
    below = batch_size // unit * unit
    problem = f"is not divisible by {num_devices} devices x {num_microbatches} accumulate_steps"
    raise invalid(field, batch_size, problem, f"give {f'{below} or ' * bool(below)}{below + unit}")


def build_schedule(config: cfg.Config, peak_lr: float, context: cfg.ScheduleContext) -> Any:
  """Return the schedule of a config: step of Config.batch_size examples -> learning rate."""
  expected = "a function of the step"
  schedule = build(config.schedule, peak_lr, context, kind=callable, expected=expected)
  return guarded(config.schedule, " (schedule)", schedule)


def growth_points(config: cfg.Config, num_train: int, warmup_steps: int) -> list[float]:
  """Return the numbers of examples after which a growing batch may grow.

  Raises:
    ConfigError: the rule does not fit the schedule, or is not a valid one of the user.
  """
  settings, size = config.phases, config.batch_size
  assert isinstance(settings, cfg.Growing) and config.epochs is not None  # checked by Config
  total = config.epochs * num_train

  def rates() -> np.ndarray:
    steps = max(math.ceil(total / size), 1)
    context = cfg.ScheduleContext(steps, warmup_steps, num_train / size)
    schedule = build_schedule(config, 1.0, context)
    return np.asarray(jax.vmap(schedule)(jnp.arange(steps + 1)), np.float32)

  context = cfg.GrowthContext(size, settings.factor, num_train, total, rates)
  points = [*build(settings.when, context, kind=_are_numbers, expected="a tuple of numbers")]
  is_empty = not points or points[0] >= total or next_size(config, size, num_train) is None
  if is_empty or points != sorted({*points}) or points[0] <= 0:
    most = min(settings.max_batch_size or num_train, num_train)
    problem = f"never grows: it may grow after {points} of {total:,.0f} examples, to {most:,}"
    fix = "give positive, increasing points before the end, and a larger max_batch_size"
    raise invalid("Growing.when", type(settings.when).__name__, problem, fix)
  return points


def _are_numbers(xs: Any) -> bool:
  return isinstance(xs, tuple | list) and all(isinstance(x, Real) and math.isfinite(x) for x in xs)


def next_size(config: cfg.Config, batch_size: int, num_train: int) -> int | None:
  """Return the batch size after a growth; None if it would be above the largest."""
  assert isinstance(config.phases, cfg.Growing)
  larger = batch_size * config.phases.factor
  return larger if larger <= min(config.phases.max_batch_size or num_train, num_train) else None


def all_sizes(config: cfg.Config, num_train: int) -> list[int]:
  """Return the batch sizes of a batch that grows as often as it can."""
  sizes = [config.batch_size]
  while larger := next_size(config, sizes[-1], num_train):
    sizes.append(larger)
  return sizes


def _phases(
  config: cfg.Config, num_train: int, chosen: Sequence[int], warmup_steps: int
) -> tuple[Phase, ...]:
  settings, total, size = config.phases, config.epochs, config.batch_size
  if isinstance(settings, cfg.Phases):
    starts = settings.starts
    counts = settings.accumulate_steps or [config.accumulate_steps] * len(starts)
    images = settings.image_sizes or [None] * len(starts)
    sizes = settings.batch_sizes or [size] * len(starts)
    limits: Any = {"total_epochs": total, "total_steps": config.steps}
    in_steps = bool(settings.steps)
    return plan(starts, sizes, counts, images, num_train=num_train, in_steps=in_steps, **limits)
  assert total is not None  # checked by Config
  if isinstance(settings, cfg.AdaptiveBatch):
    each = settings.every_epochs
    points = [i * each * num_train for i in range(1, max(math.ceil(total / each), 1))]
    return _grown(config, total * num_train, points, [*chosen] or [size])
  points = growth_points(config, num_train, warmup_steps)
  sizes = [*chosen] or [size] if settings.when.decide else all_sizes(config, num_train)
  is_open = next_size(config, sizes[-1], num_train) is not None
  return _grown(config, total * num_train, points, sizes, is_open)


def _grown(
  config: cfg.Config, total: float, points: Sequence[float], sizes: list[int], is_open: bool = True
) -> tuple[Phase, ...]:
  """Return the phases of a run whose batch size may change after `points` examples.

  Phases of equal size are joined, so that they share a compiled step.

  Args:
    config: the settings.
    total: the length of the run in examples.
    points: the numbers of examples after which the size may change.
    sizes: the size from the start and from each point on, as far as it is known.
    is_open: whether the size after the next point, if there is one, is still to be decided; the
      last phase then begins there, with the size before.
  """
  known = [*zip([0.0, *points], sizes, strict=False)]
  parts = [x for i, x in enumerate(known) if i == 0 or x[1] != known[i - 1][1]]
  if is_open := is_open and len(known) <= len(points):
    parts.append((points[len(known) - 1], known[-1][1]))
  starts, sizes = map(list, zip(*parts, strict=True))
  counts, settings = [config.accumulate_steps] * len(sizes), config.phases
  if isinstance(settings, cfg.Growing):
    counts = [settings.micro_batches(size, config) for size in sizes]
  phases = plan(starts, sizes, counts, [None] * len(sizes), num_train=1, total_epochs=total)
  is_open = is_open and phases[-1].ordinal == len(parts) - 1
  return (*phases[:-1], phases[-1]._replace(is_decided=not is_open))


def device_summary(config: cfg.Config, derived: Derived) -> str | None:
  """Return a log line if the run started on a different number of devices.

  For example "8 devices, 16 at the start: 2 micro-batches per step instead of 1, so
  that a device still holds 64 examples at a time; the global batch and the order of
  examples stay the same".
  """
  each = derived.num_devices // derived.row_blocks  # devices that share their rows
  num_blocks, start = derived.row_blocks, max(derived.start_devices // each, 1)
  if num_blocks == start:
    return None
  phases, usual = derived.phases, config.accumulate_steps
  asked = getattr(config.phases, "accumulate_steps", ())
  then = [asked[phase.ordinal] if asked else usual for phase in phases]
  if isinstance(config.phases, cfg.Growing):
    then = [config.phases.micro_batches(phase.batch_size, config) for phase in phases]
  now = [phase.accumulate_steps for phase in phases]
  before, rows = (
    [s.batch_size // (n * m) for s, m in zip(phases, counts, strict=True)]
    for n, counts in ((start, then), (num_blocks, now))
  )
  per_step = f"{_each(now)} micro-batch{'es' * (_each(now) != '1')} per step"
  per_step += ", as before" if then == now else f" instead of {_each(then)}"
  if rows == before:
    held = f"so that a device still holds {_each(rows)} examples at a time"
  else:
    held = f"a device holds {_each(rows)} examples at a time, {_each(before)} before"
  text = (
    f"{plural(num_blocks, 'device')}, {start} at the start: {per_step}, {held}; "
    "the global batch and the order of examples stay the same"
  )
  if bn_span_of(config) == "device" and {*before} != {*rows}:
    text += "; BatchNorm statistics now cover a different number of examples"
  return text


def _each(values: Sequence[int]) -> str:
  """Format the values of all phases, or a single value if they are equal."""
  return listed(f"{v:,}" for v in (values if len(set(values)) > 1 else values[:1]))
