"""Files of models with adapters (`models.lora`): merged, or an adapter in PEFT's format.

The format is that of PEFT 0.21 (utils/save_and_load.py, tuners/lora/config.py): the factors
in adapter_model.safetensors, under the names of the adapted modules, beside an
adapter_config.json.
"""

from __future__ import annotations

import collections
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import invalid
from jaxscale.files import write_json
from jaxscale.models import lora
from jaxscale.weights.names import naming_of
from jaxscale.weights.save import Leaf

FILE = "adapter_model.safetensors"


def merged_leaves(leaves: Mapping[str, Leaf], scale: float) -> dict[str, Leaf]:
  """Return leaves with W + scale A B in place of each adapted kernel, without A and B."""

  def read(name: str, layer: int | None) -> np.ndarray | None:
    kernel, a, b = (leaves[name + suffix].read(layer) for suffix in ("", lora.A, lora.B))
    if kernel is None or a is None or b is None:
      return None
    return kernel + np.asarray(scale, kernel.dtype) * (a @ b)

  return {
    name: leaf._replace(read=functools.partial(read, name)) if name + lora.A in leaves else leaf
    for name, leaf in leaves.items()
    if not re.search(lora.LEAVES, name)
  }


def write_adapter_config(
  path: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]], settings: Any, base: str | None
) -> None:
  """Write the adapter_config.json for an adapter's file.

  Args:
    path: the path of the file.
    shapes: the shapes of all leaves of the model, by path.
    settings: settings with the fields of `config.LoRA`.
    base: the file or folder of the model that is adapted; None if there is none.

  Raises:
    OSError: the disk failed or is full.
  """
  links = naming_of("huggingface", {n: s for n, s in shapes.items() if not lora.kernel_of(n)[1]})
  # The names of modules below the layers, e.g. self_attn.q_proj, and their last parts.
  modules = {
    link.ours: re.sub(r".*\.\d+\.", "", link.theirs.removesuffix(".weight")) for link in links.links
  }
  last = {ours: module.rpartition(".")[2] for ours, module in modules.items()}
  is_unique = collections.Counter(last.values())
  names = {last[n] if is_unique[last[n]] == 1 else modules[n] for n in last if n + lora.A in shapes}
  alpha = settings.alpha
  fields = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM" if "params/embed/table" in shapes else None,
    "base_model_name_or_path": base,
    "r": settings.rank,
    "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "use_rslora": settings.scale_by_sqrt,
    "target_modules": sorted(names),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }
  write_json(Path(path).parent / "adapter_config.json", fields)


def check_adapter(path: str | os.PathLike, leaves: Mapping[str, Any], trained: str | None) -> None:
  """Raise before writing if PEFT could not read the file, or it would lack trained parameters.

  Args:
    path: the path of the file.
    leaves: all leaves of the model, by path.
    trained: the pattern of parameters that were trained beside the adapter.

  Raises:
    ConfigError: the file has another name, or cannot hold what was trained.
  """
  if not any(name.endswith(lora.A) for name in leaves):
    fix = "use another naming"
    raise invalid("--naming", "peft", "needs a run with Config.adapter=LoRA", fix)
  if trained is not None:
    problem = f"lacks the parameters that Config.trainable={trained!r} has also trained"
    raise invalid("--naming", "peft", problem, "use huggingface, which merges the adapter")
  if Path(path).name != FILE:
    raise invalid("--to", str(path), "has a name that PEFT does not read", f"use DIR/{FILE}")
