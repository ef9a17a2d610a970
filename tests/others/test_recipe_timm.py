"""A fine-tuning by timm's own recipe, there and here, on the same batches."""

import numpy as np
import pytest

for package in ("torch", "timm"):
  pytest.importorskip(package)

from others import training


@pytest.mark.parametrize("name", training.RECIPES)
def test_losses_are_timms(name):
  """Each of the 20 losses to 1e-5."""
  got, wanted = training.losses(name)
  assert len(wanted) == 20
  np.testing.assert_allclose(got, wanted, rtol=1e-5)
  assert min(wanted[-5:]) < 0.9 * wanted[0]  # it learned
