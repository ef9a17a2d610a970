"""One command draws every schedule; what it draws are the published rates."""

import numpy as np
import pytest

from jaxscale.overrides import load_config
from jaxscale.plot_schedule import NUM_IMAGENET, curve, main


def rates_of(path):
  sampled = curve(load_config(path), NUM_IMAGENET)
  assert sampled.epochs[0] == 0 and (np.diff(sampled.epochs) > 0).all()
  return sampled.rates


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


# batch, peak, warm-up epochs, epochs until the published mean reached 75.9 %
MLPERF = [
  (1632, 7.4, 2, 35.0), (2048, 8.5, 5, 38.4), (3264, 10.5, 2, 35.2),
  (4096, 10.0, 5, 40.0), (8192, 17.0, 5, 42.0), (13056, 12.8, 9, 45.4),
  (32768, 21.2, 16, 56.0), (49152, 19.405, 24, 68.0), (58880, 23.246, 29, 79.9),
  (65536, 24.699, 31, 84.5), (67840, 24.699, 31, 85.9),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "peak", "warmup", "reached"), MLPERF)
def test_mlperfs_table_at_first_peak_and_last_step(batch, peak, warmup, reached):
  rates = rates_of(f"configs/resnet50_lars.py:{batch}")
  top = round(warmup * NUM_IMAGENET / batch)
  assert rates[0] == 0
  assert rates[1] == pytest.approx(peak / top, rel=1e-5)
  assert rates.argmax() == top and rates[top] == pytest.approx(peak, rel=1e-6)
  # The last step is one before the polynomial is at its end of 1e-4.
  span = len(rates) - top
  assert 0.99999e-4 <= rates[-1] <= 1e-4 + (peak - 1e-4) * (2 / span) ** 2
  # The run ends 1.5 to 5.5 epochs after the published mean reached its target.
  assert 1.5 < len(rates) * batch / NUM_IMAGENET - reached < 5.5


def test_googles_submission():
  rates = rates_of("configs/resnet50_lars.py:google-32768")
  assert len(rates) == 2512  # Nado et al. give this number of steps too
  assert rates.max() == pytest.approx(29.0) and rates.argmax() == 704


def test_goyals_recipe():
  rates = rates_of("configs/resnet50_imagenet.py")
  assert rates[0] == pytest.approx(0.1) and rates.max() == pytest.approx(3.2)
  assert [rates[s] for s in (4000, 5000, 10_000, 13_000)] == pytest.approx(
    [3.2, 0.32, 0.032, 0.0032]
  )


def test_lambs_released_recipe():
  rates = rates_of("configs/resnet50_lamb_32k.py")
  assert len(rates) == 3519 and rates.argmax() == 782
  assert rates.max() == pytest.approx(0.04)
  assert rates[782 + 1368] == pytest.approx(0.02, rel=1e-2)  # linear


def test_the_command(tmp_path, capsys):
  out = tmp_path / "rates.png"
  configs = ["configs/digits.py", "configs/alexnet_bn_32k.py"]
  assert main([*configs, "--out", str(out)]) == 0
  assert out.read_bytes()[:4] == b"\x89PNG" and str(out) in capsys.readouterr().out
  assert main(["--otu", "x"]) == 2 and "did you mean '--out'" in capsys.readouterr().err
  assert main([]) == 2 and main(["--help"]) == 0
