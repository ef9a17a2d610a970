"""Prepare a TFDS dataset once, for TensorFlow-free training ever after.

    jaxscale prepare NAME [--data-dir DIR] [--manual-dir DIR]

Runs where TensorFlow is installed (the extra `tfds`; `make tfds` builds an
environment for it) and writes array_record files, which training reads without.
"""

from __future__ import annotations

from jaxscale.errors import ConfigError


def prepare(name: str, data_dir: str | None = None, manual_dir: str | None = None) -> str:
  """Download (if need be) and write a dataset as array_record files.

  Args:
    name: as in `tfds.builder(name)`.
    data_dir: where to write; None: TFDS's default.
    manual_dir: where files are that were downloaded by hand.

  Returns:
    Where the prepared dataset is.

  Raises:
    ConfigError: TensorFlow is not installed, or TFDS refuses.
  """
  try:
    import tensorflow  # noqa: F401
  except ImportError:
    fix = "pip install 'jaxscale[tfds]', or make tfds and run this with its python"
    raise ConfigError(f"preparing needs TensorFlow: {fix}") from None
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    if not builder.is_prepared():
      config = tfds.download.DownloadConfig(manual_dir=manual_dir)
      builder.download_and_prepare(download_config=config)
    return str(builder.data_path)
  except Exception as e:  # TFDS raises anything; its first line says what it was
    raise ConfigError(f"{name}: {str(e).strip().splitlines()[0]}") from e
