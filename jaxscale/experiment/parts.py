"""From a Config to each part of a run: data, model, schedule, optimizer.

With `derive` and `build` the only modules, beside the command line, that read a
Config: everything below takes plain arguments, and a notebook calls it so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import data, models, optim, weights
from jaxscale.errors import ConfigError
from jaxscale.experiment.derive import Derived
from jaxscale.experiment.phases import Phase, follow_batch_size, within_phase
from jaxscale.mesh import BN_AXIS, BatchNormSpan, batch_norm_span, mesh_shape
from jaxscale.training.state import TrainState
from jaxscale.tree_paths import path_name
from jaxscale.weights.hf_config import check_hf_config


def make_data(config: cfg.Config) -> tuple[data.Dataset, data.Dataset]:
  """The training and the held-out examples."""
  match config.data:
    case cfg.Digits(augment=augment):
      return data.digits("train", augment=augment), data.digits("test")
    case cfg.Synthetic() as d:
      shape = (d.image_size, d.image_size, d.channels)
      make = data.synthetic
      num_eval = max(d.num_examples // 10, 1)
      return (
        make(d.num_examples, shape, d.num_classes),
        make(num_eval, shape, d.num_classes, first=d.num_examples),
      )
    case cfg.Text(sequence_length=length):
      splits = "train", "test"
      train, held_out = (data.text(s, sequence_length=length) for s in splits)
      return train, held_out
    case cfg.TFDSText() | cfg.TextFiles() as d:
      return _text(d, d.train_split), _text(d, d.eval_split)
    case d:
      train = _encoded(d, d.train_split, d.image_size, d.augment)
      return train, _encoded(d, d.eval_split, d.image_size, "none")


def _text(d: cfg.TFDSText | cfg.TextFiles, split: str) -> data.Dataset:
  """A split of text that is not embedded."""
  given = {f.name: getattr(d, f.name) for f in dataclasses.fields(d)}
  options = {n: v for n, v in given.items() if n not in ("train_split", "eval_split")}
  if isinstance(d, cfg.TFDSText):
    return data.tfds_text(options.pop("name"), split, **options)
  return data.text_files(options.pop("path"), split, **options)


def resized_train_data(config: cfg.Config, image_size: int) -> data.Dataset:
  """The training examples at another image size.

  Raises:
    ConfigError: they are not images that can be resized.
  """
  if not isinstance(config.data, (cfg.TFDS, cfg.ImageFolder)):
    is_text = isinstance(config.data, (cfg.Text, cfg.TFDSText, cfg.TextFiles))
    raise ConfigError(
      f"Phases.image_sizes={image_size}: {type(config.data).__name__} has "
      + ("no images" if is_text else "images of one size")
      + ", use TFDS or ImageFolder"
    )
  return _encoded(config.data, config.data.train_split, image_size, config.data.augment)


def _encoded(
  d: cfg.TFDS | cfg.ImageFolder, split: str, image_size: int | None, augment: Any
) -> data.Dataset:
  """A split of encoded images."""
  views = {"image_size": image_size, "augment": augment, "eval_view": d.eval_view}
  if isinstance(d, cfg.TFDS):
    return data.tfds_images(d.name, split, data_dir=d.data_dir, cache=d.cache, **views)
  # Labels are those of training, whichever classes evaluation has.
  classes = data.folder_classes(f"{d.path}/{d.train_split}")
  return data.image_folder(f"{d.path}/{split}", classes=classes, **views)


def bn_span(config: cfg.Config, derived: Derived, phase: Phase) -> BatchNormSpan:
  """How devices share BatchNorm statistics in a phase."""
  span: Any = getattr(config.model, "bn_span", "device")
  if not getattr(config.model, "batch_norm", True):
    span = "device"
  shape = mesh_shape(derived.num_devices, **dataclasses.asdict(config.mesh))
  rows = phase.batch_size // (shape.row_blocks * phase.accumulate_steps)
  found = batch_norm_span(
    span, rows, replica=shape.replica, data=shape.data * shape.fsdp
  )
  if shape.fsdp > 1 and found.axis_name is not None:
    return found._replace(axis_name=(*found.axis_name, "fsdp"))
  return found


def _bn_options(span: BatchNormSpan, mesh: Mesh) -> dict[str, Any]:
  """The fields of a model that say so; another phase may have split the mesh."""
  names = span.axis_name
  if names is not None and "data" in names and BN_AXIS in mesh.axis_names:
    names = (*names, BN_AXIS)
  if span.bn_devices not in (1, mesh.shape.get(BN_AXIS, 1)):
    raise ConfigError(
      f"bn_span: the phases' batch sizes ask for statistics over {span.bn_devices} "
      f"and over {mesh.shape.get(BN_AXIS, 1)} devices; choose batch sizes for which "
      "it is one number, or 1"
    )
  return {"bn_axis_name": names, "bn_group_size": span.group_size}


def make_model(
  config: cfg.Config,
  info: data.DatasetInfo | data.TextInfo,
  mesh: Mesh,
  span: BatchNormSpan,
  *,
  train: bool = True,
) -> models.ModelFns | models.Stack:
  """The model as pure functions; `span` as from `bn_span`, `train` as of `make_stack`.

  Raises:
    ConfigError: it does not fit the images, or is not for such data.
  """
  if isinstance(config.model, (cfg.Transformer, cfg.ViT)):
    return make_stack(config, info, train=train)
  if isinstance(info, data.TextInfo):
    raise ConfigError(
      f"Config.model={type(config.model).__name__}: a model of images, and "
      f"{type(config.data).__name__} is text; use Transformer, or other data"
    )
  bn = _bn_options(span, mesh)
  common = {"num_classes": info.num_classes, "dtype": jnp.dtype(config.dtype)}
  match config.model:
    case cfg.MLP(hidden=hidden):
      module = models.MLPModule(hidden=hidden, **common)
    case cfg.CNN() as m:
      if min(info.image_shape[:2]) >> len(m.features) == 0:
        raise ConfigError(
          f"CNN.features={m.features}: {len(m.features)} stages halve images of "
          f"{info.image_shape[0]} pixels to nothing, give fewer"
        )
      module = models.CNNModule(
        features=m.features,
        convs_per_stage=m.convs_per_stage,
        dense=m.dense,
        batch_norm=m.batch_norm,
        dropout=m.dropout,
        **bn,
        **common,
      )
    case cfg.AlexNet() as m:
      module = models.AlexNetModule(
        batch_norm=m.batch_norm, dropout=m.dropout, **bn, **common
      )
      # Caffe's files subtract the mean, and with BatchNorm divide by 256.
      info = info._replace(std=(256.0,) if m.batch_norm else (1.0,))
    case cfg.ResNet() as m:
      module = models.make_resnet(
        m.depth,
        width=m.width,
        stem=m.stem,
        bn_momentum=m.bn_momentum,
        bn_epsilon=m.bn_epsilon,
        zero_init_residual=m.zero_init_residual,
        **bn,
        **common,
      )
  return models.functions(module, info.image_shape, mean=info.mean, std=info.std)


def make_stack(
  config: cfg.Config, info: data.DatasetInfo | data.TextInfo, *, train: bool = True
) -> models.Stack:
  """The model as a stack of layers, for a Transformer or ViT.

  Args:
    config: whose model is one of them.
    info: of the data.
    train: with what only training has, the smoothing of labels.

  Raises:
    ConfigError: the model is not for such data, or does not fit it.
  """
  m, kind = config.model, type(config.model).__name__
  common = {
    "label_smoothing": config.label_smoothing if train else 0.0,
    "dtype": jnp.dtype(config.dtype),
  }
  is_text = isinstance(info, data.TextInfo)
  if is_text != isinstance(m, cfg.Transformer):
    other = "Transformer" if is_text else "ViT or ResNet"
    raise ConfigError(
      f"Config.model={kind}: {info.name} has {'text' if is_text else 'images'}, give "
      f"{other}, or other data"
    )
  if isinstance(info, data.TextInfo):
    assert isinstance(m, cfg.Transformer)
    options = dataclasses.asdict(m)
    if m.hidden is None:
      options["hidden"] = -(-8 * m.width // (3 * 256)) * 256
    return models.make_transformer(vocab_size=info.vocab_size, **common, **options)
  assert isinstance(m, cfg.ViT), "the other models are Flax modules: make_model"
  if info.image_shape[0] % m.patch or info.image_shape[1] % m.patch:
    raise ConfigError(
      f"ViT.patch={m.patch}: does not divide the {info.image_shape[0]}x"
      f"{info.image_shape[1]} pixels of {info.name}, give a divisor"
    )
  return models.make_vit(
    image_shape=info.image_shape,
    num_classes=info.num_classes,
    mean=info.mean,
    std=info.std,
    **common,
    **dataclasses.asdict(m),
  )


def imported(
  config: cfg.Config, num_classes: int, abstract: TrainState, say: Callable[[str], None]
) -> dict[str, jax.Array]:
  """The parameters of `Config.init_from`, as `init_state` takes them.

  Args:
    config: of the run.
    num_classes: of its data; models may have more for even parts.
    abstract: where the parameters are to lie.
    say: is told what they are.
  """
  path = config.init_from
  assert path is not None
  heads = {"num_classes": num_classes, "init_head": config.init_head}
  length = getattr(config.data, "sequence_length", None)
  found = weights.import_safetensors(
    path,
    abstract.params,
    abstract.model_state,
    **heads,
    # Before shapes: it says which setting is another.
    check=lambda naming, names: check_hf_config(
      path, naming, names, config.model, sequence_length=length, **heads
    ),
  )
  say(found.summary)
  leaves = jax.tree.leaves_with_path((found.params, found.model_state))
  return {path_name(p): x for p, x in leaves if isinstance(x, jax.Array)}


def make_schedule(config: cfg.Config, derived: Derived) -> optax.Schedule:
  """Step, of Config.batch_size examples -> learning rate."""
  s, peak, warmup = config.schedule, derived.peak_lr, derived.warmup_steps
  per_epoch = derived.num_train / config.batch_size
  total = max(math.ceil(config.epochs * per_epoch), 1)
  rise = {"warmup": s.warmup, "start": s.warmup_lr} if warmup else {}
  if warmup and s.warmup_lr > peak:
    raise ConfigError(
      f"{type(s).__name__}.warmup_lr={s.warmup_lr}: above the peak of {peak:.6g} "
      "that the warm-up leads to, give less"
    )
  match s:
    # Polynomial before Cosine, whose fields it extends.
    case cfg.Polynomial():
      decay = None if s.decay_epochs is None else s.decay_epochs * per_epoch
      return optim.warmup_polynomial(
        peak, warmup, total, end=s.end_lr, power=s.power, restart=s.restart,
        decay_steps=decay, **rise,
      )  # fmt: skip
    case cfg.Cosine():
      return optim.warmup_cosine(peak, warmup, total, end=s.end_lr, **rise)
    case cfg.Steps():
      boundaries = [round(epoch * per_epoch) for epoch in s.boundaries]
      return optim.warmup_steps(peak, warmup, boundaries, factor=s.factor, **rise)


def phase_rate(config: cfg.Config, phase: Phase) -> tuple[float, float | None]:
  """(factor of the learning rate, momentum or None) in a phase."""
  settings = config.phases
  rule = "neutral" if isinstance(settings, cfg.AdaptiveBatch) else settings.follow
  momentum = getattr(config.optimizer, "momentum", None)
  factor, new = follow_batch_size(
    rule, phase.batch_size, config.batch_size, momentum or 0.0
  )
  return factor, None if momentum is None else new


def phase_schedule(
  config: cfg.Config, derived: Derived, phase: Phase
) -> optax.Schedule:
  """Step of the run -> learning rate, inside a phase."""
  schedule = make_schedule(config, derived)
  if len(derived.phases) == 1:
    return schedule
  return within_phase(schedule, phase, config.batch_size, phase_rate(config, phase)[0])


def make_optimizer(
  config: cfg.Config,
  schedule: optax.Schedule,
  warmup_steps: int,
  momentum: float | None,
) -> optax.GradientTransformation:
  """Clip by the global norm, optimize, and let lower layers move less."""
  settings = dataclasses.asdict(config.optimizer)
  del settings["lr"]  # the schedule has it
  if momentum is not None:
    settings["momentum"] = momentum
  if "momentum_correction" in settings:
    correct = {"never": False, "warmup": warmup_steps, "always": True}
    settings["momentum_correction"] = correct[settings["momentum_correction"]]
  if "include" in settings:
    masks = {"kernels": optim.kernels, "all": None}
    include = settings.pop("include")
    settings["mask"] = masks[include] if include in masks else optim.matching(include)
  make: Any = getattr(optim, type(config.optimizer).__name__.lower())
  if isinstance(config.model, (cfg.Transformer, cfg.ViT)):
    settings["stacked"] = optim.matching("^layers/")
    if isinstance(config.optimizer, cfg.Muon):
      settings["by_adam"] = optim.matching("^(embed|head)/")
  chain = [make(schedule, **settings)]
  if config.clip_norm is not None:
    chain.insert(0, optax.clip_by_global_norm(config.clip_norm))
  if config.layer_decay is not None:
    chain.append(optim.layerwise_rate_decay(config.layer_decay, config.layer_order))
  return optax.chain(*chain)
