"""JPEG decode + random resized crop: jaxscale's against tf.data's, per core.

    .venv-tfds/bin/python benchmarks/jpeg_input.py      (after `make tfds jpeg`)

One thread each, in turns, the same 48 JPEGs of 500x375 (cut from photographs
that scikit-image ships) and the same crop boxes, to 224x224. Speed is images a
second of processor time; `ratio` is the median over turns of ours / tf.data's
`decode_and_crop_jpeg` + bilinear resize.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from common import report
from imagenet_input import photographs

from jaxscale.data import partial_jpeg
from jaxscale.data.augment import crop_box, uniform
from jaxscale.data.jpeg import decode_view

SIZE, IMAGES, TURNS = 224, 480, 9


def main() -> None:
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  jpegs = list(photographs(48, quality=93))
  draws = uniform(0, np.arange(IMAGES))
  boxes = np.array([crop_box(375, 500, d) for d in draws], np.int32)
  flips = draws[:, 0] < 0.5

  def tf_view(data, box, flip):
    image = tf.io.decode_and_crop_jpeg(data, box, channels=3)
    image = tf.image.resize(image, (SIZE, SIZE))
    return tf.cond(flip, lambda: tf.reverse(image, [1]), lambda: image)

  dataset = tf.data.Dataset.from_tensor_slices(
    ([jpegs[i % 48] for i in range(IMAGES)], boxes, flips)
  ).map(tf_view)
  options = tf.data.Options()
  options.threading.private_threadpool_size = 1
  options.threading.max_intra_op_parallelism = 1
  dataset = dataset.with_options(options)

  def theirs():
    for image in dataset:
      image.numpy()

  def ours():
    for i in range(IMAGES):
      decode_view(jpegs[i % 48], SIZE, 3, draws[i])

  def speed(work):
    began = time.process_time()
    work()
    return IMAGES / (time.process_time() - began)

  speed(theirs), speed(ours)
  pairs = [(speed(ours), speed(theirs)) for _ in range(TURNS)]
  mine, others = (statistics.median(s) for s in zip(*pairs, strict=True))
  report(
    "jpeg_input",
    ratio=round(statistics.median(a / b for a, b in pairs), 3),
    decoder=partial_jpeg.library().text,
    ours_images_per_cpu_s=round(mine),
    tf_data_images_per_cpu_s=round(others),
    mean_kilobytes=round(sum(map(len, jpegs)) / 48 / 1000, 1),
    tensorflow=tf.__version__,
  )


if __name__ == "__main__":
  main()
