"""Write the parameters of a run's checkpoint as one safetensors file.

BatchNorm statistics are in it, too. Nothing is computed: arrays are copied one after
another, on the host's processor.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jaxscale.cli.parser import Parser, directory, whole


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.option(
    "--workdir DIR", "of the run", directory, missing="try --workdir runs/x"
  )
  parser.option(
    "--to FILE", "replaced when the new one is whole", missing="try --to x.safetensors"
  )
  parser.option(
    "--naming NAMING",
    "jaxscale: for Config.init_from; timm: ResNet (also torchvision) and ViT; "
    "huggingface: Llama, with a config.json in the same directory",
    choices=("jaxscale", "timm", "huggingface"),
    default="jaxscale",
  )
  parser.option("--step N", "of the checkpoint (default: the newest)", whole())
  parser.option(
    "--take WHICH",
    "average (default, where Config.ema_decay keeps one) or params, of the last step",
    choices=("average", "params"),
  )
  types = ("float32", "bfloat16")
  parser.option("--dtype DTYPE", "or bfloat16 (default: float32)", choices=types)


def run(args: argparse.Namespace) -> None:
  """Write the file, and print what is in it."""
  # An accelerator that somebody else uses is left alone.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from jaxscale.run.export import export

  options = {name: getattr(args, name) for name in ("step", "take", "dtype")}
  print(export(Path(args.workdir), Path(args.to), args.naming, **options))
