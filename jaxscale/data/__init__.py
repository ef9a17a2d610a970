"""Input: datasets, augmentation, and the deterministic pipeline of batches."""

from jaxscale.data.dataset import Damage, Dataset, DatasetInfo, TextInfo, batch_shapes
from jaxscale.data.folder import folder_classes, image_folder
from jaxscale.data.images import tfds_images
from jaxscale.data.pipeline import eval_batches, to_device, train_batches
from jaxscale.data.python_docs import text
from jaxscale.data.synthetic_images import synthetic
from jaxscale.data.tfds_documents import tfds_text
from jaxscale.data.token_files import text_files
from jaxscale.data.uci_digits import digits

__all__ = [
  "Damage", "Dataset", "DatasetInfo", "TextInfo", "batch_shapes", "digits",
  "eval_batches", "folder_classes", "image_folder", "synthetic", "text", "text_files",
  "tfds_images", "tfds_text", "to_device", "train_batches",
]  # fmt: skip
