"""Input: datasets, augmentation, and the deterministic pipeline of batches."""

from jaxscale.data.dataset import Damage, Dataset, DatasetInfo
from jaxscale.data.digits import digits
from jaxscale.data.folder import folder_classes, image_folder
from jaxscale.data.images import tfds_images
from jaxscale.data.pipeline import eval_batches, to_device, train_batches
from jaxscale.data.synthetic import synthetic

__all__ = [
  "Damage", "Dataset", "DatasetInfo", "digits", "eval_batches", "folder_classes",
  "image_folder", "synthetic", "tfds_images", "to_device", "train_batches",
]  # fmt: skip
