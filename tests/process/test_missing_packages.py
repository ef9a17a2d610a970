"""Runs in a Python that lacks optional packages, and the metadata of jaxscale."""

import json

import numpy as np
import pytest
from PIL import Image

from jaxscale import __version__
from jaxscale.metrics.reading import read_metrics
from support.commands import run_python
from support.images import write_folder
from support.tiny_runs import shown_by_tensorboard

OPTIONAL = """tensorboardX lazy_loader matplotlib simplejpeg cv2 tensorflow_datasets h5py pyarrow
grain wandb mlflow tokenizers sklearn skimage importlib_resources pandas"""
# Runs a command of jaxscale in a Python where some packages cannot be found.
HIDE = """
import importlib.metadata as metadata, sys
hidden = sys.argv[1].split()
class Hide:
  def find_spec(name, path=None, target=None):
    if name.partition(".")[0] in hidden:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide)
found = metadata.distribution
def distribution(name):
  if name == "jaxscale":
    raise metadata.PackageNotFoundError(name)
  return found(name)
metadata.distribution = distribution
from jaxscale import cli
raise SystemExit(cli.main(sys.argv[2:]))
"""


def jaxscale_without(packages, *words):
  return run_python("-c", HIDE, packages, *words)


def test_a_run_needs_no_optional_package_and_no_metadata(tmp_path):
  words = "--config=configs/digits.py", f"--workdir={tmp_path}", "--config.epochs=6"
  done = jaxscale_without(OPTIONAL, "train", *words)
  assert done.returncode == 0, done.stdout + done.stderr
  line = "Log.plot=True: matplotlib is not installed; the run draws no pictures"
  assert done.stdout.count(line) == 1
  assert done.stdout.splitlines()[-1].endswith(f"see {tmp_path}/summary.json")
  logged = [(x["step"], tag) for x in read_metrics(tmp_path / "metrics.jsonl") for tag in x]
  shown = shown_by_tensorboard(tmp_path)
  assert shown and {*shown} == {(s, tag) for s, tag in logged if tag not in ("step", "time")}
  described = json.loads((tmp_path / "config.json").read_text())
  assert described["versions"]["jaxscale"] == __version__


@pytest.mark.parametrize(
  ("words", "line"),
  [
    (("--version",), "jaxscale 0."),
    (("lr-find", "--config=configs/digits.py", "--out=x.png"), "--out="),
  ],
)
def test_other_commands(words, line, tmp_path):
  done = jaxscale_without(OPTIONAL, *words)
  assert line in done.stdout + done.stderr
  if line == "--out=":
    assert done.returncode == 2 and "needs the package matplotlib" in done.stderr
    assert "step" not in done.stdout  # It was refused before it trained.


@pytest.mark.parametrize("missing", ["simplejpeg", "cv2"])
def test_photographs(tmp_path, missing):
  for split in ("train", "val"):
    write_folder(tmp_path / "data", split, 16)
  config = tmp_path / "photos.py"
  config.write_text(f"""
import jaxscale as jxs
def get_config():
  data = jxs.data.ImageFolder(path={str(tmp_path / "data")!r}, image_size=16)
  return jxs.Config(model=jxs.models.MLP(hidden=(8,)), data=data,
                    optimizer=jxs.optim.SGD(lr=0.1), batch_size=8, epochs=1)
""")
  done = jaxscale_without(missing, "train", f"--config={config}", f"--workdir={tmp_path / 'run'}")
  if missing == "simplejpeg":
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("simplejpeg is not installed; Pillow decodes JPEGs") == 1
  else:
    assert done.returncode == 2 and done.stderr.startswith("error: cv2 is not installed")
    assert "workdir" not in done.stdout  # It ended before the workdir was claimed.


def test_pillow_decodes_as_simplejpeg_does(tmp_path, monkeypatch):
  from jaxscale.data import jpeg
  from support.images import jpeg_bytes

  y, x = np.mgrid[:40, :56]
  smooth = np.stack([6 * y, 4 * x, 2 * (x + y)], axis=-1).astype(np.uint8)
  data = jpeg_bytes(smooth)
  ours, kind = jpeg.decode(data, 3, exact=True, fast_dct=False)
  monkeypatch.setattr(jpeg, "simplejpeg", None)
  pixels, other = jpeg.decode(data, 3)
  assert (kind, other) == ("JPEG", "JPEG")
  np.testing.assert_array_equal(pixels, ours)
  Image.fromarray(smooth).convert("CMYK").save(tmp_path / "a.jpg")
  assert jpeg.decode((tmp_path / "a.jpg").read_bytes(), 3)[1] == "CMYK"
  with pytest.raises(ValueError, match="pixels, more than"):
    jpeg.decode(data, 3, max_pixels=10)
