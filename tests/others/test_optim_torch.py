"""Optimizers against those of PyTorch and timm, as they are installed."""

import numpy as np
import pytest

from jaxscale import optim
from jaxscale.training.losses import cross_entropy
from support.torch_optimizers import CASES, layers, slow_rate, theirs

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from others.training import ours, weights


@pytest.mark.parametrize("name", CASES)
def test_weights_are_theirs(name):
  """In float64, also Muon's iteration, which PyTorch casts to bfloat16."""
  got, wanted = weights(name)
  for layer, w in got.items():
    np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12, err_msg=layer)


def test_muon_of_torch_in_bfloat16_is_near():
  """Expect a difference within the 8 bits of bfloat16, in which PyTorch computes."""
  start, _ = layers()
  got, wanted = ours(CASES["muon"].ours), theirs(CASES["muon"])
  for layer in ("matrix", "tall"):
    moved = np.linalg.norm(wanted[layer] - start[layer])
    assert 0 < np.linalg.norm(got[layer] - wanted[layer]) < 0.02 * moved


def test_the_forms_of_muon_differ():
  """Expect a difference: optax corrects the bias of the velocity before mixing in the gradient."""
  start, _ = layers()
  got = ours(optim.muon(slow_rate, adjust="original", weight_decay=0.1))
  wanted = theirs(CASES["muon"])
  moved = np.linalg.norm(wanted["matrix"] - start["matrix"])
  assert np.linalg.norm(got["matrix"] - wanted["matrix"]) > 0.03 * moved


def test_class_weights_and_smoothing_are_those_of_torch():
  rng, weights = np.random.default_rng(0), (1.0, 0.25, 3.0)
  logits, labels = rng.normal(size=(50, 3)).astype("float32"), rng.integers(0, 3, 50)
  loss = torch.nn.CrossEntropyLoss(torch.tensor(weights), label_smoothing=0.1)
  wanted = loss(torch.tensor(logits), torch.tensor(labels)).item()
  objective, batch = cross_entropy(0.1, weights), {"label": labels.astype("int32")}
  each, w = objective.loss(logits, batch), objective.weights(batch)
  assert float((each * w).sum() / w.sum()) == pytest.approx(wanted, rel=1e-6)
