"""Conversations: rows, chat templates in their sandbox, and the loss on the answers alone."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.data import chat, chat_template
from jaxscale.data.chat import signed
from jaxscale.data.tokenizer import byte_tokenizer
from support.errors import config_error

pytestmark = pytest.mark.usefixtures("own_cache")

RNG = np.random.default_rng(0)
# Templates in the manner of published ones: ChatML with and without marked answers, and one
# that begins with a token.
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {% generation %}
        {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}"""


def conversation(turns):
  """Return a conversation of random words, after a system message or not."""

  def words():
    return " ".join(RNG.choice(["größe", "a", "7", "日本", "yes!"], RNG.integers(1, 9)))

  messages = [{"role": "system", "content": words()}] * int(RNG.integers(2))
  for _ in range(turns):
    messages += [{"role": role, "content": words()} for role in ("user", "assistant")]
  return messages


CONVERSATIONS = [conversation(RNG.integers(1, 5)) for _ in range(60)]


def write(path, rows):
  if path.suffix == ".parquet":
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  else:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversations_of(dataset):
  """Return the bytes of each conversation and those of them that are learned, sorted."""
  batch, found = dataset.load(np.arange(dataset.num_examples), None), []
  arrays = (batch[name] for name in ("tokens", "targets", "documents"))
  for tokens, targets, numbers in zip(*arrays, strict=True):
    for number in np.unique(numbers):
      is_in = numbers == number
      if (targets[is_in] >= 0).any():
        learned = targets[is_in]
        # A learned target is the next token.
        follows = learned[:-1] >= 0
        np.testing.assert_array_equal(learned[:-1][follows], tokens[is_in][1:][follows])
        found.append((bytes(tokens[is_in].tolist()), bytes(learned[learned >= 0].tolist())))
  return sorted(found)


def expected_of(conversations, after="<|im_end|>", end="\n"):
  """Return what `conversations_of` should be in ChatML."""
  found = []
  for messages in conversations:
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    answers = [m["content"] + after for m in messages if m["role"] == "assistant"]
    found.append(("".join(turns).encode()[:-1], "".join(answers).encode()))
  return sorted(found)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("template", "after"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_the_loss_is_on_the_answers_alone(template, after, ending, tmp_path):
  write(tmp_path / f"train{ending}", [{"messages": x} for x in CONVERSATIONS])
  for packing in ("best_fit", "none"):
    options = {"template": template, "sequence_length": 2048, "packing": packing}
    dataset = data.chat_files(tmp_path, "train", **options)
    assert conversations_of(dataset) == expected_of(CONVERSATIONS, after)
    assert packing == "best_fit" or dataset.num_examples == 60
  learned, packed = dataset.notes
  assert learned.endswith("tokens are in answers, and learned") and "60 documents in 60" in packed


def test_every_form_of_rows_gives_the_same_text(tmp_path):
  short = [x[-2:] for x in CONVERSATIONS]
  names = {"user": "human", "assistant": "gpt"}
  rows = {
    "messages": [{"messages": x} for x in short],
    "prompt": [{"prompt": a["content"], "completion": b["content"]} for a, b in short],
    "sharegpt": [
      {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in x]}
      for x in short
    ],
  }
  for name, some in rows.items():
    for ending in (".jsonl", ".parquet"):
      path = tmp_path / f"{name}{ending}"
      write(path, some)
      dataset = data.chat_files(tmp_path, name, template=CHATML, sequence_length=512)
      assert conversations_of(dataset) == expected_of(short, "<|im_end|>\n")
      path.unlink()


def test_without_a_template_a_plain_one_is_used_and_said(tmp_path):
  write(tmp_path / "train.jsonl", [{"prompt": "1 + 1?", "completion": "2"}])
  dataset = data.chat_files(tmp_path, "train", sequence_length=64)
  assert conversations_of(dataset) == [(b"user: 1 + 1?\nassistant: 2\0", b"2\0")]
  assert "the tokenizer has no chat template; Chat writes each message as" in dataset.notes[0]


def test_a_template_is_found_next_to_the_tokenizer(tmp_path):
  name, tokens = str(tmp_path / "tokenizer.json"), byte_tokenizer()
  special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "x": 1}
  config = tmp_path / "tokenizer_config.json"
  config.write_text(json.dumps(special))
  assert chat._template(None, name, tokens)[:2] == (
    chat._PLAIN,
    {"bos_token": "<s>", "eos_token": "</s>"},
  )
  for templates in (
    "own",
    [{"name": "tools", "template": "t"}, {"name": "default", "template": "own"}],
  ):
    config.write_text(json.dumps({"chat_template": templates}))
    assert chat._template(None, name, tokens)[0::2] == ("own", ())
  (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
  source, variables, (note,) = chat._template(None, name, tokens)
  assert source.startswith("{{ strf") and variables == {"eos_token": "\0"} and "26 Jul" in note
  (tmp_path / "mine.jinja").write_text("mine")
  assert chat._template(str(tmp_path / "mine.jinja"), name, tokens)[0] == "mine"
  config.write_text("{")
  with config_error(str(config), "not readable as JSON"):
    chat._template(None, name, tokens)
  config.unlink()
  with config_error("Chat.template=no.jinja is neither a template nor a file"):
    chat._template("no.jinja", name, tokens)


def test_tokens_that_a_span_touches_are_learned():
  tokens, text = byte_tokenizer(), "aß日b"
  (located,) = tokens.locate([text])
  raw = np.frombuffer(text.encode(), np.uint8).astype(int)
  for begin in range(5):
    for end in range(begin + 1, 5):
      part = text.encode()[len(text[:begin].encode()) : len(text[:end].encode())]
      found = signed(located, [[begin, end]])
      assert bytes(found[found >= 0].tolist()) == part
      np.testing.assert_array_equal(np.where(found < 0, ~found, found), raw)


# Hostile templates and rows.

LAST_WINS = "{{ messages[-1]['content'] }}"
REFUSED = [
  ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
  ("{{ messages.__init__.__globals__['os'] }}", ""),
  ("{{ raise_exception.__globals__ }}{{ cycler.__init__.__globals__.os }}", ""),
  ("{% set x = messages.append(1) %}", ""),
  ("{% include '/etc/passwd' %}", "/etc/passwd"),
  ("{% import 'os' as os %}", "os"),
  ("{% for i in range(10000000000) %}{% endfor %}", "Range too big"),
  ("{% for a in range(99999) %}{% for b in range(99999) %}a{% endfor %}{% endfor %}", "4,096"),
  ("{{ 10 ** (10 ** 9) % 7 }}", "uses ** for more than products of numbers"),
  ("{{ 'a' * 100000000000 }}", "uses * for more than products of numbers"),
  ("{{ [1] * 100000000000 }}", "uses * for more than products of numbers"),
  ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
  ("{% if %}", "Expected an expression"),
  (LAST_WINS + "{{ messages | length }}", "it is not known where answers begin and end"),
]


@pytest.mark.parametrize(("template", "problem"), REFUSED, ids=range(len(REFUSED)))
def test_a_hostile_template_is_refused_in_one_line(template, problem, tmp_path, monkeypatch):
  monkeypatch.setattr(chat_template, "_MOST", 4096)
  write(tmp_path / "train.jsonl", [{"messages": x} for x in CONVERSATIONS])
  with config_error("Chat.template ", "train.jsonl:1", problem):
    data.chat_files(tmp_path, "train", template=template, sequence_length=64)
  assert not list((tmp_path / "cache" / "jaxscale" / "text").glob("*.bin"))


def test_damaged_conversations_are_skipped_and_named(tmp_path):
  bad = [
    ({"text": "a"}, "has no 'messages', 'conversations', or 'prompt'"),
    ({"messages": "a"}, "messages is not a JSON list"),
    ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role is 1"),
    ({"messages": [{"role": "user"}]}, "no messages[0].content in it"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content is ['a']"),
    ({"messages": [{"role": "user", "content": "a"}]}, "has no answer"),
    ({"messages": []}, "has no answer"),
    ({"conversations": [{"from": "gpt"}]}, "no conversations[0].value in it"),
    ({"prompt": "a", "completion": "\ud800"}, "can't encode character"),
    ({"prompt": None, "completion": "b"}, "a message has no content"),
  ]
  for row, problem in bad:
    write(tmp_path / "train.jsonl", [*({"messages": x} for x in CONVERSATIONS), row])
    dataset = data.chat_files(tmp_path, "train", template=CHATML, sequence_length=2048)
    assert "skipping 1 damaged row of 61: train.jsonl:61 (" in dataset.notes[0]
    assert problem in dataset.notes[0]
    assert conversations_of(dataset) == expected_of(CONVERSATIONS, "<|im_end|>\n")
  template = CHATML + "{{ raise_exception('roles must alternate') }}"
  with config_error("has 60 damaged rows among 60", "TemplateError: roles must alternate"):
    write(tmp_path / "train.jsonl", [{"messages": x} for x in CONVERSATIONS])
    data.chat_files(tmp_path, "train", template=template)


def test_text_that_a_row_lacks_is_not_learned_as_none(tmp_path):
  write(tmp_path / "train.jsonl", [{"prompt": None, "completion": "b"}])
  with config_error("has 1 damaged rows among 1: train.jsonl:1 (a message has no content)"):
    data.chat_files(tmp_path, "train")
  call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
  template = "{% for m in messages %}{{ m.role }}{{ m.content or m.tool_calls }}{% endfor %}"
  write(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": "a"}, call]}])
  assert data.chat_files(tmp_path, "train", template=template).num_examples


def test_settings_build_both_splits_and_shapes_without_data(tmp_path):
  for split in ("train", "val"):
    write(tmp_path / f"{split}.jsonl", [{"messages": x} for x in CONVERSATIONS])
  settings = cfg.Chat(path=str(tmp_path), sequence_length=512)
  for one, shapes in zip(settings.build(), settings.abstract(8), strict=True):
    assert data.batch_shapes(one.info, 8) == data.batch_shapes(shapes.info, 8)
    data.check_readable(one)
    assert one.identity() and "template" in one.identity()


@pytest.mark.parametrize("given", ["folder", "folder/tokenizer.json"])
def test_a_template_is_found_by_the_folder_of_its_tokenizer(given, tmp_path):
  folder = tmp_path / "folder"
  folder.mkdir()
  for name in ("tokenizer.json", "tokenizer_config.json"):
    (folder / name).write_text('{"bos_token": "<s>"}')
  (folder / "chat_template.jinja").write_text(CHATML)
  (tmp_path / "chat_template.jinja").write_text("not this one")
  source, variables, notes = chat._template(None, str(tmp_path / given), byte_tokenizer())
  assert (source, variables["bos_token"], notes) == (CHATML, "<s>", ())
