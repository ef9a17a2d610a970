"""Guarantees of every exchange: nothing lost, nothing random, nothing apart."""

import jax
import numpy as np
import pytest

from jaxscale.exchange.buckets import bucketed
from jaxscale.exchange.low_precision import int8
from jaxscale.mesh import make_mesh
from support.cases import all_slow_except
from support.errors import config_error
from support.exchanges import (
  AXES,
  EXCHANGES,
  FEEDBACK,
  SHAPES,
  N,
  compiled,
  fifty,
  gradients,
  run,
  unsent,
)

# Those that `make test` takes: one of each kind.
QUICK = ("bucketed", "bf16", "one bit", "top k", "delayed")


@pytest.mark.parametrize("name", all_slow_except(EXCHANGES, *QUICK))
def test_what_was_sent_and_what_is_left_are_all_the_gradients(name):
  """With error feedback to rounding; else rounding averages out, within 1 %."""
  means, state = fifty(name)
  for leaf, grads in gradients(50).items():
    wanted = grads.sum((0, 1), dtype=np.float64)
    sent = N * np.sum(means[leaf], axis=0, dtype=np.float64)
    left = unsent(state, leaf) if isinstance(state, dict) else 0.0
    bound = 1e-5 if name in FEEDBACK else 0.01
    assert np.linalg.norm(sent + left - wanted) <= bound * np.linalg.norm(wanted), leaf


@pytest.mark.parametrize("name", all_slow_except(EXCHANGES, *QUICK))
def test_again_gives_the_same_bits_on_every_device(name):
  steps, state = compiled(name)
  means, state = steps(gradients(50), state)
  for leaf in jax.tree.leaves(means):
    copies = [np.asarray(s.data) for s in leaf.addressable_shards]
    assert len(copies) == N and all(np.array_equal(copies[0], c) for c in copies)
  jax.tree.map(np.testing.assert_array_equal, fifty(name), (means, state))


OF_EACH = ["bf16", "int8", "one bit", "top k", "power sgd", "bucketed", "fp16"]


@pytest.mark.parametrize("name", all_slow_except(OF_EACH, "bf16", "top k"))
def test_the_shape_of_the_mesh_does_not_matter(name):
  got, _ = run(EXCHANGES[name](), gradients(50), mesh=make_mesh())
  for leaf in SHAPES:
    np.testing.assert_allclose(got[leaf], fifty(name)[0][leaf], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", all_slow_except(OF_EACH, "bucketed"))
def test_one_device_will_do(name):
  mesh = make_mesh(devices=jax.devices()[:1])
  grads = gradients(3, devices=1)
  means, _ = run(EXCHANGES[name](1), grads, mesh=mesh)
  assert jax.tree.all(jax.tree.map(lambda m: bool(np.isfinite(m).all()), means))
  if name == "bucketed":
    jax.tree.map(lambda m, g: np.testing.assert_array_equal(m, g[:, 0]), means, grads)


@pytest.mark.parametrize("name", all_slow_except(EXCHANGES, *QUICK))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_no_number_is_seen(name, bad):
  """Compressed or not, one device's NaN or overflow reaches the means of its tensor."""
  steps, state = compiled(name)
  grads = gradients(50)
  grads["wide"][0, 3, 20, 100] = bad
  means, _ = steps(grads, state)
  first = 1 if "delayed" in name else 0
  assert not np.isfinite(means["wide"][first : first + 2]).all()


MISTAKES = [
  (
    lambda: run(bucketed(AXES, bucket_bytes=3), gradients(1)),
    "less than an element of float32; give 4 or more",
  ),
  (lambda: int8(AXES, block=256, bucket_bytes=1000), "give 1024 or more"),
]


@pytest.mark.parametrize("make, line", MISTAKES)
def test_mistakes_are_one_line(make, line):
  with config_error(match=line):
    make()
