"""Write the parameters of a run's checkpoint as one safetensors file.

BatchNorm statistics are in it, too. Nothing is computed: arrays are copied one after
another, on the host's processor.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, can_be_file, directory, value, whole
from jaxscale.files import expand


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.option("--workdir DIR", "of the run", directory, missing="try --workdir runs/x")
  text, hint = "replaced when the new one is whole", "try --to x.safetensors"
  is_file = value(expand, "a file in a directory, ending in .safetensors", _is_safetensors)
  parser.option("--to FILE", text, is_file, missing=hint)
  text = "jaxscale: for Config.init_from; timm: ResNet and ViT, huggingface: Llama and "
  text += "ViT, each with a config.json next to it; torchvision: ResNet and ViT"
  namings = ("jaxscale", "timm", "torchvision", "huggingface")
  parser.option("--naming NAMING", text, choices=namings, default="jaxscale")
  parser.option("--step N", "of the checkpoint (default: the newest)", whole())
  text = "average (default, where Config.ema_decay keeps one) or params, of the last "
  parser.option("--take WHICH", f"{text}step", choices=("average", "params"))
  types = ("float32", "bfloat16")
  parser.option("--dtype DTYPE", "or bfloat16 (default: float32)", choices=types)


def _is_safetensors(path: str) -> bool:
  return path.endswith(".safetensors") and can_be_file(path)


def run(args: Namespace) -> None:
  """Write the file, and print what is in it."""
  # An accelerator that somebody else uses is left alone.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from jaxscale.run.export import export

  options = {name: getattr(args, name) for name in ("step", "take", "dtype")}
  print(export(Path(args.workdir), Path(args.to), args.naming, **options))
