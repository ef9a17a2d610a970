"""Samples of a model at each evaluation: classified images, or continued prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale import cluster, data
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.config import CallbackContext
from jaxscale.errors import invalid
from jaxscale.experiment.model import as_functions
from jaxscale.files import output_path, replace_text
from jaxscale.mesh import replicated
from jaxscale.metrics.log import logger
from jaxscale.metrics.plot import POINTS, check_matplotlib, figure
from jaxscale.run import generate
from jaxscale.run.callbacks import Callback
from jaxscale.training.custom_loss import state_of_model
from jaxscale.training.types import TrainState

# Given a state: a function that writes the samples to a path without its suffix. All
# processes make the samples, and process 0 writes them.
_Sampler = Callable[[TrainState], Callable[[Path], None]]


def write_samples(
  context: CallbackContext, *, count: int, prompts: Sequence[str], **choice: Any
) -> Callback:
  """Return the callback of `config.SampleWriter`, which documents the arguments.

  Raises:
    ConfigError: the data are neither images with classes nor text with a tokenizer.
  """
  info, folder = context.eval_data.info, context.workdir / "samples"
  if isinstance(info, data.TextInfo):
    sampler = _texts(context, prompts, **choice)
  elif len(getattr(info, "image_shape", None) or ()) == 3 and info.label_shape == ():
    check_matplotlib("SampleWriter", ...)
    sampler = _images(context, count)
  else:
    problem = f"cannot show {info.name}, which has neither images with classes nor text"
    raise invalid("SampleWriter", ..., problem, "remove it from Config.callbacks")

  def on_evaluation(step: int, state: TrainState, values: dict[str, float]) -> None:
    write = sampler(state)
    if cluster.is_leader():
      try:
        write(output_path(folder / f"{step:06}"))
      except OSError as e:
        logger.warning(f"{folder}: {e.strerror}; training continues without these samples")

  return Callback(on_evaluation=on_evaluation)


def _images(context: CallbackContext, count: int) -> _Sampler:
  """Sample a grid of the first validation images; wrong predictions have red titles."""
  dataset, model, mesh = context.eval_data, as_functions(context.model), context.mesh
  batch = dataset.load(np.arange(min(count, dataset.num_examples)), None)
  names = dict(enumerate(dataset.info.class_names))
  shown = np.asarray(batch["image"], np.float32)
  shown = (shown - shown.min()) / max(np.ptp(shown), 1e-9)
  columns = math.ceil(math.sqrt(len(shown)))
  rows = math.ceil(len(shown) / columns)

  def predict(params: Any, model_state: Any, batch: Any) -> jax.Array:
    outputs, _ = model.apply(params, state_of_model(model_state), model.inputs(batch), False, None)
    if getattr(outputs, "ndim", 0) != 2:
      fix = "remove it from Config.callbacks"
      raise invalid("SampleWriter", ..., "needs a model with outputs [rows, classes]", fix)
    return outputs.argmax(-1)

  predictor = one_at_a_time(jax.jit(predict, out_shardings=replicated(mesh)), mesh)

  def sample(state: TrainState) -> Callable[[Path], None]:
    classes = np.asarray(predictor(*state.evaluated(), batch)).tolist()

    def write(path: Path) -> None:
      with figure(f"{path}.png", rows, columns, (1.3 * columns, 1.5 * rows)) as axes:
        for axis in axes.flat:
          axis.set_axis_off()
        labels = batch["label"].tolist()
        for axis, image, label, found in zip(axes.flat, shown, labels, classes, strict=False):
          axis.imshow(image[..., 0] if image.shape[-1] == 1 else image[..., :3], cmap="gray")
          texts = [str(names.get(i, i)) for i in (label, found)]
          title = dict(color="black") if label == found else dict(color=POINTS)
          axis.set_title(", not ".join(dict.fromkeys(texts)), fontsize=7, **title)

    return write

  return sample


def _texts(context: CallbackContext, prompts: Sequence[str], **choice: Any) -> _Sampler:
  """Sample a continuation of each prompt, of the same random numbers at each evaluation."""
  config, sharding = context.config, replicated(context.mesh)
  tokenizer = generate.run_tokenizer(context.workdir, config.data, context.eval_data.info)
  text_of = generate.continuer(context.model, tokenizer, sharding, **choice)

  def sample(state: TrainState) -> Callable[[Path], None]:
    params, _ = state.evaluated()
    texts = [p + text_of(params, p, config.seed + i) for i, p in enumerate(prompts)]
    return lambda path: replace_text(path.with_suffix(".txt"), "\n\n".join(texts) + "\n")

  return sample
