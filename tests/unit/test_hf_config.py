"""The config.json next to parameters: what of it is compared, and the messages."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale.data import DatasetInfo, TextInfo
from jaxscale.errors import ConfigError
from jaxscale.models import hf_config
from jaxscale.models.hf_config import llama_config
from jaxscale.weights.check import check_source
from jaxscale.weights.safetensors import write
from support.errors import config_error
from support.tables import columns, fields, words

# Settings that are not the defaults, where transformers and we have the same.
LLAMA = cfg.Transformer(
  num_layers=2, width=32, num_heads=4, num_kv_heads=2, rope_theta=5e5, norm_eps=1e-5
)
SIZES = {"hidden": 64, "vocab_size": 256, "sequence_length": 64, "dtype": "float32"}
TEXT = TextInfo("words", 256, 64)
IMAGES = DatasetInfo("photos", (224, 224, 3), 7, (127.5,), (127.5,))
HEAD = ("model.embed_tokens.weight", "lm_head.weight")


def check(folder, reported, *, model=LLAMA, naming="huggingface", names=HEAD, info=TEXT, **more):
  """Return the line that reports a difference, or the notes, or None."""
  (folder / "config.json").write_text(json.dumps(reported))
  path = folder / "x.safetensors"
  try:
    notes = check_source(path, naming, names, model, info, **more)
  except ConfigError as e:
    where, _, line = str(e).partition(": belongs to a different model: ")
    assert where == str(folder / "config.json") and "\n" not in line
    assert check_source(path, "jaxscale", names, model, info) == []
    return line
  return "; ".join(note.removeprefix(f"{folder / 'config.json'}: ") for note in notes)


def changed(**fields):
  """Return the config.json of Llama with some fields changed; None removes one."""
  reported = llama_config(LLAMA, **SIZES) | fields
  return {k: v for k, v in reported.items() if k not in fields or v is not None}


def test_a_head_beside_tied_embeddings_is_noted(tmp_path):
  """The file's own is used, as transformers 5 does, which warns."""
  tied = changed(tie_word_embeddings=True)
  assert "has an lm_head.weight, which is used" in check(tmp_path, tied)
  assert check(tmp_path, tied, names=HEAD[:1]) == ""
  assert check(tmp_path, tied, init_head=True) == ""


KINDS = columns(fields, str)("""
 | llama
qk_norm=True | qwen3
qkv_bias=True | qwen2
rope_factor=8.0 rope_low=2.0 rope_length=32 | llama
""")


@pytest.mark.parametrize("options, kind", KINDS)
@pytest.mark.parametrize("groups", [None, 2])
def test_what_is_written_for_a_model_is_of_that_model(groups, options, kind, tmp_path):
  model = cfg.Transformer(width=32, num_kv_heads=groups, **options)
  reported = llama_config(model, **SIZES)
  assert reported["model_type"] == kind
  assert check(tmp_path, reported, model=model) == ""
  assert "in the file" in check(tmp_path, reported)


def test_what_transformers_has_no_model_for_is_not_written():
  model = cfg.Transformer(qk_norm=True, qkv_bias=True)
  with pytest.raises(ConfigError, match="no model with both; use --naming jaxscale"):
    llama_config(model, **SIZES)


TRANSFORMERS_5 = {"rope_type": "default", "rope_theta": 5e5}
SAME = [
  {"rope_theta": None, "rope_parameters": TRANSFORMERS_5},
  *(
    fields(line)
    for line in """
head_dim=None
rope_theta=500_000
rope_scaling={'type':'default'}
hidden_act='swish'
model_type='mistral' sliding_window=64
model_type='mistral' sliding_window=8 layer_types=['full_attention']
rms_norm_eps=None rope_theta=None model_type=None
quantity=None
""".splitlines()
  ),
]


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_the_same_model_in_other_words(fields, tmp_path):
  assert check(tmp_path, changed(**fields)) == ""


QWEN = dataclasses.replace(LLAMA, qkv_bias=True)


@pytest.mark.parametrize(
  "fields", [{"use_sliding_window": False}, {"layer_types": ["full_attention"]}, {}]
)
def test_a_window_of_qwen_that_is_not_used(fields, tmp_path):
  fields |= {"model_type": "qwen2", "sliding_window": 8}
  assert check(tmp_path, changed(**fields), model=QWEN) == ""
  slides = changed(**fields | {"layer_types": ["full_attention", "sliding_attention"]})
  assert check(tmp_path, slides, model=QWEN).startswith("sliding_window is 8 in the file")


def test_the_window_that_a_file_of_mistral_does_not_say(tmp_path):
  long = TextInfo("words", 256, 5000)
  says = "sliding_window is 4096 in the file and the model attends to all tokens"
  assert check(tmp_path, changed(model_type="mistral"), info=long).startswith(says)
  without = changed(model_type="mistral") | {"sliding_window": None}
  assert check(tmp_path, without, info=long) == ""
  for kind, model in (("llama", LLAMA), ("qwen2", QWEN)):
    assert check(tmp_path, changed(model_type=kind), model=model, info=long) == ""


def test_fields_that_are_not_known_are_named(tmp_path):
  more = {"logit_scale": 0.5, "quantity": 3, "off": None}
  says = "not compared, as their meaning is unknown: logit_scale, quantity"
  assert check(tmp_path, changed(**more)) == says
  many = {f"x{i}": i for i in range(8)}
  assert check(tmp_path, changed(**many)).endswith("x0, x1, x2, x3, x4 and 3 more")


SCALED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALED |= dict(original_max_position_embeddings=8192)


def test_scaled_positions_are_settings(tmp_path):
  scaled = dataclasses.replace(LLAMA, rope_factor=8.0)
  new = {"rope_theta": None, "rope_parameters": SCALED | {"rope_theta": 5e5}}
  old = {k: v for k, v in SCALED.items() if k != "rope_type"} | {"type": "llama3"}
  for scaling in ({"rope_scaling": SCALED}, {"rope_scaling": old}, new):
    assert check(tmp_path, changed(**scaling), model=scaled) == ""
    assert check(tmp_path, changed(**scaling)) == FACTOR
  other = {"rope_scaling": SCALED | {"high_freq_factor": 8.0}}
  says = "high_freq_factor is 8.0 in the file and 4.0 in the model, set Transformer.rope_high=8.0"
  assert check(tmp_path, changed(**other), model=scaled) == says
  says = "rope_scaling is None in the file and 8.0 in the model, set Transformer.rope_factor=None"
  assert check(tmp_path, changed(), model=scaled) == says


def clauses(cell):
  """Return the message of clauses, each after the setting that it advises (if any) and a colon."""
  texts = []
  for clause in cell.split("; "):
    setting, text = re.fullmatch(r"(?:(\w+\.\w+): )?(.*)", clause).groups()
    remedy = f"set {setting}={text.split()[2]}" if setting else "which no setting changes"
    text = text.replace(" / ", " in the file and ")
    texts.append(f"{text} in the model, {remedy}")
  return "; ".join(texts)


TYPES = "'llama' or 'mistral' or 'qwen2' or 'qwen3'"
OTHER = columns(fields, clauses)(f"""
num_key_value_heads=1 | Transformer.num_kv_heads: num_key_value_heads is 1 / 2
num_key_value_heads=None | Transformer.num_kv_heads: num_key_value_heads is 4 / 2
head_dim=16 | Transformer.head_width: head_dim is 16 / 8
head_dim=None model_type='qwen3' | Transformer.head_width: head_dim is 128 / 8
rope_theta=None | Transformer.rope_theta: rope_theta is 10000.0 / 500000.0
rms_norm_eps=None | Transformer.norm_eps: rms_norm_eps is 1e-06 / 1e-05
rope_parameters={{'rope_type':'yarn'}} | rope_type is 'yarn' / 'default' or 'llama3'
partial_rotary_factor=0.25 | partial_rotary_factor is 0.25 / 1.0
rope_parameters={{'partial_rotary_factor':0.5}} | partial_rotary_factor is 0.5 / 1.0
quantization_config={{'bits':4}} | quantization_config is {{'bits': 4}} / None
hidden_act='gelu' | hidden_act is 'gelu' / 'silu' or 'swish'
attention_bias=True | attention_bias is True / False
mlp_bias=True | mlp_bias is True / False
model_type='gemma' | model_type is 'gemma' / {TYPES}
""")
LLAMA_THETA = {"rope_theta": None, "rope_parameters": TRANSFORMERS_5 | {"rope_theta": 1e6}}
THETA = "Transformer.rope_theta: rope_theta is 1000000.0 / 500000.0"
OTHER += [(LLAMA_THETA, clauses(THETA))]
MISTRAL = dict(num_key_value_heads=None, model_type="mistral")
GROUPS = "Transformer.num_kv_heads: num_key_value_heads is 8 / 2"
OTHER += [(MISTRAL, clauses(GROUPS))]
HEADS = "Transformer.num_heads: num_attention_heads is {} / 4; Transformer.head_width: "
HEADS += "head_dim is {} / 8"
OTHER += [(dict(num_attention_heads=8, head_dim=None), clauses(HEADS.format(8, 4)))]
OTHER += [(dict(num_attention_heads=None, head_dim=None), clauses(HEADS.format(32, 1)))]
NEOX = f"model_type is 'gpt_neox' / {TYPES}; rotary_pct is 0.25 / 1.0"
OTHER += [(dict(rotary_pct=0.25, model_type="gpt_neox"), clauses(NEOX))]
MISSING = "low_freq_factor high_freq_factor original_max_position_embeddings"
LACKS = "; ".join(f"the file lacks {name}, copy it again" for name in words(MISSING))
FACTOR = "factor is 8.0 in the file and None in the model, set Transformer.rope_factor=8.0"
OTHER += [({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, f"{FACTOR}; {LACKS}")]
WINDOW = "sliding_window is 63 in the file and the model attends to all tokens, set "
OTHER += [(dict(model_type="mistral", sliding_window=63), f"{WINDOW}sequence_length to 63 or less")]


@pytest.mark.parametrize("fields, says", OTHER, ids=str)
def test_another_model_is_one_line(fields, says, tmp_path):
  assert check(tmp_path, changed(**fields)) == says


def test_a_file_without_a_head_is_of_tied_embeddings(tmp_path):
  only = HEAD[:1]
  for tied, says in ((True, None), (False, "tie_word"), (None, "tie_word")):
    line = check(tmp_path, changed(tie_word_embeddings=tied), names=only)
    assert line.startswith(says or "") and bool(line) == bool(says)
  untied = changed(tie_word_embeddings=False)
  assert check(tmp_path, untied, names=only, init_head=True) == ""
  assert check(tmp_path, {"num_hidden_layers": 2}, names=only) == ""


VIT = dict(model_type="vit", num_attention_heads=6, layer_norm_eps=1e-6, hidden_act="gelu")
VIT |= dict(qkv_bias=True, image_size=224, patch_size=16)
OTHER_VIT = columns(fields, clauses)("""
num_attention_heads=12 | ViT.num_heads: num_attention_heads is 12 / 6
layer_norm_eps=1e-12 | ViT.norm_eps: layer_norm_eps is 1e-12 / 1e-06
layer_norm_eps=None | ViT.norm_eps: layer_norm_eps is 1e-12 / 1e-06
hidden_act='gelu_new' | hidden_act is 'gelu_new' / 'gelu'
qkv_bias=False | qkv_bias is False / True
model_type='dinov2' | model_type is 'dinov2' / 'vit'
""")
SAME_VIT = [({}, ""), ({"qkv_bias": None, "hidden_act": None}, "")]


@pytest.mark.parametrize("fields, says", OTHER_VIT + SAME_VIT)
def test_a_vit_of_hugging_face(fields, says, tmp_path):
  reported = {k: v for k, v in (VIT | fields).items() if v is not None}
  assert check(tmp_path, reported, model=cfg.ViT(), info=IMAGES) == says


@pytest.mark.parametrize(
  ("naming", "model"), [("huggingface", LLAMA), ("timm", cfg.ViT()), ("torchvision", cfg.ViT())]
)
def test_without_a_config_one_line_warns(naming, model, tmp_path):
  (note,) = check_source(tmp_path / "x", naming, HEAD, model, TEXT)
  assert note.startswith(f"{tmp_path / 'x'}: no config.json next to the file")
  assert "numbers of heads, rotary positions" in note and "\n" not in note
  assert check_source(tmp_path / "x", "jaxscale", HEAD, model, TEXT) == []


@pytest.mark.parametrize("naming", ["jaxscale", "timm", "huggingface"])
def test_a_file_of_ours_knows_its_settings(naming, tmp_path):
  path = tmp_path / "x.safetensors"
  about = {"class": "Transformer", "num_heads": 8, "rope_theta": 5e5, "hidden": 3}
  layout = {"a": (np.dtype("f4"), (1,))}
  write(path, layout, [np.ones(1, "f4")], {"model": json.dumps(about)})
  same = cfg.Transformer(num_heads=8, rope_theta=5e5)
  assert check_source(path, naming, HEAD, same, TEXT) == []
  # Positions may be changed on purpose.
  (note,) = check_source(path, naming, HEAD, cfg.Transformer(num_heads=8), TEXT)
  assert note.startswith(
    f"{path}: rope_theta is 500000.0 in the file and 10000.0 in the model, set"
  )
  says = "belongs to a different model: num_heads is 8 in the file and 4 in the model, set "
  says += "Transformer.num_heads=8$"
  with config_error(match=f"^{path}: {says}"):
    check_source(path, naming, HEAD, LLAMA, TEXT)
  assert check_source(path, naming, HEAD, cfg.ViT(num_heads=6), IMAGES) == []


def test_one_that_cannot_be_read_is_one_line(tmp_path):
  for text in ("{", "[]"):
    (tmp_path / "config.json").write_text(text)
    for naming in ("huggingface", "timm"):
      with pytest.raises(ConfigError, match=r"config.json: .*; copy it again"):
        check_source(tmp_path, naming, HEAD, LLAMA, TEXT)
    assert check_source(tmp_path, "jaxscale", HEAD, LLAMA, TEXT) == []


def test_class_names_are_written():
  write = functools.partial(hf_config.vit_config, cfg.ViT(), hidden=8, dtype="float32")
  named = write(IMAGES._asdict() | {"class_names": words("ant bee cat dog eel fox gnu")})
  assert named["id2label"]["6"] == "gnu" and named["label2id"]["ant"] == 0
  assert "id2label" not in write(IMAGES._asdict())
