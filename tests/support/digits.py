"""Batches that look like the handwritten digits."""

import jax
import numpy as np

from jaxscale import models, optim
from jaxscale.exchange import plain
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.training import losses
from jaxscale.training.state import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions
from support.trees import assert_close


def digits_batch(n: int, seed: int = 0) -> dict[str, np.ndarray]:
  """Return a batch of `n` rows."""
  rng = np.random.default_rng(seed)
  return {
    "image": rng.integers(0, 17, (n, 8, 8, 1)).astype(np.uint8),
    "label": rng.integers(0, 10, n).astype(np.int32),
  }


OPTIMIZERS = {
  "sgd": lambda s: optim.sgd(s, weight_decay=1e-4),
  # Biases have no trust ratio: at 100 times the schedule they walk by sums of which little
  # is left, and the last bit of another processor's instructions grows beyond 1e-6.
  "lars": lambda s: optim.lars(lambda t: 10 * s(t), weight_decay=1e-4),
  "lamb": lambda s: optim.lamb(lambda t: 0.1 * s(t)),
  "adamw": lambda s: optim.adamw(lambda t: 0.01 * s(t)),
}
BATCH = 64


def cnn(**options):
  model = models.CNNModule(num_classes=10, features=(8, 16), dense=32, **options)
  return models.functions(model, (8, 8, 1), mean=(8.0,), std=(5.0,))


def run(fns, optimizer, *, num_devices, steps=20, exchange=None, **options):
  """Return the state after some steps on different batches, and the metrics of every step."""
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  schedule = optim.warmup_cosine(0.1, 3, 30)
  tx = OPTIMIZERS[optimizer](schedule)
  exchange = exchange or plain(mesh.axis_names)
  average = "ema_decay" in options
  state = init_state(fns.init, tx, mesh, exchange, seed=1, average=average)
  loss, options = losses.classification_loss(fns.apply, label_smoothing=0.1), StepOptions(**options)
  step = make_train_step(loss, tx, mesh, exchange, schedule=schedule, options=options)
  history = []
  for i in range(steps):
    batch = jax.device_put(digits_batch(BATCH, seed=i), batch_sharding(mesh))
    state, metrics = step(state, batch)
    history.append(metrics)
  return jax.device_get(state), jax.device_get(history)


def assert_same(got, wanted, tolerance=1e-6):
  """Assert that every leaf is within a tolerance of its norm, and every metric of its value."""
  (state, history), (state_ref, history_ref) = got, wanted
  for part in ("params", "model_state"):
    assert_close(getattr(state, part), getattr(state_ref, part), tolerance)
  for a, b in zip(history, history_ref, strict=True):
    for name in ("loss", "learning_rate"):
      np.testing.assert_allclose(a[name], b[name], rtol=10 * tolerance)
