"""Recipes are those of their sources: numbers, schedules, optimizers.

Every number here is from the source that is named next to it, never from the config.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config as cfg
from jaxscale import models, optim
from jaxscale.config.loading import load_config
from jaxscale.experiment.derive import derive
from jaxscale.experiment.optimizer import make_optimizer, make_schedule
from support.configs import small_config

NUM_TRAIN = 1_281_167  # ImageNet-1k


class Recipe(NamedTuple):
  """Numbers of a recipe in its source."""

  optimizer: str
  lr: float
  momentum: float | tuple  # (b1, b2, eps) of LAMB
  weight_decay: float
  include: str
  batch: int
  steps: int  # of the run, of ImageNet-1k's size
  warmup: int  # steps
  span: int
  clip: float | None
  smoothing: float
  end: float | None  # None: steps, that have no end rate


# Intel Caffe 44d53638, multinode/alexnet_bn_64nodes: solver.prototxt, and 512
# examples per node, over which its BatchNorm goes.
ALEXNET = Recipe("LARS", 32, 0.9, 5e-4, "all", 32768, 4000, 400, 512, None, 0.0, 0.0)
# fastalgo/imagenet_resnet50_lamb: run.sh (3519 steps, 782 of warm-up, rate 0.04,
# decay 1.5, smoothing 0.1), optimization.py (clip 1.0; only BatchNorm is left out;
# b1 0.9, b2 0.999, eps 1e-6), 256 cores of 128 examples.
RELEASED = "kernel$|^Dense_0/bias$"
ADAM = 0.9, 0.999, 1e-6
LAMB = Recipe("LAMB", 0.04, ADAM, 1.5, RELEASED, 32768, 3519, 782, 128, 1.0, 0.1, 0.0)
# arXiv:2102.06356, as recalled; 64 examples: virtual_batch_size of init2winit's
# mlperf_resnet.
NESTEROV = Recipe("SGD", 7.05, 0.976, 5.8e-5, "kernels", 32768, 2512, 638, 64, None, 0.15, 1e-4)
# arXiv:1706.02677, §3.3 and §5.1: 90 and 5 epochs (14,075 and 780 steps in Intel
# Caffe's default_resnet50_64nodes), 32 images per worker.
GOYAL = Recipe("SGD", 0.1, 0.9, 1e-4, "kernels", 8192, 14076, 782, 32, None, 0.0, None)
# The same numbers; IBM's 20 images on each of 256 GPUs.
IMAGENET22K = Recipe("SGD", 0.1, 0.9, 1e-4, "kernels", 5120, 22521, 1251, 20, None, 0.0, None)


def mlperf(batch, lr, momentum, decay, span, warmup, steps):
  """Rules of MLPerf: power 2 to 1e-4, label smoothing 0.1, no clipping."""
  return Recipe("LARS", lr, momentum, decay, "kernels", batch, steps, warmup, span, None, 0.1, 1e-4)


# mlcommons/logging, rcps_resnet.json 1.0.0 to 4.0.0. Steps follow from the decay's
# and, in the rows that count them from the warm-up's end, from the warm-up's.
RCP = [
  mlperf(1632, 7.4, 0.9, 5e-5, 204, 1570, 27476 + 1570),
  mlperf(2048, 8.5, 0.9, 2e-4, 64, 3128, 22530 + 3128),
  mlperf(3264, 10.5, 0.9, 5e-5, 204, 785, 14523),
  mlperf(4096, 10.0, 0.9, 2e-4, 64, 1564, 13137),
  mlperf(8192, 17.0, 0.9, 2e-4, 64, 782, 6095 + 782),
  mlperf(13056, 12.8, 0.9, 2.5e-5, 204, 883, 4710),
  mlperf(32768, 21.2, 0.94, 2.5e-5, 128, 626, 2267),
  mlperf(49152, 19.405, 0.951807, 1e-4, 256, 626, 1846),
  mlperf(58880, 23.246, 0.951807, 1e-4, 230, 631, 1785),
  mlperf(65536, 24.699, 0.951807, 1e-4, 128, 606, 1133 + 606),
  mlperf(67840, 24.699, 0.951807, 1e-4, 424, 585, 1133 + 585),
]
# training_results_v0.7, resnet-research-JAX-tpu-v3-8192: train.py.
GOOGLE = [
  mlperf(32768, 29.0, 0.929, 1e-4, 64, 706, 2512),
  mlperf(65536, 23.080977304670448, 0.9537213777059405, 1e-4, 64, 652, 1817),
]
LARS_ROWS = {f"configs/resnet50_lars.py:{r.batch}": r for r in RCP}
LARS_ROWS |= {f"configs/resnet50_lars.py:google-{r.batch}": r for r in GOOGLE}
RECIPES = LARS_ROWS | {
  "configs/alexnet_bn_32k.py": ALEXNET,
  "configs/resnet50_lamb_32k.py": LAMB,
  "configs/resnet50_nesterov_32k.py": NESTEROV,
  "configs/resnet50_imagenet.py": GOYAL,
  "configs/resnet101_imagenet22k.py": IMAGENET22K,
}


@pytest.mark.parametrize("path", RECIPES)
def test_the_numbers_are_those_of_the_source(path):
  config, r = load_config(path), RECIPES[path]
  o = config.optimizer
  numbers = (o.b1, o.b2, o.eps) if isinstance(o, cfg.LAMB) else o.momentum
  derived = derive(config, NUM_TRAIN, 50_000, 1)
  end_lr = getattr(config.schedule, "end_lr", None)
  rest = config.model.bn_span, config.clip_norm, config.loss.label_smoothing, end_lr
  optimizer = type(o).__name__, o.lr, numbers, o.weight_decay, o.include
  found = Recipe(*optimizer, config.batch_size, derived.total_steps, derived.warmup_steps, *rest)
  assert found._replace(momentum=0) == r._replace(momentum=0)
  np.testing.assert_allclose(numbers, r.momentum, rtol=1e-12)


def test_the_rest_of_lars():
  for path in LARS_ROWS:  # MLPerf's
    config = load_config(path)
    o, schedule = config.optimizer, config.schedule
    assert (o.variant, o.trust_coefficient, o.eps) == ("paper", 0.001, 0.0)
    assert (o.nesterov, o.momentum_correction) == (False, "never")
    assert (schedule.power, schedule.restart, schedule.warmup_lr) == (2.0, True, 0.0)
    assert config.model.depth == 50 and config.stop_at_target
  caffe = load_config("configs/alexnet_bn_32k.py")
  assert caffe.model.batch_norm and caffe.model.dropout == 0.5
  assert (caffe.optimizer.variant, caffe.optimizer.momentum_correction) == ("paper", "warmup")
  assert caffe.optimizer.trust_coefficient == 0.001  # local_gw_ratio
  assert (caffe.schedule.warmup_lr, caffe.schedule.restart) == (1.0, False)
  assert caffe.schedule.power == 2.0


def test_the_rest_of_the_others():
  lamb = load_config("configs/resnet50_lamb_32k.py")
  assert lamb.optimizer.bias_correction is False and lamb.optimizer.phi_max is None
  assert lamb.schedule.power == 1.0
  nesterov = load_config("configs/resnet50_nesterov_32k.py")
  assert nesterov.optimizer.nesterov and nesterov.schedule.power == 2.0
  assert lamb.model.depth == nesterov.model.depth == 50
  for name, depth in (("resnet50_imagenet", 50), ("resnet101_imagenet22k", 101)):
    goyal = load_config(f"configs/{name}.py")
    assert goyal.model.depth == depth and goyal.epochs == 90
    assert goyal.schedule.boundaries == (30, 60, 80)
    assert goyal.schedule.factor == 0.1 and goyal.schedule.warmup_lr == 0.1
    assert (goyal.lr_scaling, goyal.lr_reference_batch_size) == ("linear", 256)


@functools.cache
def resnet50():
  """Shapes of its parameters."""
  fns = models.functions(models.make_resnet(50, num_classes=1000), (224, 224, 3))
  params, _ = jax.eval_shape(fns.init, jax.random.key(0))
  return params


def made(config, num_train=NUM_TRAIN):
  """Return the optimizer and the schedule of a config, as a run makes them."""
  derived = derive(config, num_train, 1, 1)
  schedule = make_schedule(config, derived)
  return make_optimizer(config, schedule, derived.warmup_steps, None), schedule


def test_lars_traces_on_resnet50():
  tx, _ = made(load_config("configs/resnet50_lars.py:32768"))
  params = resnet50()
  state = jax.eval_shape(tx.init, params)
  updates, after = jax.eval_shape(tx.update, params, state, params)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
  assert shapes(updates) == shapes(params) and shapes(after) == shapes(state)
  ratios = optim.trust_ratios(after)
  assert len(ratios) == 53 + 1  # convolutions and the classifier's kernel
  assert all(name.endswith("kernel") for name in ratios)


def test_lamb_leaves_out_batch_norm_alone():
  tx, _ = made(load_config("configs/resnet50_lamb_32k.py"))
  names = set(optim.trust_ratios(jax.eval_shape(tx.init, resnet50())))
  assert len(names) == 53 + 2 and {"Dense_0/kernel", "Dense_0/bias"} <= names
  assert not any("BatchNorm" in name for name in names)


def tree(seed):
  rng = np.random.default_rng(seed)
  shapes = {
    "Conv_0": {"kernel": (3, 3, 2, 4)},
    "BatchNorm_0": {"bn": {"scale": (4,), "bias": (4,)}},
    "Dense_0": {"kernel": (4, 3), "bias": (3,)},
  }
  return jax.tree.map(
    lambda shape: jnp.array(rng.standard_normal(shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def three_updates(tx):
  params, state, out = tree(0), tx.init(tree(0)), []
  update = jax.jit(tx.update)
  for seed in range(1, 4):
    updates, state = update(tree(seed), state, params)
    params = optax.apply_updates(params, updates)
    out.append(updates)
  return out


ORDER = ("^Conv_0", "^BatchNorm_0", "^Dense_0")


def clipped(tx):
  return optax.chain(optax.clip_by_global_norm(0.5), tx)


def lower_slower(tx):
  factors = {"Conv_0": 0.25, "BatchNorm_0": 0.5, "Dense_0": 1.0}

  def slow(updates, params=None):
    del params
    return {k: jax.tree.map(lambda u, k=k: factors[k] * u, v) for k, v in updates.items()}

  return optax.chain(tx, optax.stateless(slow))


def lars_config(clip_norm=None, **options):
  """Fields of a config with LARS."""
  optimizer = cfg.LARS(lr=4.0, momentum=0.8, weight_decay=0.1, trust_coefficient=0.05, **options)
  return dict(optimizer=optimizer, clip_norm=clip_norm)


def lars(r, **options):
  return optim.lars(r, momentum=0.8, weight_decay=0.1, trust_coefficient=0.05, **options)


FIRST = "^Conv_0/|bias$"
TORCH = dict(variant="torch", eps=0.3, nesterov=True)
AS_RELEASED = dict(weight_decay=1.5, bias_correction=False)
PHI = dict(b1=0.7, b2=0.8, eps=0.1, phi_max=0.5)
# Fields of a config, and the same optimizer by hand, of the rate. Its warm-up has
# two steps, so that the correction ends before the third.
WIRING = {
  "lars": (lars_config(), lars),
  "corrected in the warm-up": (
    lars_config(momentum_correction="warmup"),
    lambda r: lars(r, momentum_correction=2),
  ),
  "always corrected": (
    lars_config(momentum_correction="always"),
    lambda r: lars(r, momentum_correction=True),
  ),
  "variant, eps, nesterov": (lars_config(**TORCH), lambda r: lars(r, **TORCH)),
  "all": (lars_config(include="all"), lambda r: lars(r, mask=None)),
  "by path": (lars_config(include=FIRST), lambda r: lars(r, mask=optim.matching(FIRST))),
  "clipped": (lars_config(clip_norm=0.5), lambda r: clipped(lars(r))),
  "lamb as released, clipped": (
    dict(optimizer=cfg.LAMB(lr=4.0, include=RELEASED, **AS_RELEASED), clip_norm=0.5),
    lambda r: clipped(optim.lamb(r, mask=optim.matching(RELEASED), **AS_RELEASED)),
  ),
  "lamb, phi, lower layers slower": (
    dict(optimizer=cfg.LAMB(lr=4.0, **PHI), layer_decay=0.5, layer_order=ORDER),
    lambda r: lower_slower(optim.lamb(r, **PHI)),
  ),
}


@pytest.mark.parametrize("name", WIRING)
def test_a_config_makes_the_optimizer_written_out(name):
  fields, by_hand = WIRING[name]
  schedule = cfg.Cosine(warmup_epochs=2, warmup_lr=1.0)
  config = small_config(batch_size=10, epochs=10, schedule=schedule, **fields)
  tx, _ = made(config, num_train=10)
  rates = [1.0, 2.5, 4.0]  # 1 to 4 in two steps of the warm-up
  wanted = three_updates(by_hand(lambda step: jnp.array(rates)[step]))
  for a, b in zip(three_updates(tx), wanted, strict=True):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), a, b)
