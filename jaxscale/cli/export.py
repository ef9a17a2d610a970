"""Write the parameters of a checkpoint as one safetensors file.

BatchNorm statistics are included. Arrays are copied one at a time on the CPU; no
accelerator is used.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxscale.cli.evaluate import add_run, workdir_of
from jaxscale.cli.parser import Namespace, Parser, can_be_file, value
from jaxscale.errors import printable
from jaxscale.files import expand

_OTHERS = ".bin", ".ckpt", ".gguf", ".json", ".npz", ".onnx", ".pt", ".pth"  # not written


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_run(parser)
  text = "the .safetensors file to write, or the folder for a model.safetensors; missing folders "
  text, hint = f"{text}are created, an existing file is replaced", "try --to x.safetensors"
  kind = value(expand, "a .safetensors file or a folder", lambda path: can_be_file(file_in(path)))
  parser.option("--to PATH", text, kind, missing=hint)
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

  options = {name: getattr(args, name) for name in ("step", "take", "dtype", "trust")}
  to = Path(file_in(args.to, "adapter_" * (args.naming == "peft")))
  print(printable(export(workdir_of(args), to, args.naming, **options), keep="\n\t"))


def file_in(path: str, prefix: str = "") -> str:
  """Return the file to write, which may be given by its folder; "" for another kind of file."""
  if path.endswith(".safetensors"):
    return path
  return "" if path.endswith(_OTHERS) else os.path.join(path, f"{prefix}model.safetensors")
