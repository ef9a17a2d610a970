"""Tokenize text, prepare TFDS datasets, or build the decoder for crops of JPEG images.

`jaxscale prepare tokens PATH --to DIR` tokenizes the text files of PATH in several processes;
`TextFiles(path=DIR)` then trains on the tokens. After an interruption, finished files are kept.
`jaxscale prepare NAME` writes a TFDS dataset as array_record files, which training reads without
TensorFlow; this needs TensorFlow (the extra `tfds`; `make tfds` creates an environment for it).
`jaxscale prepare jpeg` builds the decoder, which needs a C compiler and the header of
libjpeg-turbo.
"""

from __future__ import annotations

import os

from jaxscale.cli.parser import Namespace, Parser, whole
from jaxscale.errors import ConfigError


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  text = "a TFDS dataset, jpeg, or the word tokens and a directory of text"
  parser.words("names", "NAME", text, missing="try jaxscale prepare mnist")
  parser.option("--data-dir DIR", "the directory to write to (default: TFDS's own)")
  parser.option("--manual-dir DIR", "the directory of your downloads (default: TFDS's own)")
  parser.option("--to DIR", "the directory to write tokens to (default: none)")
  parser.option("--tokenizer FILE", "the path of a tokenizer.json, or bytes", default="bytes")
  parser.option("--separator TOKEN", "the token after each document (default: the usual)", str)
  parser.option("--splits NAMES", "the splits of the text", str, default="train,val")
  parser.option("--field NAME", "the field of .jsonl and .parquet files", str, default="text")
  parser.option("--encoding NAME", "the encoding of .txt files", str, default="utf-8")
  text = "the processes that tokenize (default: one per core)"
  parser.option("--workers N", text, whole(1, 4096))


def run(args: Namespace) -> None:
  """Prepare tokens or each dataset, and print their location."""
  if args.names[0] == "tokens":
    from jaxscale.data.prepare_tokens import prepare_tokens

    if len(args.names) != 2 or args.to is None:
      raise ConfigError("prepare tokens: give a directory of text and --to DIR")
    names = "tokenizer", "separator", "encoding", "field"
    options = {name: getattr(args, name) for name in names}
    options["num_workers"] = args.workers or len(os.sched_getaffinity(0))
    for split in args.splits.split(","):
      print(prepare_tokens(args.names[1], split, args.to, **options))
    return
  for name in args.names:
    if name == "jpeg":
      from jaxscale.data.partial_jpeg import build, library

      print(f"{build()}: built")
      print(library().text)
    else:
      from jaxscale.data.prepare import prepare

      print(f"prepared: {prepare(name, args.data_dir, args.manual_dir)}")
