"""Prepare a dataset of TFDS as array_record files, or build the decoder of JPEG crops.

Training reads such files without TensorFlow. `jaxscale prepare jpeg` builds the
decoder.

Datasets need TensorFlow (the extra `tfds`; `make tfds` builds an environment for it),
the decoder a C compiler and libjpeg-turbo's header.
"""

from __future__ import annotations

from jaxscale.cli.parser import Namespace, Parser


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.words("names", "NAME", "a TFDS dataset, or jpeg", missing="try jaxscale prepare mnist")
  parser.option("--data-dir DIR", "where to write (default: TFDS's own)")
  parser.option("--manual-dir DIR", "where files downloaded by hand are")


def run(args: Namespace) -> None:
  """Prepare, and print where the result is."""
  for name in args.names:
    if name == "jpeg":
      from jaxscale.data.partial_jpeg import build

      print(f"{build()}: built; training on crops of JPEGs uses it from now on")
    else:
      from jaxscale.data.prepare import prepare

      print(f"prepared: {prepare(name, args.data_dir, args.manual_dir)}")
