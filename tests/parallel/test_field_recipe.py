"""The recipe of fields: its example solves its equation, and it trains from zarr on 8 devices."""

import runpy

import numpy as np

import jaxscale as jxs
from jaxscale.config.loading import load_config
from support.paths import ROOT

RECIPE = ROOT / "configs" / "field_unet.py"


def test_the_change_is_that_of_the_equation():
  """Compare with Runge-Kutta steps of fourth order of u_t = 0.1 laplacian(u) + u - u**3."""
  arrays = runpy.run_path(str(RECIPE))["fields"](3, seed=7, size=12)
  u = first = np.float64(arrays["field"])
  waves = np.fft.fftfreq(12, 1 / 12)
  square = sum(x**2 for x in np.meshgrid(waves, waves, waves, indexing="ij"))

  def slope(u):
    diffusion = np.fft.ifftn(-square * np.fft.fftn(u, axes=(1, 2, 3)), axes=(1, 2, 3)).real
    return 0.05 * diffusion + u - u**3

  for _ in range(200):
    a = slope(u)
    b = slope(u + a / 400)
    c = slope(u + b / 400)
    d = slope(u + c / 200)
    u = u + (a + 2 * b + 2 * c + d) / 1200
  assert np.abs(arrays["change"]).mean() > 0.1
  np.testing.assert_allclose(arrays["change"], u - first, atol=3e-3)


def test_it_trains_on_eight_devices_and_is_evaluated_on_other_zarr(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  changes = {"data.num_train": "128", "epochs": "2", "optimizer.lr": "0.02", "log.plot": "False"}
  changes |= {"model.features": "(8, 16)", "evaluation.every_epochs": "2"}
  config = load_config(str(RECIPE), {**changes, "mesh.data": "8"})
  summary = jxs.fit(config, tmp_path / "run").summary
  (validation,) = (tmp_path / "cache" / "jaxscale" / "allen_cahn").glob("val_16.zarr")
  found = jxs.load(tmp_path / "run").predict(validation)
  assert found.outputs.shape == (16, 16, 16, 16, 1)
  change = runpy.run_path(str(RECIPE))["fields"](16, seed=1)["change"]
  error = found.outputs[..., 0] - change
  assert summary["mean_absolute_error"] < 0.9 * np.abs(change).mean()
  np.testing.assert_allclose(summary["mean_absolute_error"], np.abs(error).mean(), rtol=1e-5)
  # The loss is summed over the points of a field.
  np.testing.assert_allclose(summary["loss"], 0.5 * (error**2).sum() / 16, rtol=1e-5)
