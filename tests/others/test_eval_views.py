"""Evaluation views against those of torchvision and timm, as they are installed."""

import io

import numpy as np
import pytest
from PIL import Image

from jaxscale import data
from jaxscale.data import jpeg

pytest.importorskip("torch")
transforms = pytest.importorskip("torchvision.transforms")
timm_data = pytest.importorskip("timm.data")

SHAPES = [(375, 500), (500, 333), (256, 256), (90, 121), (400, 151), (213, 189)]


def encoded(photo, shape, quality=90):
  file = io.BytesIO()
  Image.fromarray(np.resize(photo, (*shape, 3))).save(file, "JPEG", quality=quality)
  return file.getvalue()


def assert_same(file, size, view, theirs):
  """One level of 255 apart in at most one pixel of 1,000; found: nowhere."""
  wanted = np.asarray(theirs(Image.open(io.BytesIO(file)).convert("RGB")))
  got, _ = jpeg.decode_view(file, size, 3, None, view)
  apart = np.abs(got.astype(int) - wanted.astype(int))
  assert apart.max() <= 1 and (apart > 0).mean() <= 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("resize", [256, 232])
def test_torchvisions_view(photo, shape, resize):
  """Expect the view of torchvision's ResNet-50: 256 in the first weights, 232 in the second."""
  theirs = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(224)])
  view = data.CenterCrop("bilinear", 224 / resize)
  assert_same(encoded(photo, shape), 224, view, theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.875, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_timms_view(photo, shape, share, interpolation):
  made = timm_data.create_transform(
    input_size=(3, 160, 160), crop_pct=share, interpolation=interpolation
  )
  theirs = transforms.Compose(made.transforms[:2])  # the rest makes it a tensor
  names = [type(t).__name__ for t in made.transforms]
  assert names[:2] == ["Resize", "CenterCrop"]
  view = data.CenterCrop(interpolation, share)
  assert_same(encoded(photo, shape), 160, view, theirs)
