"""The learning rate of every step of the recipes is the published one."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxscale.config.loading import load_config
from jaxscale.data.dataset import IMAGENET_EXAMPLES
from jaxscale.experiment.derive import derive
from jaxscale.experiment.optimizer import phase_schedule


def rates_of(path):
  config = dataclasses.replace(load_config(path), accumulate_steps=1, noise_scale=False)
  derived = derive(config, IMAGENET_EXAMPLES["train"], 1, 1)
  rates = []
  for phase in derived.phases:
    steps = np.arange(phase.start, phase.stop)
    rates.append(jax.vmap(phase_schedule(config, derived, phase))(steps))
  return np.concatenate(rates)


def test_intel_caffes_numbers():
  """Its solver: 1 to 32 in 400 steps, then the polynomial as if from step 0."""
  rates = rates_of("configs/alexnet_bn_32k.py")
  assert len(rates) == 4000
  assert rates[0] == pytest.approx(1.0)
  assert rates[200] == pytest.approx(16.5)
  assert rates[399] == pytest.approx(1 + 31 * 399 / 400)
  assert rates[400] == pytest.approx(25.92)
  assert rates[2000] == pytest.approx(32 * 0.25)
  assert rates[3999] == pytest.approx(32 / 4000**2, rel=1e-3)


# batch, peak, warm-up epochs, decay steps, whether these count from step 0 (how
# the config reads them), epochs until the published mean reached 75.9 %
MLPERF = [
  *((1632, 7.4, 2, 27476, 0, 35.0), (2048, 8.5, 5, 22530, 0, 38.4)),
  *((3264, 10.5, 2, 14523, 1, 35.2), (4096, 10.0, 5, 13137, 1, 40.0)),
  *((8192, 17.0, 5, 6095, 0, 42.0), (13056, 12.8, 9, 4710, 1, 45.4)),
  *((32768, 21.2, 16, 2267, 1, 56.0), (49152, 19.405, 24, 1846, 1, 68.0)),
  *((58880, 23.246, 29, 1785, 1, 79.9), (65536, 24.699, 31, 1133, 0, 84.5)),
  (67840, 24.699, 31, 1133, 0, 85.9),
]


@pytest.mark.parametrize(("batch", "peak", "warmup", "decay", "from_0", "reached"), MLPERF)
def test_mlperfs_table(batch, peak, warmup, decay, from_0, reached):
  """Linear from 0, then power 2 to 1e-4, in float64; the first, peak and last too."""
  rates = rates_of(f"configs/resnet50_lars.py:{batch}")
  top = round(warmup * IMAGENET_EXAMPLES["train"] / batch)
  end = decay if from_0 else decay + top
  step = np.arange(end, dtype=np.float64)
  poly = 1e-4 + (peak - 1e-4) * ((end - step) / (end - top)) ** 2
  np.testing.assert_allclose(rates, np.where(step < top, peak * step / top, poly), rtol=1e-5)
  assert rates[0] == 0 and rates.argmax() == top
  assert rates[top] == pytest.approx(peak, rel=1e-6)
  # The last step is one before the polynomial is at its end of 1e-4.
  assert rates[-1] == pytest.approx(1e-4 + (peak - 1e-4) / (end - top) ** 2, rel=1e-5)
  # The run ends 1.5 to 5.5 epochs after the published mean reached its target.
  assert 1.5 < len(rates) * batch / IMAGENET_EXAMPLES["train"] - reached < 5.5


# batch, peak, epochs of warm-up and in all, steps in a loop of 4 epochs, all steps
GOOGLE = [
  (32768, 29.0, 18, 64, 157, 2512),  # Nado et al. give this number of steps too
  (65536, 23.080977304670448, 33, 92, 79, 1817),
]


@pytest.mark.parametrize(("batch", "peak", "warm", "epochs", "loop", "steps"), GOOGLE)
def test_googles_submission(batch, peak, warm, epochs, loop, steps):
  """train.py of resnet-research-JAX in training_results_v0.7, in float64."""
  rates = rates_of(f"configs/resnet50_lars.py:google-{batch}")
  assert len(rates) == steps == epochs * loop / 4
  step, warmup_steps = np.arange(steps, dtype=np.float64), warm * loop / 4
  decay_steps = steps - warmup_steps + 1
  assert (warmup_steps, decay_steps) in [(706.5, 1806.5), (651.75, 1166.25)]
  poly = (
    1e-4 + (peak - 1e-4) * (1 - np.minimum(step - warmup_steps, decay_steps) / decay_steps) ** 2
  )
  wanted = np.where(step <= warmup_steps, peak * step / warmup_steps, poly)
  # Ours warms up in whole steps.
  np.testing.assert_allclose(rates, wanted, rtol=1e-3)


def test_goyals_recipe():
  """Intel Caffe's file of it: 0.1 to 3.2 over 780, tenths at 30, 60, 80 epochs."""
  rates = rates_of("configs/resnet50_imagenet.py")
  assert rates[0] == pytest.approx(0.1) and rates.max() == pytest.approx(3.2)
  after = [rates[s] for s in (4000, 5000, 10_000, 13_000)]
  assert after == pytest.approx([3.2, 0.32, 0.032, 0.0032])
  drops = np.flatnonzero(rates[1:] < 0.2 * rates[:-1]) + 1
  np.testing.assert_allclose(drops, [4692, 9384, 12512], atol=15)


def test_lambs_released_recipe():
  """optimization.py of fastalgo/imagenet_resnet50_lamb, in float64."""
  rates = rates_of("configs/resnet50_lamb_32k.py")
  step, warmup, total = np.arange(3519, dtype=np.float64), 782, 3519
  wanted = np.where(step <= warmup, step * 0.04 / warmup, (total - step) * 0.04 / (total - warmup))
  np.testing.assert_allclose(rates, wanted, rtol=1e-6)
  assert rates[0] == 0 and rates.argmax() == 782


def test_nesterov_of_nado_et_al():
  """`mlperf_polynomial` of google/init2winit with linear warm-up, in float64."""
  rates = rates_of("configs/resnet50_nesterov_32k.py")
  step = np.arange(2512, dtype=np.float64)
  poly = 1e-4 + (7.05 - 1e-4) * (1 - (step - 638) / (2512 - 638 + 1)) ** 2
  np.testing.assert_allclose(rates, np.where(step <= 638, 7.05 * step / 638, poly), rtol=2e-6)
