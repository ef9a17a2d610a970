"""Export the parameters of a run to a file: `jaxscale export`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes  # Importing it makes numpy know names such as "bfloat16".
import numpy as np

from jaxscale import __version__, weights
from jaxscale.checkpoint import checkpoint_files, load_params
from jaxscale.config import LoRA
from jaxscale.config.record import Described, describe_run, from_plain
from jaxscale.data.preprocessing import eval_resize
from jaxscale.data.tokenizer import byte_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.files import write_json
from jaxscale.models import config_json, hf_config, timm_config
from jaxscale.run import model_files
from jaxscale.training.custom_loss import LossState
from jaxscale.weights import adapter

# Prefixes of names in a checkpoint and of paths in a safetensors file.
_PREFIXES = {"params": (("params/", "params/"), ("model_state/", ""))}
# Frozen parameters have no average.
_PREFIXES |= {"average": (("params/", "params/"), ("average/0/", "params/"), ("average/1/", ""))}


def export(
  workdir: Path,
  to: Path,
  naming: str = "jaxscale",
  *,
  step: int | str | None = None,
  take: str | None = None,
  dtype: str | None = None,
  trust: bool = False,
) -> str:
  """Write the file; return one line that describes its content.

  Args:
    workdir: the run's workdir.
    to: the output file; cli/export.py describes the formats.
    naming: the naming scheme of the arrays.
    step: the step of the checkpoint; "best" selects the best by `checkpoint.best_metric`, and
      None the newest one.
    take: "params" or "average"; None selects the average if the run keeps one.
    dtype: the dtype of the arrays; None keeps each array's dtype.
    trust: whether to execute code of the run although other users could have written it.

  Raises:
    ConfigError: the run or checkpoint does not exist or is damaged, the naming scheme
      does not support the model, or the folder has the config.json of another model.
    weights.UnwrittenError: writing failed, for example because the disk is full.
  """
  described = describe_run(workdir, trust=trust)
  step = load_params.saved_steps(workdir, step)[-1]
  path = workdir.absolute() / "checkpoints" / str(step)
  try:
    manifest = checkpoint_files.read_manifest(path)["leaves"]
    take = load_params.chosen(manifest, take)
    read = functools.lru_cache(maxsize=3)(checkpoint_files.leaf_reader(path))

    def part(name: str, layer: int | None) -> Any:
      return read(name) if layer is None else read(name)[layer]

    leaves, prefixes = {}, _PREFIXES[take]
    of_state = [name for name in manifest if name.startswith(prefixes[-1][0])]
    parts = {name.removeprefix(prefixes[-1][0]).partition("/")[0] for name in of_state}
    if "loss" in parts <= {*LossState._fields}:  # The state of the loss is not exported.
      prefixes = *prefixes[:-1], (f"{prefixes[-1][0]}model/", "")
    for prefix, ours in prefixes:
      for name in (n for n in manifest if n.startswith(prefix)):
        shape, kind = tuple(manifest[name]["shape"]), _dtype(manifest[name]["dtype"])
        leaf = weights.Leaf(shape, kind, functools.partial(part, name))
        leaves[ours + name.removeprefix(prefix)] = leaf
    own = _lora_of(described)
    if naming == "peft":
      adapter.check_adapter(to, leaves, described.config.get("trainable"))
    elif own is not None:
      leaves = adapter.merged_leaves(leaves, own.scale)
    fields, note = _config_fields(to, described, naming, leaves, dtype)
    classes = (fields or {}).get("vocab_size", described.num_classes)
    options: dict[str, Any] = {"naming": naming, "num_classes": classes}
    options |= {"dtype": None if dtype is None else _dtype(dtype)}
    about = _about(described, step, take)
    size = weights.export_leaves(to, leaves, metadata=about, **options)
  except checkpoint_files.DamagedError as e:
    fix = "use another step"
    raise ConfigError(f"checkpoint {step} in {workdir} is damaged ({e}); {fix}") from None
  try:
    if fields is not None:
      config_json.write_config_json(to, fields)
      if described.is_text:
        note = model_files.write(workdir, to.parent, fields)
      elif naming == "huggingface" and described.data["dtype"] == "uint8":
        write_json(to.parent / "preprocessor_config.json", _preprocessor(described))
    if naming == "peft":
      shapes = {name: leaf.shape for name, leaf in leaves.items()}
      adapter.write_adapter_config(to, shapes, own, described.config["init_from"])
  except OSError as e:
    problem = f"{e.filename or to.parent}: could not be written: {e.strerror or e}"
    raise weights.UnwrittenError(problem) from None
  what = "the average" if take == "average" else "the parameters"
  return f"{to}: {what} of step {step}, {size / 1e6:,.1f} MB in {naming}'s names{note}"


def _dtype(name: str) -> Any:
  return np.dtype(getattr(ml_dtypes, name, name))


def _lora_of(described: Described) -> LoRA | None:
  """Return the adapter of a run, whose other settings need not be readable."""
  fields = described.config.get("adapter", {})
  options: Any = {"folder": described.workdir, "trust": described.trust}
  return from_plain(LoRA, fields, **options) if fields.get("class") == "LoRA" else None


def _about(described: Described, step: int, take: str) -> dict[str, str]:
  """Return the metadata of the exported file, all values as text."""
  data = described.data
  # Keys are spelled as in the exported file and in the run's config.json.
  names = {"image_mean": "mean", "image_std": "std", "class_names": "class_names"}
  if described.is_text:
    names = {"vocab_size": "vocab_size", "sequence_length": "sequence_length"}
  about = {name: json.dumps(data[key]) for name, key in names.items() if data.get(key)}
  about |= {"jaxscale": __version__, "step": str(step), "take": take}
  return about | {"model": json.dumps(described.config["model"]), "data": data["name"]}


def _config_fields(
  to: Path, described: Described, naming: str, leaves: dict[str, Any], dtype: str | None
) -> tuple[dict[str, Any] | None, str]:
  """Return the fields of the config.json next to the file, or None, and a note."""
  if naming == "timm":
    return _timm_fields(to, described)
  up = leaves.get("params/layers/up/kernel")
  if naming != "huggingface" or up is None:
    return None, ""
  config = described.settings()
  is_vit, is_llama = (hasattr(config.model, x) for x in ("patch", "rope_theta"))
  if not (is_vit or is_llama):
    return None, ""
  config_json.config_json_path(to)  # Fail now: writing the weights may take long.
  common = {"hidden": up.shape[-1], "dtype": dtype or str(up.dtype)}
  if is_vit:
    return hf_config.vit_config(config.model, described.data, **common), ""
  is_bytes = getattr(config.data, "tokenizer", "bytes") == "bytes"
  is_bytes &= getattr(config.data, "vocab_size", None) is None
  common["separator"] = byte_tokenizer().separator if is_bytes else None
  sizes = {name: described.data[name] for name in ("vocab_size", "sequence_length")}
  ours = hf_config.llama_config(config.model, **sizes, **common)
  rows = leaves["params/embed/table"].shape[0]
  return model_files.config_json(described.workdir, config, ours, rows), ""


def _timm_fields(to: Path, described: Described) -> tuple[dict[str, Any] | None, str]:
  """Return the fields of the config.json to write, or None and a note with the reason."""
  try:
    config_json.config_json_path(to)
  except ConfigError:
    other = "the config.json in this folder belongs to another file, so none is written"
    return None, f" ({other})"
  if "image_shape" in described.data:
    fields = timm_config.timm_config(described.settings().model, described.data)
    if fields is not None:
      view, crop = eval_resize(described.config["data"])
      fields["pretrained_cfg"] |= {"interpolation": view, "crop_pct": crop}
      return fields, ""
  return None, " (timm has no such model, so no config.json is written)"


def _preprocessor(described: Described) -> dict[str, Any]:
  """Return the preprocessor_config.json with which transformers prepares images."""
  _, width, channels = described.data["image_shape"]
  view, crop = eval_resize(described.config["data"])
  shorter = {"shortest_edge": int(width / crop)}
  fields = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": shorter}
  fields |= {"resample": {"bilinear": 2, "bicubic": 3}[view], "do_center_crop": True}
  fields |= {"crop_size": {"height": width, "width": width}, "do_normalize": True}
  for name in ("mean", "std"):
    fields[f"image_{name}"] = (np.broadcast_to(described.data[name], channels) / 255).tolist()
  return fields | {"do_rescale": True, "rescale_factor": 1 / 255, "do_convert_rgb": channels == 3}
