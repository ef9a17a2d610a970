"""Prepare a TFDS dataset once, so that training needs no TensorFlow.

    jaxscale prepare NAME [--data-dir DIR] [--manual-dir DIR]

This requires TensorFlow (the extra `tfds`; `make tfds` creates an environment with it). It
writes array_record files, which training reads without TensorFlow.
"""

from __future__ import annotations

from jaxscale.data.tfds import import_tfds
from jaxscale.errors import ConfigError


def prepare(name: str, data_dir: str | None = None, manual_dir: str | None = None) -> str:
  """Download a dataset if needed, and write it as array_record files.

  Args:
    name: the name, as in `tfds.builder(name)`.
    data_dir: the directory to write to; None uses TFDS's default.
    manual_dir: the directory of manually downloaded files.

  Returns:
    The directory of the prepared dataset.

  Raises:
    ConfigError: TensorFlow is not installed, or TFDS fails.
  """
  try:
    import tensorflow  # noqa: F401
  except ImportError:
    fix = "run pip install 'jaxscale[tfds]', or `make tfds` and use its Python"
    raise ConfigError(f"preparing a dataset needs TensorFlow; {fix}") from None
  tfds = import_tfds()
  try:
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    if not builder.is_prepared():
      config = tfds.download.DownloadConfig(manual_dir=manual_dir)
      builder.download_and_prepare(download_config=config)
    return str(builder.data_path)
  except Exception as e:  # TFDS raises any exception; its first line has the reason.
    raise ConfigError(f"{name}: {str(e).strip().splitlines()[0]}") from e
