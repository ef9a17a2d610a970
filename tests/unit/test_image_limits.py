"""Images that take too much, or whose kind a decoder cannot name: never fatal."""

import io
import json
import time

import numpy as np
import pytest
from PIL import Image

from jaxscale import cli, data
from jaxscale import config as cfg
from jaxscale.data import jpeg
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.run.fit import fit
from support.configs import small_config
from support.images import jpeg_bytes, write_folder
from support.odd_images import NOISE, TOO_LARGE, bmp_of_size, jpeg_441, of_size, png_of_size
from support.tables import table

EITHER = pytest.mark.parametrize("draws", [None, np.full(64, 0.3)], ids=["evaluation", "crop"])


@EITHER
def test_a_jpeg_without_a_name_for_its_subsampling_is_read(draws):
  view, kind = jpeg.decode_view(jpeg_441(), 16, 3, draws)
  assert kind == "odd JPEG" and (view == 128).all()
  assert jpeg.decode(jpeg_441(), 1)[0].shape == (64, 32, 1)


@EITHER
@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_take_too_much_is_refused_from_its_header(name, draws):
  clock = time.process_time()
  with pytest.raises(ValueError):
    jpeg.decode_view(TOO_LARGE[name], 16, 3, draws)
  assert time.process_time() - clock < 3


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"x"}], ids=str)
def test_the_size_of_a_webp_is_known_before_it_is_opened(options, monkeypatch):
  out = io.BytesIO()
  Image.fromarray(NOISE).save(out, "WEBP", **options)
  assert jpeg.decode(out.getvalue(), 3)[1] == "WEBP"
  monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
  with pytest.raises(ValueError, match="64 x 48 pixels, more"):
    jpeg.decode(out.getvalue(), 3, max_pixels=48 * 64 - 1)


def test_a_chunk_of_a_png_that_claims_too_much_is_not_for_opencv():
  """OpenCV made room for 2 GB."""
  encoded = bytearray(png_of_size(48, 64))
  at = encoded.index(b"IDAT") - 4
  encoded[at : at + 4] = (0x7FFFFFF0).to_bytes(4, "big")
  assert not jpeg._is_whole_png(bytes(encoded))
  assert jpeg._is_whole_png(png_of_size(48, 64))
  assert jpeg.decode(bytes(encoded), 3)[1] == "PNG"  # Pillow reads what is there


def test_the_limit_is_a_setting(tmp_path):
  for encoded in (jpeg_bytes(NOISE), png_of_size(48, 64), bmp_of_size(48, 64)):
    jpeg.decode(encoded, 3, max_pixels=48 * 64)
    with pytest.raises(ValueError, match=r"64 x 48 pixels, more .*max_pixels=3071"):
      jpeg.decode(encoded, 3, max_pixels=48 * 64 - 1)
  for split in ("train", "val"):
    write_folder(tmp_path, split, 2)
  (tmp_path / "train" / "cat" / "000.jpg").write_bytes(jpeg_bytes(NOISE))
  options = {"path": str(tmp_path), "image_size": 16, "max_pixels": 24 * 32}
  train, _ = cfg.ImageFolder(**options).build()
  train.load(np.arange(4), np.full((4, train.num_draws), 0.5))
  assert train.damaged.names == ["cat/000.jpg"]


def test_a_format_that_starts_other_programs_is_not_read():
  assert jpeg.decode(of_size(48, 64, progressive=True), 3)[1] == "JPEG"  # though with scans
  out = io.BytesIO()
  Image.fromarray(NOISE).save(out, "EPS")
  with pytest.raises(ValueError, match=r"cannot identify image file$"):
    jpeg.decode(out.getvalue(), 3)


def test_a_run_trains_around_such_images(tmp_path):
  for split in ("train", "val"):
    write_folder(tmp_path, split, 8)
  bad = [TOO_LARGE[name] for name in ("a JPEG", "300 scans", "a PNG")]
  for i, content in enumerate([*bad, jpeg_441()]):
    (tmp_path / "train" / "cat" / f"{i:03}.jpg").write_bytes(content)
  dataset = data.image_folder(tmp_path / "train", image_size=16, augment="crop")
  batch = dataset.load(np.arange(16), np.full((16, dataset.num_draws), 0.4))
  assert batch["label"].tolist() == [0] * 8 + [1] * 8
  assert dataset.damaged.count == 3 and dataset.damaged.unusual == {"odd JPEG": 1}


def folder_config(path, **settings):
  files = cfg.ImageFolder(path=str(path), image_size=16, **settings)
  return small_config(data=files, batch_size=8, epochs=4)


def test_images_that_cannot_be_read_are_told_before_anything_is_compiled(tmp_path, monkeypatch):
  for split in ("train", "val"):
    for path in write_folder(tmp_path, split, 8):
      path.write_bytes(b"<html>404</html>")
  compiled = []
  monkeypatch.setattr(build.Experiment, "compile_train_step", lambda *_: compiled.append(1))
  with pytest.raises(ConfigError, match=r"the first is cat/000\.jpg \(16 bytes") as error:
    fit(folder_config(tmp_path), tmp_path / "run")
  assert "16 examples in a row cannot be read" in str(error.value) and not compiled
  assert not (tmp_path / "run" / "config.json").exists()  # another config may begin


def test_a_path_is_named_as_the_command_line_has_it(tmp_path, capsys):
  write_folder(tmp_path, "train", 2)
  for options, says in table(f"""
    path={tmp_path}/no | --config.data.path={tmp_path}/no: no such directory
    path={tmp_path} | --config.data.eval_split=val: no such directory in {tmp_path}
    path={tmp_path} train_split=x | --config.data.train_split=x: no such
"""):
    argv = ["train", "--config=digits", "--config.data=ImageFolder", f"--workdir={tmp_path}/run"]
    assert cli.main([*argv, *(f"--config.data.{option}" for option in options.split())]) == 2
    assert says in capsys.readouterr().err


def test_a_run_from_before_the_limit_resumes(tmp_path):
  for split in ("train", "val"):
    write_folder(tmp_path, split, 4)
  config = folder_config(tmp_path, max_pixels=10_000)
  workdir = tmp_path / "run"
  fit(config, workdir)
  described = json.loads((workdir / "config.json").read_text())
  del described["config"]["data"]["max_pixels"], described["identity"]
  (workdir / "config.json").write_text(json.dumps(described))
  assert fit(config, workdir).state.step == 4
