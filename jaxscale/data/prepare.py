"""Prepare a TFDS dataset once, for TensorFlow-free training ever after.

    jaxscale prepare NAME [--data-dir DIR] [--manual-dir DIR]

Runs where TensorFlow is installed (the extra `tfds`; `make tfds` builds an
environment for it) and writes array_record files, which training reads without.
Fashion-MNIST needs no network where Debian packages can be had: without a
manual_dir, and if its site does not answer, it comes from `dataset-fashion-mnist`.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import tempfile
from pathlib import Path

from jaxscale.errors import ConfigError

# Debian's build strips name and time from the gzip headers; with these times
# back in place the files are byte for byte those that TFDS has checksums of.
_FASHION_MNIST_TIMES = {"train": 1504176606, "t10k": 1504176627}
_DEBIAN_PACKAGE = "dataset-fashion-mnist"
_UPSTREAM = "fashion-mnist.s3-website.eu-central-1.amazonaws.com"


def prepare(
  name: str, data_dir: str | None = None, manual_dir: str | None = None
) -> str:
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
    raise ConfigError(
      "preparing needs TensorFlow: pip install 'jaxscale[tfds]', or make tfds and run "
      "this with its python"
    ) from None
  import tensorflow_datasets as tfds

  try:
    with tempfile.TemporaryDirectory() as scratch:
      if name == "fashion_mnist" and not manual_dir and not _reachable(_UPSTREAM):
        print(f"{_UPSTREAM} does not answer; taking Debian's package")
        fashion_mnist_from_debian(Path(scratch))
        manual_dir = scratch
      builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
      if not builder.is_prepared():
        config = tfds.download.DownloadConfig(manual_dir=manual_dir)
        builder.download_and_prepare(download_config=config)
      return str(builder.data_path)
  except Exception as e:  # TFDS raises anything; its first line says what it was
    raise ConfigError(f"{name}: {str(e).strip().splitlines()[0]}") from e


def fashion_mnist_from_debian(target: Path) -> None:
  """Put upstream's four files into `target`, out of the Debian package.

  Raises:
    RuntimeError: neither installed nor to be had with apt-get.
  """
  installed = Path("/usr/share/datasets/fashion-mnist")
  if installed.is_dir():
    return _restore_headers(installed, target)
  if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
    raise RuntimeError("this is no Debian: there is no apt-get to fetch it with")
  with tempfile.TemporaryDirectory() as scratch:
    get = ["apt-get", "download", "-qq", _DEBIAN_PACKAGE]
    fetched = subprocess.run(get, cwd=scratch, capture_output=True, text=True)
    if fetched.returncode:
      raise RuntimeError(
        f"apt-get download {_DEBIAN_PACKAGE} failed (apt-get update first?): "
        + fetched.stderr.strip().splitlines()[-1]
      )
    (package,) = Path(scratch).glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
    _restore_headers(Path(scratch) / installed.relative_to("/"), target)


def _reachable(host: str) -> bool:
  """Whether a connection opens in 5 s; TFDS itself tries for minutes."""
  try:
    socket.create_connection((host, 80), timeout=5).close()
  except OSError:
    return False
  return True


def _restore_headers(source: Path, target: Path) -> None:
  """Gzip files with upstream's file name and time in their headers."""
  for path in source.glob("*.gz"):
    content, name = path.read_bytes(), path.stem
    time = struct.pack("<I", _FASHION_MNIST_TIMES[name.split("-")[0]])
    # RFC 1952: magic, deflate, FNAME flag; then time, extra flags, system, name.
    header = b"\x1f\x8b\x08\x08" + time + content[8:10] + name.encode() + b"\0"
    (target / path.name).write_bytes(header + content[10:])
