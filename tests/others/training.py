"""Training there and here: optimizers of PyTorch and timm, and timm's own recipe.

The recipe: small networks of timm with random weights, its optimizer factory, schedule
and label smoothing, 20 steps. Here the same weights from a safetensors file, and a
`Config`, on the same batches. The ViT is in float64: in float32 the sign of a gradient
near 0 is a matter of rounding, and Adam's first steps are signs. Our ResNet has
BatchNorm in float32 alone.
"""

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment.build import experiment
from jaxscale.mesh import batch_sharding
from others.packages import timm, torch
from support.optimizers import optimize64
from support.torch_optimizers import CASES, layers, theirs

STEPS, ROWS, CLASSES, SIZE = 20, 32, 5, 32
EPOCH = 5 * ROWS  # images: five steps
MEAN, STD = 128.0, 64.0  # so that normalising is exact
SMOOTHING, WARMUP_LR = 0.1, 1e-4


class InFloat64(cfg.Model):
  """A stack whose activations are float64.

  Attributes:
    model: of activations of any type.
  """

  model: cfg.ViT

  is_stack = True

  def build(self, context):
    return self.model.build(context._replace(dtype=jnp.float64))


def vit():
  made = timm.models.vision_transformer.VisionTransformer(
    img_size=SIZE, patch_size=8, num_classes=CLASSES, embed_dim=32, depth=2, num_heads=2
  )
  torch.nn.init.normal_(made.pos_embed, std=0.5)  # whose decay counts
  ours = cfg.ViT(patch=8, width=32, num_layers=2, num_heads=2)
  return made, InFloat64(model=ours)


def resnet():
  made = timm.create_model("resnet18", num_classes=CLASSES)
  return made, cfg.ResNet(depth=18)


# The network, timm's name of the optimizer, settings of both, and ours. LAMB is not of
# the ViT: timm has one trust ratio for queries, keys and values together. Its eps is
# larger than timm's default for the reason above.
ADAMW = "adamw", dict(lr=5e-3, weight_decay=0.3), cfg.AdamW(lr=1)
SGD = "sgd", dict(lr=1e-2, weight_decay=0.01, momentum=0.9), cfg.SGD(lr=1)
LAMB = ("lamb", dict(lr=2e-3, weight_decay=0.02, eps=1e-3), cfg.LAMB(lr=1, variant="timm"))
RECIPES = {
  "ViT by timm's AdamW": (vit, *ADAMW),
  "ResNet-18 by timm's LAMB": (resnet, *LAMB),
  "ResNet-18 by timm's SGD": (resnet, *SGD),
}


def batches():
  """Images uint8 [steps, rows, h, w, 3] that show their labels."""
  rng = np.random.default_rng(0)
  labels = rng.integers(0, CLASSES, (STEPS, ROWS))
  centres = rng.uniform(60, 190, (CLASSES, SIZE, SIZE, 3))
  noise = rng.normal(0, 40, (STEPS, ROWS, SIZE, SIZE, 3))
  images = (centres[labels] + noise).clip(0, 255).astype(np.uint8)
  return images, labels.astype(np.int32)


def losses_of_timm(model, opt, options):
  """Train as timm's train.py: a schedule by updates, without an average of the model."""
  from timm import loss, optim, scheduler

  made = optim.create_optimizer_v2(model, opt=opt, **options)
  epochs = STEPS * ROWS // EPOCH
  steps = dict(step_on_epochs=False, updates_per_epoch=EPOCH // ROWS)
  warmup = dict(warmup_epochs=1, warmup_lr=WARMUP_LR)
  schedule, _ = scheduler.create_scheduler_v2(
    made, sched="cosine", num_epochs=epochs, **warmup, **steps
  )
  dtype = next(model.parameters()).dtype
  objective = loss.LabelSmoothingCrossEntropy(SMOOTHING)
  model.train()
  found = []
  for update, (images, labels) in enumerate(zip(*batches(), strict=True), 1):
    seen = (torch.tensor(images).to(dtype).permute(0, 3, 1, 2) - MEAN) / STD
    value = objective(model(seen), torch.tensor(labels).long())
    made.zero_grad()
    value.backward()
    made.step()
    schedule.step_update(update)
    found.append(value.item())
  return found


def losses_of_ours(path, model, optimizer):
  images, labels = batches()
  first = dict(x=images.reshape(-1, SIZE, SIZE, 3)[:EPOCH], y=labels.reshape(-1)[:EPOCH])
  held_out = dict(x_eval=images[0], y_eval=labels[0])
  shown = data.Arrays(**first, **held_out, num_classes=CLASSES, mean=(MEAN,), std=(STD,))
  loss = cfg.CrossEntropy(label_smoothing=SMOOTHING)
  schedule = cfg.Cosine(warmup_epochs=1, warmup_lr=WARMUP_LR, restart=False)
  parts = dict(model=model, data=shown, optimizer=optimizer, loss=loss, schedule=schedule)
  epochs = STEPS * ROWS / EPOCH
  config = cfg.Config(batch_size=ROWS, epochs=epochs, init_from=str(path), **parts)
  made = experiment(config, devices=jax.devices()[:1])
  state, found = made.init_state(), []
  if jax.config.jax_enable_x64:
    params = jax.tree.map(lambda w: w.astype(jnp.float64), state.params)
    state = state._replace(params=params, opt_state=made.tx.init(params))
  for x, y in zip(images, labels, strict=True):
    batch = jax.device_put({"image": x, "label": y}, batch_sharding(made.mesh))
    state, metrics = made.train_step(state, batch)
    found.append(float(metrics["loss"]))
  return found


@functools.cache
def losses(name):
  """(ours, timm's) of 20 steps, by a name in `RECIPES`."""
  make, opt, options, chosen = RECIPES[name]
  torch.manual_seed(0)
  model, ours = make()
  is_vit = make is vit
  optimizer = dataclasses.replace(chosen, include="timm", **options)
  promotion = jax.numpy_dtype_promotion("standard" if is_vit else "strict")
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "model.safetensors")
    save_file({n: w.numpy() for n, w in model.state_dict().items()}, path)
    wanted = losses_of_timm(model.double() if is_vit else model, opt, options)
    with jax.enable_x64(is_vit), promotion:
      got = losses_of_ours(path, ours, optimizer)
  return np.array(got), np.array(wanted)


@contextlib.contextmanager
def without_bfloat16():
  """PyTorch without its cast to bfloat16, which Muon's iteration has, and no other."""
  # PyTorch 2.13 casts by the method, 2.15 by the type.
  with (
    mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone),
    mock.patch.object(torch, "bfloat16", torch.float64),
  ):
    yield


def ours(tx):
  """Weights after five steps in float64."""
  params, grads = layers()
  return optimize64(tx._replace(update=jax.jit(tx.update)), params, grads)


@functools.cache
def weights(name):
  """(ours, theirs) after five steps in float64, by a name in `CASES`."""
  with without_bfloat16():
    return ours(CASES[name].ours), theirs(CASES[name])


def differences():
  """Return the largest difference of losses and of weights, by comparison."""
  found = {f"{n}, 20 losses": np.abs(np.subtract(*losses(n))).max() for n in RECIPES}
  for name, case in CASES.items():
    got, wanted = weights(name)
    package = case.factory.partition(".")[0]
    cast = ", not cast to bfloat16" if package == "torch" else ""
    row = f"{package}'s {name}, weights after 5 steps in float64{cast}"
    found[row] = max(np.abs(got[layer] - wanted[layer]).max() for layer in got)
  return found
