"""Prepare TFDS datasets as array_record files, or build the decoder for crops of JPEG images.

Training reads array_record files without TensorFlow. `jaxscale prepare jpeg` builds the
decoder, which needs a C compiler and the header of libjpeg-turbo. Datasets need TensorFlow
(the extra `tfds`; `make tfds` creates an environment for it).
"""

from __future__ import annotations

from jaxscale.cli.parser import Namespace, Parser


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.words("names", "NAME", "a TFDS dataset, or jpeg", missing="try jaxscale prepare mnist")
  parser.option("--data-dir DIR", "the directory to write to (default: TFDS's own)")
  parser.option("--manual-dir DIR", "the directory of your downloads (default: TFDS's own)")


def run(args: Namespace) -> None:
  """Prepare each dataset and print its location."""
  for name in args.names:
    if name == "jpeg":
      from jaxscale.data.partial_jpeg import build, library

      print(f"{build()}: built")
      print(library().text)
    else:
      from jaxscale.data.prepare import prepare

      print(f"prepared: {prepare(name, args.data_dir, args.manual_dir)}")
