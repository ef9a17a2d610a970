"""Chat templates: tokens and answers as transformers has them."""

import json

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from jaxscale import data
from jaxscale.data.python_docs import documents
from jaxscale.data.tokenizer import read_tokenizer
from support.errors import config_error

RNG = np.random.default_rng(0)
WORDS = "größe a 7 日本 yes! the module   returns\n\n_x don't 🙂 {} <b>".split(" ")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
# The manners of published templates: blocks, indentation, whitespace control, a first token,
# loop controls, namespaces, tools as JSON, the date.
CHATML = """{% for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content }}<|im_end|>{% endgeneration %}
    {% else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
FIRST = """{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%} {{ message['content'] | trim }}{{ eos_token }} {%- endgeneration -%}
    {%- else %}
        {{- '[' ~ ns.count ~ '] ' ~ message['content'] ~ ' [/INST]' }}
    {%- endif %}
{%- endfor %}"""
UNMARKED = CHATML.replace("{%- generation %}", "{{- '' }}").replace("{% endgeneration %}", "")
# Only the last answer has its thoughts, as in Qwen3's: what comes later changes the text.
CHANGES = """{% for message in messages %}
{% if message.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}
{{- message.role ~ ': ' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def conversation(turns):
  def words():
    return " ".join(RNG.choice(WORDS, RNG.integers(1, 12)))

  messages = [{"role": "system", "content": words()}] * int(RNG.integers(2))
  for _ in range(turns):
    messages += [{"role": role, "content": words()} for role in ("user", "assistant")]
  return messages


ROWS = [{"messages": conversation(RNG.integers(1, 5))} for _ in range(40)]
ROWS += [row | {"tools": [{"name": "f", "größe": [1]}]} for row in ROWS[:5]]


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def theirs(request, tmp_path_factory):
  """Make a tokenizer of their kind in a folder: byte-level BPE, or of pieces as Llama's."""
  folder = tmp_path_factory.mktemp(request.param)
  pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
  model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
  options = {"special_tokens": [*SPECIAL, "<unk>"], "show_progress": False, "vocab_size": 700}
  if request.param == "bytes":
    model.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    options["initial_alphabet"] = pre.ByteLevel.alphabet()
  else:
    replace = tokenizers.normalizers.Replace(" ", "▁")
    prepend = tokenizers.normalizers.Prepend("▁")
    model.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
    model.decoder = decoders.Sequence(
      [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    options["special_tokens"] += [f"<0x{i:02X}>" for i in range(256)]
  text = [d.decode() for d in documents()[:30]]
  model.train_from_iterator(text, tokenizers.trainers.BpeTrainer(**options))
  special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
  made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special)
  made.save_pretrained(folder)
  return made, folder


def ours(folder, tmp_path, template, rows=ROWS):
  """Return (tokens, mask of the answers) of each row, as `chat_files` has them."""
  path = tmp_path / "train.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  # By its file, or by its folder as with `models.from_folder`.
  is_file = template is not None or not (folder / "chat_template.jinja").exists()
  name = str(folder / "tokenizer.json" if is_file else folder)
  options = {"sequence_length": 4096, "packing": "none", "cache_dir": str(tmp_path / "cache")}
  dataset = data.chat_files(tmp_path, "train", tokenizer=name, template=template, **options)
  batch = dataset.load(np.arange(len(rows)), None)
  found = []
  for tokens, targets, numbers in zip(
    *(batch[k] for k in ("tokens", "targets", "documents")), strict=True
  ):
    found.append((tokens[numbers == 0], targets[numbers == 0] >= 0))
  return found


@pytest.mark.parametrize("where", ["setting", "config", "file"])
@pytest.mark.parametrize("template", [CHATML, FIRST], ids=["chatml", "first"])
def test_tokens_and_answers_are_theirs(template, where, theirs, tmp_path):
  made, folder = theirs
  config = folder / "tokenizer_config.json"
  before = config.read_text()
  if where == "config":
    config.write_text(json.dumps(json.loads(before) | {"chat_template": template}))
  elif where == "file":
    (folder / "chat_template.jinja").write_text(template)
  found = ours(folder, tmp_path, template if where == "setting" else None)
  config.write_text(before)
  (folder / "chat_template.jinja").unlink(missing_ok=True)
  options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
  for row, (tokens, mask) in zip(ROWS, found, strict=True):
    expected = made.apply_chat_template(
      row["messages"], tools=row.get("tools"), chat_template=template, **options
    )
    assert tokens.tolist() == expected["input_ids"][:-1]
    assert mask.tolist() == [bool(x) for x in expected["assistant_masks"][1:]]


def test_without_marks_an_answer_is_what_its_message_adds(theirs, tmp_path):
  made, folder = theirs
  found = ours(folder, tmp_path, UNMARKED)
  for row, (tokens, mask) in zip(ROWS, found, strict=True):
    messages = row["messages"]
    options = {"tokenize": True, "return_dict": False, "chat_template": UNMARKED}
    ids = made.apply_chat_template(messages, **options)
    assert tokens.tolist() == ids[:-1]
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    learned = made.decode([i for i, learn in zip(ids[1:], mask, strict=True) if learn])
    for answer in answers:
      words = answer.split()
      assert words[-1] in learned
    assert (
      mask.sum() > 0 and not mask[: ids.index(made.convert_tokens_to_ids("<|im_end|>")) - 1].any()
    )


def test_a_template_that_changes_the_past_is_refused(theirs, tmp_path):
  _, folder = theirs
  with config_error("Chat.template ", "not known where answers begin and end; put {% generation"):
    ours(folder, tmp_path, CHANGES)
  one = [{"messages": row["messages"][-2:]} for row in ROWS]
  with config_error("Chat.template "):  # thoughts come before an answer that has no prompt for them
    ours(folder, tmp_path, CHANGES, one)


def test_places_of_tokens_are_theirs(theirs):
  made, folder = theirs
  texts = [row["messages"][0]["content"] for row in ROWS]
  located = read_tokenizer(str(folder / "tokenizer.json")).locate(texts)
  for text, (tokens, starts, ends) in zip(texts, located, strict=True):
    expected = made(text, add_special_tokens=False, return_offsets_mapping=True)
    assert tokens.tolist() == expected["input_ids"]
    assert [*zip(starts.tolist(), ends.tolist(), strict=True)] == [
      *map(tuple, expected["offset_mapping"])
    ]
