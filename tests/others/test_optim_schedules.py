"""Schedules and averages against timm's, as it is installed."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import optim
from jaxscale.training.step import with_average
from jaxscale.training.types import TrainState

torch = pytest.importorskip("torch")
timm = pytest.importorskip("timm")


@pytest.mark.parametrize("restart", [False, True])
def test_the_cosine_is_timms(restart):
  """Without its `warmup_prefix` the decay runs from step 0 on."""
  from timm.scheduler import CosineLRScheduler

  made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
  steps = dict(t_initial=26 if restart else 30, warmup_t=4, warmup_prefix=restart)
  theirs = CosineLRScheduler(made, lr_min=0.05, warmup_lr_init=0.01, t_in_epochs=False, **steps)
  ours = optim.warmup_cosine(0.8, 4, 30, end=0.05, start=0.01, restart=restart)
  for step in range(31):
    theirs.step_update(step)
    assert float(ours(step)) == pytest.approx(made.param_groups[0]["lr"], rel=1e-5)


def test_the_warm_up_of_the_average_is_timms():
  from timm.utils import ModelEmaV3

  weights = np.random.default_rng(0).standard_normal((12, 7)).astype(np.float32)
  model = torch.nn.Linear(7, 1, bias=False)
  theirs = ModelEmaV3(model, decay=0.7, use_warmup=True)
  step = with_average(
    lambda state, new: state._replace(step=state.step + 1, params=new), 0.7, warmup=True
  )
  state = TrainState(jnp.int32(0), (), (), (), (), (jnp.ones(7), ()))
  for updates, w in enumerate(weights, 1):
    model.weight.data = torch.tensor(w[None])
    theirs.update(model, step=updates)  # as its train.py: after the step is counted
    state = step(state, jnp.array(w))
    found = theirs.module.weight.detach().numpy()[0]
    np.testing.assert_allclose(state.average[0], found, rtol=1e-5, atol=1e-6)
