"""The parameters of a run, as a file for others: `jaxscale export`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxscale.errors import ConfigError

if TYPE_CHECKING:  # they import JAX, whose platform is set before
  from jaxscale.config.record import Described
  from jaxscale.weights import Leaf


# What is taken: prefixes of names in a checkpoint, and of paths in a safetensors file.
_PREFIXES = {
  "params": (("params/", "params/"), ("model_state/", "")),
  "average": (("average/0/", "params/"), ("average/1/", "")),
}


class Request(NamedTuple):
  """What a command line asks for; see cli/export.py."""

  workdir: Path
  to: Path
  naming: str = "jaxscale"
  step: int | None = None
  take: str | None = None
  dtype: str | None = None


def export(request: Request) -> str:
  """Write the file; returns one line of what is in it.

  Raises:
    ConfigError: there is no such run or checkpoint, or it is damaged, or the naming
      has no names for its model, or the folder has another model's config.json.
    weights.UnwrittenError: the disk failed or is full.
  """
  from jaxscale import weights
  from jaxscale.checkpoint import files
  from jaxscale.config.record import describe_run
  from jaxscale.weights import hf_config

  described = describe_run(request.workdir)
  step = _step(request)
  directory = request.workdir.absolute() / "checkpoints" / str(step)
  try:
    manifest = files.read_manifest(directory)["leaves"]
    has_average = any(name.startswith("average/0/") for name in manifest)
    if request.take == "average" and not has_average:
      raise ConfigError("--take=average: the run keeps none (Config.ema_decay=None)")
    take = request.take or ("average" if has_average else "params")
    read = functools.lru_cache(maxsize=3)(files.leaf_reader(directory))

    def part(name: str, layer: int | None) -> Any:
      return read(name) if layer is None else read(name)[layer]

    leaves = {
      ours + name.removeprefix(prefix): weights.Leaf(
        tuple(manifest[name]["shape"]), _dtype(manifest[name]["dtype"]),
        functools.partial(part, name),
      )
      for prefix, ours in _PREFIXES[take]
      for name in manifest
      if name.startswith(prefix)
    }  # fmt: skip
    fields = _hf_fields(request, described, leaves)
    size = weights.export_leaves(
      request.to,
      leaves,
      naming=request.naming,
      num_classes=described.num_classes,
      dtype=None if request.dtype is None else _dtype(request.dtype),
      metadata=_about(described, step, take),
    )
  except files.DamagedError as e:
    raise ConfigError(
      f"checkpoint {step} in {request.workdir} is damaged ({e}); give another --step"
    ) from None
  if fields is not None:
    try:
      hf_config.write_hf_config(request.to, fields)
    except OSError as e:
      where = request.to.parent / "config.json"
      raise weights.UnwrittenError(f"{where}: could not be written: {e}") from None
  what = "the average" if take == "average" else "the parameters"
  return (
    f"{request.to}: {what} of step {step}, {size / 1e6:,.1f} MB in "
    f"{request.naming}'s names"
  )


def _step(request: Request) -> int:
  from jaxscale.checkpoint import directory as checkpoint_dir

  steps = checkpoint_dir.steps(request.workdir / "checkpoints")
  if not steps:
    raise ConfigError(f"--workdir={request.workdir}: the run has saved nothing yet")
  if request.step is not None and request.step not in steps:
    raise ConfigError(
      f"--step={request.step}: not saved, there are {', '.join(map(str, steps))}"
    )
  return steps[-1] if request.step is None else request.step


def _dtype(name: str) -> Any:
  import ml_dtypes  # which numpy knows by name only then
  import numpy as np

  return np.dtype(getattr(ml_dtypes, name, name))


def _about(described: Described, step: int, take: str) -> dict[str, str]:
  """What whoever finds the file may want to know; all text."""
  data = described.data
  # As they are called in the file, and in the run's config.json.
  names = {"image_mean": "mean", "image_std": "std"}
  if described.is_text:
    names = {"vocab_size": "vocab_size", "sequence_length": "sequence_length"}
  return {
    "jaxscale": metadata.version("jaxscale"),
    "model": json.dumps(described.config["model"]),
    "data": data["name"],
    **{name: json.dumps(data[key]) for name, key in names.items() if key in data},
    "step": str(step),
    "take": take,
  }


def _hf_fields(
  request: Request, described: Described, leaves: Mapping[str, Leaf]
) -> dict[str, Any] | None:
  """The fields of the config.json next to the file; None: none is written."""
  from jaxscale import config as cfg
  from jaxscale.data.tokenizer import byte_tokenizer
  from jaxscale.weights import hf_config

  gate = leaves.get("params/layers/gate/kernel")
  if request.naming != "huggingface" or gate is None or not described.is_text:
    return None
  hf_config.hf_config_path(request.to)  # now: the file itself may take long
  config = described.settings()
  assert isinstance(config.model, cfg.Transformer)
  # Else a tokenizer knows, which need not be here.
  is_bytes = (
    getattr(config.data, "tokenizer", "bytes") == "bytes"
    and getattr(config.data, "vocab_size", None) is None
  )
  return hf_config.llama_config(
    config.model,
    hidden=gate.shape[-1],
    vocab_size=described.data["vocab_size"],
    sequence_length=described.data["sequence_length"],
    dtype=request.dtype or str(gate.dtype),
    separator=byte_tokenizer().separator if is_bytes else None,
  )
