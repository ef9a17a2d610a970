"""Write the parameters of a checkpoint as one safetensors file.

BatchNorm statistics are included. Arrays are copied one at a time on the CPU; no
accelerator is used.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxscale.cli.evaluate import add_run, workdir_of
from jaxscale.cli.parser import Namespace, Parser, file_of


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_run(parser)
  text, hint = "the file to write; an existing one is replaced", "try --to x.safetensors"
  parser.option("--to FILE", text, file_of(".safetensors"), missing=hint)
  text = "the naming of parameters: jaxscale (for Config.init_from), timm or torchvision (ResNet, "
  text += "ViT), or huggingface (Llama, ViT), all with a LoRA merged; or peft, only the LoRA, as "
  text += "adapter_model.safetensors; timm, huggingface and peft also write a configuration"
  namings = ("jaxscale", "timm", "torchvision", "huggingface", "peft")
  parser.option("--naming NAMING", text, choices=namings, default="jaxscale")
  text = "the parameters of the step: average or params (default: average with Config.ema_decay)"
  parser.option("--take WHICH", text, choices=("average", "params"))
  text, types = "the type: float32 or bfloat16 (default: float32)", ("float32", "bfloat16")
  parser.option("--dtype DTYPE", text, choices=types)


def run(args: Namespace) -> None:
  """Write the file, and print a summary of its contents."""
  # The CPU suffices, and another process may be using the accelerator.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from jaxscale.run.export import export

  options = {name: getattr(args, name) for name in ("step", "take", "dtype")}
  print(export(workdir_of(args), Path(args.to), args.naming, **options))
