"""Input: datasets, augmentation, and the deterministic pipeline of batches."""

from jaxscale.data.dataset import Dataset, DatasetInfo
from jaxscale.data.digits import digits
from jaxscale.data.images import tfds_images
from jaxscale.data.pipeline import eval_batches, to_device, train_batches
from jaxscale.data.synthetic import synthetic

__all__ = [
  "Dataset", "DatasetInfo", "digits", "eval_batches", "synthetic",
  "tfds_images", "to_device", "train_batches",
]  # fmt: skip
