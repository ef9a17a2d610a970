"""The critical batch size: exact curves, NumPy's own fit, MLPerf's table."""

import numpy as np
import pytest

from jaxscale.studies.batch_study import fit_steps, micro_batches
from jaxscale.studies.time_to_accuracy import REFERENCES


@pytest.mark.parametrize("s_min, b_crit", [(100, 1000), (7.5, 31), (4000, 2e5)])
def test_the_fit_finds_the_hyperbola(s_min, b_crit):
  sizes = b_crit * np.array([0.05, 0.3, 1.1, 4.0])
  # (S / S_min - 1)(E / E_min - 1) = 1, solved for S at E = B S.
  e_min = s_min * b_crit
  steps = [
    max(np.roots([b / (s_min * e_min), -b / e_min - 1 / s_min, 0])) for b in sizes
  ]
  fit = fit_steps(sizes, steps)
  assert fit is not None
  assert fit.s_min == pytest.approx(s_min, rel=1e-9)
  assert fit.b_crit == pytest.approx(b_crit, rel=1e-9)
  assert fit.b_crit_range == pytest.approx((b_crit, b_crit), rel=1e-9)
  assert fit.error < 1e-9 and fit.num_sizes == 4


def test_the_fit_is_the_least_squares_of_the_relative_error():
  rng = np.random.default_rng(0)
  sizes = 2.0 ** np.arange(5, 13)
  steps = (200 + 60_000 / sizes) * rng.uniform(0.8, 1.2, len(sizes))
  fit = fit_steps(sizes, steps)
  assert fit is not None
  # In examples the curve is a line, whose weighted least squares NumPy has.
  slope, intercept = np.polyfit(sizes, sizes * steps, 1, w=1 / (sizes * steps))
  assert fit.s_min == pytest.approx(slope, rel=1e-6)
  assert fit.b_crit == pytest.approx(intercept / slope, rel=1e-6)
  others = []
  for i in range(len(sizes)):
    b, e = np.delete(sizes, i), np.delete(sizes * steps, i)
    s, e_min = np.polyfit(b, e, 1, w=1 / e)
    others.append(e_min / s)
  assert fit.b_crit_range == pytest.approx((min(others), max(others)), rel=1e-6)
  assert fit.b_crit_range[0] < fit.b_crit < fit.b_crit_range[1]
  errors = abs((fit.s_min * (1 + fit.b_crit / sizes)) / steps - 1)
  assert fit.error == pytest.approx(errors.max()) and fit.error < 0.25


def test_the_fit_of_mlperfs_table():
  """ResNet-50 by LARS needs twice its fewest epochs beyond 32K, not below it."""
  sizes = sorted(REFERENCES)
  fit = fit_steps(sizes, [REFERENCES[b].epochs * 1_281_167 / b for b in sizes])
  assert fit is not None and 32_768 < fit.b_crit < 65_536
  assert fit.error < 0.1


@pytest.mark.parametrize(
  "sizes, steps",
  [
    ([1, 2], [10, 6]),  # two points are on every such curve
    ([2, 2, 4], [10, 11, 6]),
    ([1, 2, 4], [400, 200, 100]),  # still ideal: no limit in sight
    ([1, 2, 4], [400, 190, 80]),  # better than ideal
    ([1, 2, 4], [100, 100, 100]),  # no gain at all
    ([1, 2, 4], [100, 110, 120]),
  ],
)
def test_no_critical_batch_size_is_made_up(sizes, steps):
  assert fit_steps(sizes, steps) is None


@pytest.mark.parametrize("rows", [1, 7, 12, 96])
@pytest.mark.parametrize("at_most", [1, 5, 20, 100])
def test_micro_batches_are_equal_and_few(rows, at_most):
  n = micro_batches(rows, at_most)
  assert rows % n == 0 and rows // n <= at_most
  assert not [m for m in range(1, n) if rows % m == 0 and rows // m <= at_most]
