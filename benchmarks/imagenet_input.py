"""The whole ImageNet input, files to batches: jaxscale's against tf.data's, per core.

    .venv-tfds/bin/python benchmarks/imagenet_input.py      (after `make tfds jpeg`)

2,048 different JPEGs of 500x375 lie as files in 16 class directories: cut from
photographs that scikit-image ships, at random scale, place and brightness. Both
sides read the files in the same shuffled order, decode, cut the same Inception
boxes to 224x224 (bilinear, no antialiasing), flip the same ones and batch by 64,
on one thread each, in turns. tf.data decodes no more than the box
(`decode_and_crop_jpeg`), and is given the boxes for nothing where ours draws them
from each header. Speed is images a second of processor time, files in the page
cache. `ratio` is the median over turns of ours / tf.data's where both give uint8,
and `ratio_float32` where tf.data gives what its resize does, as the published
pipelines have it; ours is uint8 there as well, to be normalised on the device.
"""

from __future__ import annotations

import io
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from common import report
from PIL import Image

from jaxscale import data
from jaxscale.data import partial_jpeg
from jaxscale.data.augment import crop_box, uniform
from jaxscale.data.pipeline import shuffled

SIZE, IMAGES, CLASSES, BATCH, TURNS = 224, 2048, 16, 64, 5
PHOTOS = ("astronaut", "coffee", "chelsea", "rocket", "retina", "hubble_deep_field")


def photographs(number: int, quality: int) -> itertools.islice:
  """Yield JPEGs of 375 x 500, all different."""
  from skimage import data as photos

  rng = np.random.default_rng(0)
  originals = [Image.fromarray(getattr(photos, name)()) for name in PHOTOS]

  def cut(photo: Image.Image) -> bytes:
    scale = max(500 / photo.width, 375 / photo.height) * rng.uniform(1, 1.3)
    photo = photo.resize((int(photo.width * scale) + 1, int(photo.height * scale) + 1))
    left = int(rng.integers(0, photo.width - 499))
    top = int(rng.integers(0, photo.height - 374))
    pixels = np.asarray(photo.crop((left, top, left + 500, top + 375)))
    pixels = (pixels * rng.uniform(0.8, 1.2)).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=quality)
    return out.getvalue()

  return itertools.islice(map(cut, itertools.cycle(originals)), number)


def write_folder(root: Path) -> float:
  """Write the files in class directories; return their mean size in kilobytes."""
  total = 0
  for i, content in enumerate(photographs(IMAGES, quality=95)):
    file = root / f"n{i % CLASSES:08}" / f"n{i % CLASSES:08}_{i}.JPEG"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    total += len(content)
  return total / IMAGES / 1000


def tf_input(tf, root: Path, dtype: str):
  """Return one epoch of tf.data with the files, boxes and flips of ours, in the same order."""
  paths = sorted(root.glob("*/*.JPEG"))
  classes = sorted({path.parent.name for path in paths})
  order, draws = shuffled(IMAGES, 0, 0), uniform(0, np.arange(IMAGES))
  files = [str(paths[i]) for i in order]
  labels = np.array([classes.index(paths[i].parent.name) for i in order], np.int32)
  boxes = np.array([crop_box(375, 500, d) for d in draws], np.int32)

  def load(path, label, box, flip):
    image = tf.io.decode_and_crop_jpeg(tf.io.read_file(path), box, channels=3)
    image = tf.image.resize(image, (SIZE, SIZE))
    image = tf.cond(flip, lambda: tf.reverse(image, [1]), lambda: image)
    return tf.cast(image, dtype), label  # of float32 to itself: nothing

  dataset = tf.data.Dataset.from_tensor_slices((files, labels, boxes, draws[:, 0] < 0.5))
  options = tf.data.Options()
  options.threading.private_threadpool_size = 1
  options.threading.max_intra_op_parallelism = 1
  return dataset.map(load).batch(BATCH).with_options(options)


def main() -> None:
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  with tempfile.TemporaryDirectory() as scratch:
    kilobytes = write_folder(Path(scratch))
    theirs = {t: tf_input(tf, Path(scratch), t) for t in ("uint8", "float32")}
    ours = data.image_folder(scratch, image_size=SIZE, augment="crop")

    def run_theirs(dtype="uint8"):
      batches = theirs[dtype]
      labels = [labels.numpy() for images, labels in batches if images.numpy().size]
      return labels, IMAGES

    loaded: list[int] = []

    def counted(indices, draws):
      batch = ours.load(indices, draws)
      loaded.append(len(indices))
      return batch

    def run_ours():
      batches = data.train_batches(ours._replace(load=counted), BATCH, num_threads=1)
      labels = [next(batches)["label"] for _ in range(IMAGES // BATCH)]
      seen = -1  # what was loaded ahead counts as well, once it is all there
      while seen != len(loaded):
        seen = len(loaded)
        time.sleep(0.5)
      done = sum(loaded)
      loaded.clear()
      return labels, done

    def speed(work) -> float:
      began = time.process_time()
      _, images = work()
      return images / (time.process_time() - began)

    np.testing.assert_array_equal(run_ours()[0], run_theirs()[0])
    run_theirs("float32")
    turns = [
      (speed(run_ours), speed(run_theirs), speed(lambda: run_theirs("float32")))
      for _ in range(TURNS)
    ]
  mine, others, floats = (statistics.median(s) for s in zip(*turns, strict=True))
  ratios = sorted(a / b for a, b, _ in turns)
  report(
    "imagenet_input",
    ratio=round(statistics.median(ratios), 3),
    ratio_range=[round(ratios[0], 3), round(ratios[-1], 3)],
    ratio_float32=round(statistics.median(a / c for a, _, c in turns), 3),
    decoder=partial_jpeg.library().text,
    ours_images_per_cpu_s=round(mine),
    tf_data_images_per_cpu_s=round(others),
    tf_data_float32_images_per_cpu_s=round(floats),
    images=IMAGES,
    mean_kilobytes=round(kilobytes, 1),
    damaged=ours.damaged.count if ours.damaged else 0,
    tensorflow=tf.__version__,
  )


if __name__ == "__main__":
  main()
