"""Small files of a pretrained model and of the tokenizer, which belong to exports of a run.

A run copies them into its workdir when it starts, because `init_from` and the tokenizer may
be moved, changed or on another machine when the run is exported.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from jaxscale.config import Config
from jaxscale.data.tokenizer import read_tokenizer, tokenizer_file
from jaxscale.errors import ConfigError
from jaxscale.files import expand, read_bytes, read_json, replacing, write_json
from jaxscale.models.config_json import OURS
from jaxscale.models.pretrained_folder import compare_settings

FOLDER = "pretrained"  # in the workdir
_MODEL = "config.json", "generation_config.json"
_TOKENIZER = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
  vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json""".split()


def keep(config: Config, workdir: Path) -> None:
  """Copy the files of the run's pretrained model and tokenizer into its workdir.

  The data's tokenizer comes first; data of token ids have that of the pretrained model. Files
  that no longer exist stay as they are in the workdir, since a run resumes without them.
  """
  files: dict[str, Path] = {}
  name = getattr(config.data, "tokenizer", None)
  has_ids = getattr(config.data, "vocab_size", None) is not None
  if config.init_from is not None:
    model = Path(expand(config.init_from))
    folder = model if model.is_dir() else model.parent
    names = [*_MODEL, *(_TOKENIZER if name is None or has_ids else ())]
    files |= {name: folder / name for name in names}
  if name not in (None, "bytes") and not has_ids:
    path = tokenizer_file(name)
    others = _TOKENIZER if path.name == "tokenizer.json" else ()
    files |= {name: path.with_name(name) for name in others} | {"tokenizer.json": path}
  if not files:
    shutil.rmtree(workdir / FOLDER, ignore_errors=True)  # of other settings, before any step
  for name, path in files.items():
    if path.is_file():
      (workdir / FOLDER).mkdir(exist_ok=True)
      _copy(path, workdir / FOLDER / name)


def config_json(workdir: Path, config: Config, ours: dict[str, Any], rows: int) -> dict[str, Any]:
  """Return the config.json of an exported language model.

  It is that of the pretrained model, if there is one, with what training changed.

  Args:
    workdir: the workdir of the run.
    config: the settings of the run.
    ours: the fields of `hf_config.llama_config`.
    rows: the rows of the embedding; if the pretrained model has as many, all of them are
      exported, although the data have fewer tokens.
  """
  kept, end = workdir / FOLDER, ours["eos_token_id"]
  with contextlib.suppress(ConfigError):  # There is none, or `tokenizers` is not installed.
    end = read_tokenizer(str(kept), getattr(config.data, "separator", None)).separator
  before = read_json(kept / "config.json", {"model_type": str})
  if not before or compare_settings(before, config.model, None, (), True).problems:
    return ours | {"bos_token_id": end, "eos_token_id": end}
  fields = {name: ours[name] for name in ("vocab_size", "tie_word_embeddings", "torch_dtype")}
  fields |= {"vocab_size": rows} if before.get("vocab_size") == rows else {}
  length = max(before.get("max_position_embeddings", 0), ours["max_position_embeddings"])
  fields |= {"max_position_embeddings": length, "eos_token_id": _ids(before, end)}
  return {k: v for k, v in before.items() if k not in ("dtype", *OURS)} | fields


def write(workdir: Path, folder: Path, fields: dict[str, Any]) -> str:
  """Write the files of generation and tokenizer next to an exported language model.

  Args:
    workdir: the workdir of the run.
    folder: the folder of the exported file.
    fields: the config.json there.

  Returns:
    A note for the user.
  """
  kept, ends = workdir / FOLDER, {name: fields.get(name) for name in ("bos_token_id",)}
  generation = read_json(kept / "generation_config.json")
  ends |= generation | {"eos_token_id": _ids(generation, fields["eos_token_id"])}
  write_json(folder / "generation_config.json", ends)
  found = [name for name in _TOKENIZER if (kept / name).exists()]
  for name in found:
    _copy(kept / name, folder / name)
  if "tokenizer.json" in found and "tokenizer_config.json" not in found:
    # Without it, transformers would build the tokenizer of the architecture.
    added = read_json(kept / "tokenizer.json").get("added_tokens", [])
    ends = [token["content"] for token in added if token["id"] == fields["eos_token_id"]]
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": [*ends, None][0]}
    write_json(folder / "tokenizer_config.json", plain)
  return ", with its tokenizer" if found else "; no tokenizer is known, so none is written"


def _copy(source: Path, target: Path) -> None:
  """Replace a file by a copy of another one, without following a link at the target."""
  with replacing(target) as file:
    file.write(read_bytes(source))


def _ids(fields: dict[str, Any], end: Any) -> Any:
  """Return `eos_token_id` of fields with more tokens: an id, a list of ids, or None."""
  values = fields.get("eos_token_id"), end
  ids = [x for v in values for x in (v if isinstance(v, list) else [v]) if x is not None]
  ids = list(dict.fromkeys(ids))
  return ids if len(ids) > 1 else next(iter(ids), None)
