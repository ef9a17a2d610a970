"""Learning rates against the numbers that were published and logged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import optim


def values(schedule, steps):
  return [float(schedule(s)) for s in steps]


def test_corners():
  poly = optim.warmup_polynomial(10.0, 5, 20, end=1e-4, power=2)
  # end + (peak - end) (1 - 15/16)^2, the last value of Google's schedule
  last = 1e-4 + (10 - 1e-4) / 256
  assert values(poly, (0, 1, 5, 20, 1000)) == pytest.approx([0, 2, 10, last, 1e-4], rel=1e-5)
  cosine = optim.warmup_cosine(2.0, 4, 12, end=0.5)
  assert values(cosine, (0, 2, 4, 8, 12, 99)) == pytest.approx([0, 1, 2, 1.25, 0.5, 0.5])
  # Without restart: the decay has run from step 0 on.
  cosine = optim.warmup_cosine(2.0, 4, 12, end=0.5, restart=False)
  wanted = [0, 1.0, 1.625, 1.25, 1.25 - 0.75 * np.sqrt(0.5), 0.5, 0.5]
  assert values(cosine, (0, 2, 4, 6, 9, 12, 99)) == pytest.approx(wanted)
  steps = optim.warmup_steps(1.0, 2, (4, 6), factor=0.1)
  assert values(steps, range(8)) == pytest.approx([0, 0.5, 1, 1, 0.1, 0.1, 0.01, 0.01])
  assert float(optim.warmup_cosine(1.0, 0, 10)(0)) == 1.0
  assert float(optim.warmup_steps(1.0, 0, ())(0)) == 1.0
  # A run of one step, which is all warm-up.
  for make in (optim.warmup_polynomial, optim.warmup_cosine):
    assert np.isfinite(float(make(1.0, 1, 1)(1)))


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("make", [optim.warmup_cosine, optim.warmup_polynomial])
def test_the_last_of_many_steps_have_a_rate(make, restart):
  """Each rate to 1e-6 of itself, not of the peak: 1e-13 of it at the last step."""
  total, first, peak = 3_000_000, 1000, 0.5
  schedule = make(peak, first, total, end=0.0, restart=restart)
  begin, span = (first, total - first) if restart else (0, total)
  last = total
  if make is optim.warmup_polynomial and restart:
    last, span = total + 1, span + 1
  for step in (first, first + 1, total // 2, total - 1000, total - 2, total - 1):
    left = (last - step) / span
    wanted = left**2 if make is optim.warmup_polynomial else np.sin(np.pi / 2 * left) ** 2
    assert float(schedule(step)) == pytest.approx(peak * wanted, rel=1e-6), step
  if make is optim.warmup_cosine:
    assert float(schedule(total)) == 0.0 and float(schedule(begin + 10 * span)) == 0.0


SCHEDULES = {
  "restart": optim.warmup_polynomial(10.0, 5, 20),
  "absolute": optim.warmup_polynomial(10.0, 5, 20, end=0.0, restart=False),
  "quadratic": optim.warmup_polynomial(10.0, 5, 20, warmup="quadratic", start=1.0),
  "cosine": optim.warmup_cosine(2.0, 4, 12, warmup="exponential", start=0.1),
  "cosine absolute": optim.warmup_cosine(2.0, 4, 12, end=0.1, restart=False),
  "steps": optim.warmup_steps(1.0, 2, (4, 6), warmup="quadratic"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_pure_functions_of_a_traced_step(name):
  schedule, steps = SCHEDULES[name], jnp.arange(24)
  alone = np.array([float(schedule(s)) for s in range(24)])
  traced = jax.jit(jax.vmap(schedule))(steps)
  assert traced.dtype == jnp.float32
  np.testing.assert_allclose(traced, alone, rtol=1e-6)
  # A fraction of a step is between its neighbours; a whole one as float is itself.
  np.testing.assert_array_equal(jax.jit(jax.vmap(schedule))(jnp.arange(24.0)), traced)
  half = np.array([float(schedule(jnp.float32(s + 0.5))) for s in range(23)])
  low, high = np.minimum(alone[1:], alone[:-1]), np.maximum(alone[1:], alone[:-1])
  ends = {"cosine": 4, "cosine absolute": 4, "steps": 2}.get(name, 5)
  inside = np.arange(23) != ends - 1  # the ramp's last half step is still the ramp
  assert ((low <= half * (1 + 1e-6)) & (half <= high * (1 + 1e-6)))[inside].all()
  with jax.enable_x64(True):
    assert schedule(3).dtype == schedule(jnp.int64(3)).dtype == jnp.float32


@pytest.mark.parametrize(("base", "steps"), [(10, 600), (24, 400), (32, 400)])
def test_the_quadratic_ramps_of_nvcaffe(base, steps):
  """AlexNet-BN at 8K, 16K and 32K: 1 + (base - 1) (i / I)^2."""
  ramp = dict(warmup="quadratic", start=1.0, end=0.0, restart=False)
  schedule = optim.warmup_polynomial(base, steps, 4000, **ramp)
  got = values(schedule, (0, steps // 4, steps // 2, steps - 1))
  wanted = [1 + (base - 1) * f**2 for f in (0, 1 / 4, 1 / 2, (steps - 1) / steps)]
  assert got == pytest.approx(wanted, rel=1e-6)


def test_the_exponential_ramp_multiplies():
  schedule = optim.warmup_cosine(6.4, 6, 100, warmup="exponential", start=0.1)
  got = values(schedule, range(7))
  assert got == pytest.approx([0.1 * 2**i for i in range(7)], rel=1e-6)


# Batch, peak, warm-up and all epochs, steps in a block of 4 epochs. The two larger
# batches are configs (test_recipe_schedules.py).
V07 = [(8192, 10.0, 5, 56, 626), (16384, 25.0, 5, 56, 313)]


@pytest.mark.parametrize(("batch", "peak", "warm", "epochs", "block"), V07)
def test_googles_jax_submission(batch, peak, warm, epochs, block):
  """MLPerf v0.7: whole blocks of 4 epochs, so steps may be fractions."""
  assert block == -(-4 * 1_281_167 // batch)
  warmup, total = warm * block / 4, epochs * block / 4
  schedule = optim.warmup_polynomial(peak, warmup, total)
  span = total - warmup + 1
  wanted = [0, peak, 1e-4 + (peak - 1e-4) / span**2]
  assert values(schedule, (0, warmup, total)) == pytest.approx(wanted, rel=1e-5)


def test_the_length_of_the_decay_may_be_given_and_a_fraction():
  """MLPerf's logs have fractions; by default it ends one step after the last one."""
  warmup, total, steps = 651.75, 1817, (900, 1500, 1817)
  given = optim.warmup_polynomial(23.08, warmup, total, decay_steps=1166.25)
  alone = optim.warmup_polynomial(23.08, warmup, total)
  assert values(given, steps) == values(alone, steps)


COSINE, POLYNOMIAL, STEPS = optim.warmup_cosine, optim.warmup_polynomial, optim.warmup_steps
MISTAKES = [
  (COSINE, (0.0, 1, 2), {}, "peak=0.0 is out of range; give a"),
  (COSINE, (1.0, 3, 2), {}, "warmup_steps=3 is out of range; give 0 <= warm"),
  (COSINE, (1.0, -1, 2), {}, "warmup_steps=-1"),
  (COSINE, (1.0, 0, 0), {}, "total_steps=0 is out of range"),
  (COSINE, (1.0, 0, 9), dict(end=-1), "end=-1 is out of range; give a"),
  (COSINE, (1.0, 1, 9), dict(start=2), "start=2 is out of range; give 0 <= start"),
  (COSINE, (1.0, 1, 9), dict(warmup="exponential"), "=0 does not work with an exponential warm-up"),
  (COSINE, (1.0, 1, 9), dict(warmup="cubic"), "warmup='cubic'"),
  (POLYNOMIAL, (1.0, 1, 9), dict(power=0), "power=0 is out of range"),
  (POLYNOMIAL, (1.0, 1, 9), dict(decay_steps=0), "decay_steps=0"),
  (POLYNOMIAL, (1.0, 1, 9), dict(decay_steps=5, restart=False), "5 needs restart=True"),
  (STEPS, (1.0, 1, (5, 4)), {}, r"boundaries=\[5, 4\] are invalid; give"),
  (STEPS, (1.0, 1, (5,)), dict(factor=0), "factor=0 is out of range"),
]


@pytest.mark.parametrize("make, values, options, message", MISTAKES)
def test_mistakes_are_reported(make, values, options, message):
  with pytest.raises(ValueError, match=message):
    make(*values, **options)
