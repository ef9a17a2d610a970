"""Records what optimizers of PyTorch and timm make of five gradients.

PYTHONPATH=tests python tests/data/golden/record_optimizers.py, where torch and timm
are installed (recorded with torch 2.13.0 and timm 1.0.31 on a CPU in float64; Muon's
iteration too, which PyTorch has in bfloat16).
"""

import json
from pathlib import Path

import torch

from support.torch_optimizers import CASES, theirs


def main():
  """Write the fixture, next to this file."""
  torch.Tensor.bfloat16 = torch.Tensor.clone
  found = {
    name: {layer: w.reshape(-1).tolist() for layer, w in theirs(case).items()}
    for name, case in CASES.items()
  }
  path = Path(__file__).parent / "torch_optimizers.json"
  lines = [f'"{name}": {json.dumps(layers)}' for name, layers in found.items()]
  path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
  main()
