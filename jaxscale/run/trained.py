"""Trained model of a run: `load` reads it, and `Trained.predict` applies it to new inputs."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import cluster, data, models
from jaxscale import config as cfg
from jaxscale.checkpoint import load_params
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.config.record import Described, describe_run
from jaxscale.errors import ConfigError, invalid
from jaxscale.experiment.loss import loss_state, make_objective
from jaxscale.experiment.make_layout import make_layout
from jaxscale.experiment.model import Model, as_functions, init_fn, make_model
from jaxscale.files import expand
from jaxscale.mesh import batch_axes, host_shard, make_mesh, mesh_shape, replicated, row_blocks
from jaxscale.metrics.log import logger
from jaxscale.parallel import placement, with_gathered_params
from jaxscale.parallel.specs import Layout, replicated_layout
from jaxscale.run import inputs as new_inputs
from jaxscale.run.identity import check_code
from jaxscale.training.custom_loss import LossState, state_of_model


class Predictions(NamedTuple):
  """Predictions of a model, one row per example.

  Attributes:
    outputs: the model's outputs, a tree of NumPy arrays [n, ...].
    probabilities: the probabilities of the classes, float32 [n, classes]; None if the loss is
      not one of classes (`config.Loss.classify`).
    labels: the predicted classes, int32 [n]; bool [n, classes] if an example can have
      several; None without probabilities.
    class_names: the names of the classes in the order of their labels; () without names.
  """

  outputs: Any
  probabilities: np.ndarray | None
  labels: np.ndarray | None
  class_names: tuple[str, ...]

  @property
  def classes(self) -> list[str]:
    """Name of the predicted class of each example; the label itself without a name."""
    if self.labels is None or self.labels.ndim != 1:
      raise ConfigError("Predictions.classes: the examples have no single class; use `labels`")
    names = dict(enumerate(self.class_names))
    return [names.get(label, str(label)) for label in self.labels.tolist()]


@dataclasses.dataclass(frozen=True)
class Trained:
  """Trained model of a run on a mesh; `load` creates it.

  Attributes:
    model: the model as pure functions: `models.ModelFns` or `models.Stack`.
    params: the parameters that the run evaluates: their average if the run keeps one.
    model_state: the model state that belongs to them.
    config: the settings of the run; `config.record.MissingData` and `MissingOptimizer` stand
      for what config.json cannot store.
    classes: the names of the classes in the order of their labels; () without names.
    info: the description of the run's data, `data.DatasetInfo` or `data.TextInfo`.
    step: the step of the checkpoint.
    mesh: the mesh of the parameters, of all devices.
    layout: the layout of the parameters; None means that everything is replicated.
  """

  model: Model
  params: Any = dataclasses.field(repr=False)
  model_state: Any = dataclasses.field(repr=False)
  config: cfg.Config
  classes: tuple[str, ...]
  info: Any
  step: int
  mesh: Mesh = dataclasses.field(repr=False)
  layout: Layout | None = dataclasses.field(repr=False)

  def predict(self, inputs: Any, *, batch_size: int | None = None) -> Predictions:
    """Return the predictions for new inputs, as in an evaluation.

    The devices split the batches. In a run of several processes, all call it with the same
    inputs, and all get all predictions.

    Args:
      inputs: an array [n, ...] as the dataset gives it, e.g. uint8 images of the model's size
        or tokens; a list of image files or of Pillow's images, which are resized and cropped
        as in the run's evaluations; a dict of arrays for a model with several inputs; or the
        path of a folder of images, an image, or a .npy or .npz file.
      batch_size: the number of examples per batch; None uses `evaluation.batch_size`.

    Raises:
      ConfigError: the inputs do not fit the model, or a file is not a readable image.
    """
    dataset = new_inputs.of_inputs(self.config, self.info, inputs)
    # Powers of two, so that a few sizes are compiled and not one for each call.
    size = self.rows(1 << (dataset.num_examples - 1).bit_length(), batch_size)
    batches = data.to_device(self.batches(dataset, size), self.mesh)
    parts = [outputs for outputs, _ in self.run(batches, dataset.num_examples)]
    if dataset.damaged is not None and dataset.damaged.count:
      problem = f"has {dataset.damaged.describe()}"
      raise invalid("inputs", ..., problem, "leave out what is not an image")
    return self.predictions(jax.tree.map(lambda *x: np.concatenate(x), *parts))

  def predictions(self, outputs: Any) -> Predictions:
    """Return outputs with probabilities and classes, where the loss is one of classes."""
    found = self.config.loss.classify(outputs) if isinstance(outputs, np.ndarray) else None
    return Predictions(outputs, *(found or (None, None)), self.classes)

  def rows(self, num_examples: int, batch_size: int | None = None) -> int:
    """Return the rows of a batch as evaluations choose them, for all devices."""
    size = min(batch_size or self.config.evaluation.batch_size, num_examples)
    return -(-size // row_blocks(self.mesh)) * row_blocks(self.mesh)

  def batches(self, dataset: data.Dataset, size: int) -> Iterator[data.dataset.Batch]:
    """Yield this host's rows of each batch of a dataset, loaded by several threads."""
    threads = self.config.input_threads or cluster.share_of_cores()
    return data.eval_batches(dataset, size, shard=host_shard(self.mesh), num_threads=threads)

  def run(
    self, batches: Iterable[dict[str, jax.Array]], num_examples: int
  ) -> Iterator[tuple[Any, Any]]:
    """Yield outputs and "label" (or ()) of each global batch on the host, without padding."""
    waiting: list[Any] = []

    def read() -> tuple[Any, Any]:
      rows, arrays = waiting.pop(0)
      return jax.tree.map(lambda x: np.asarray(x)[:rows], arrays)

    for batch in batches:
      rows = min(num_examples, len(batch.pop("mask")))
      num_examples -= rows
      try:
        waiting.append((rows, self._step(self.params, self.model_state, batch)))
      except (KeyError, ConfigError) as e:
        if not isinstance(cause := e.__cause__ or e, KeyError):
          raise
        problem = f"lack {str(cause.args[0]).splitlines()[0]!r}"
        raise invalid("inputs", [*batch], problem, "give it as well") from None
      if len(waiting) > 1:  # The devices compute while the host reads the batch before.
        yield read()
    while waiting:
      yield read()

  @functools.cached_property
  def _step(self) -> Any:
    """Jitted function (params, model_state, batch) -> (outputs, "label"), replicated."""
    layout, model = self.layout or replicated_layout(self.mesh), as_functions(self.model)

    def function(params: Any, model_state: Any, batch: Any) -> Any:
      return model.apply(params, state_of_model(model_state), model.inputs(batch), False, None)[0]

    if layout.shapes is not None:
      function = with_gathered_params(function, layout.gathers)
    rows = P(batch_axes(self.mesh))
    specs: Any = {"in_specs": (layout.param_specs, P(), rows), "out_specs": rows}

    @jax.shard_map(mesh=self.mesh, **specs)
    def predict(params: Any, model_state: Any, batch: Any) -> Any:
      return function(params, model_state, batch), batch.get("label", ())

    return one_at_a_time(jax.jit(predict, out_shardings=replicated(self.mesh)), self.mesh)


def load(
  run: str | os.PathLike,
  *,
  step: int | str | None = None,
  take: str | None = None,
  model: cfg.Model | None = None,
  trust: bool = False,
) -> Trained:
  """Load the trained model of a run, on all devices.

  The mesh of the run need not fit: batches are split over the devices, and parameters only
  with layout.shard="fsdp". Classes of your own are loaded from the run's folder `code/`, which
  executes it. If other users could have written the run, it is refused without `trust`.

  Args:
    run: the workdir of the run.
    step: the step of the checkpoint; "best" selects the best by `checkpoint.best_metric`, and
      None the newest intact one.
    take: "params" or "average"; None selects the average if the run keeps one, as
      evaluations do.
    model: the settings of the model, for a class that is not in a file (of a notebook, say).
    trust: whether to execute code of the run although other users could have written it.

  Raises:
    ConfigError: the run or the checkpoint does not exist, is damaged, or needs a class that
      cannot be loaded.

  Example:
    >>> trained = load("runs/digits")                          # doctest: +SKIP
    >>> trained.predict(images).labels                         # doctest: +SKIP
    array([3, 8, 5], dtype=int32)
  """
  described = describe_run(expand(run), trust=trust)
  given: Any = {} if model is None else {"model": model}
  try:
    config = described.settings(partial=True, **given)
  except ConfigError as e:
    if given or not re.search(r"'object'|'module'|\w:\w", str(described.config["model"])):
      raise
    raise ConfigError(f"{e}, or use load(run, model=...)") from None
  return of_run(described, config, info_of(described), step=step, take=take)


def of_run(
  described: Described,
  config: cfg.Config,
  info: Any,
  *,
  step: int | str | None = None,
  take: str | None = None,
  rows_only: bool = True,
) -> Trained:
  """Load a checkpoint of a run on all devices of all processes, which all call it.

  Args:
    described: the run.
    config: its settings.
    info: the description of the data.
    step: the step, as for `load`.
    take: the parameters, as for `load`.
    rows_only: split batches over the devices, and nothing but parameters under
      layout.shard="fsdp"; False keeps the run's mesh where the devices allow it.

  Raises:
    ConfigError: the model does not fit the data, the devices or the checkpoint, or the user's
      code is not that of the run.
  """
  check_code(described, config)
  if "replaces" in described.config.get("loss", {}):
    name = type(config.loss).__name__
    logger.warning(f"note: a loss from Python is not stored, so {name} of the config evaluates")
  placed = _placed(config, rows_only)
  mesh = make_mesh(**dataclasses.asdict(placed.mesh))
  model = make_model(placed, info, mesh, train=False)
  layout = make_layout(placed, mesh, model)
  of_loss = loss_state(make_objective(placed, info, as_functions(model), mesh))

  def init(key: Any) -> tuple[Any, Any]:
    params, state = init_fn(model)(key)
    return params, state if of_loss is None else LossState(state, of_loss(params, key))

  shapes, where = models.init_shapes(init), replicated(mesh)
  shardings: Any = jax.tree.map(lambda _: where, shapes)
  if layout is not None and layout.shapes is not None:
    shardings = placement.shardings(layout, layout.param_specs), shardings[1]

  def abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  wanted = jax.tree.map(abstract, shapes, shardings)
  loaded = load_params.load(described.workdir, *wanted, step=step, take=take)
  for note in loaded.notes:
    logger.warning(f"note: {note}")
  state, classes = (loaded.params, loaded.model_state), tuple(getattr(info, "class_names", ()))
  return Trained(model, *state, config, classes, info, loaded.step, mesh, layout)


def _placed(config: cfg.Config, rows_only: bool) -> cfg.Config:
  """Return the settings with the mesh and layout of an evaluation."""
  devices, mesh = jax.device_count(), config.mesh
  layout = dataclasses.replace(config.layout, remat="none", optimizer="device")
  try:
    mesh_shape(devices, **dataclasses.asdict(mesh))
  except ConfigError:
    if not rows_only:
      logger.info(f"the run's mesh does not fit {devices} devices; they split only the batches")
    rows_only = True
  if rows_only:
    # As many devices as in training share the parameters, or a power of two, which divides most.
    size = math.gcd(devices, mesh.fsdp if mesh.fsdp > 0 else devices & -devices)
    is_split = layout.shard == "fsdp" and size > 1
    mesh = cfg.Mesh(fsdp=size) if is_split else cfg.Mesh()
    layout = cfg.Layout(shard="fsdp", rules=layout.rules) if is_split else cfg.Layout()
  # Exchange and synchronization of the training may contradict another mesh.
  parts: Any = {"mesh": mesh, "layout": layout, "exchange": cfg.AllReduce()}
  return dataclasses.replace(config, **parts, sync=cfg.EveryStep())


def info_of(described: Described) -> Any:
  """Return the description of a run's data.

  Raises:
    ConfigError: config.json has other fields than this version.
  """

  def plain(value: Any) -> Any:
    if isinstance(value, dict):
      return {name: plain(part) for name, part in value.items()}
    return tuple(map(plain, value)) if isinstance(value, list) else value

  kind: Any = data.TextInfo if described.is_text else data.DatasetInfo
  try:
    return kind(**{k: plain(v) for k, v in described.data.items() if k in kind._fields})
  except TypeError as e:
    problem = f"its config.json describes the data in another form ({e})"
    raise ConfigError(f"{described.workdir}: {problem}; train it again") from None
