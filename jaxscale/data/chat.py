"""Conversations in JSONL and Parquet files, with the loss on the answers alone.

A row has "messages" (a list of objects with "role" and "content"), "prompt" and "completion", or
ShareGPT's "conversations" (objects with "from" and "value"). A chat template turns it into text.
Tokens of the answers, which are the messages of the role "assistant", are learned, with the token
that ends each; the target of every other token is -1, "not learned".

The text is tokenized once and cached, as int32: a token that is not learned is saved as ~token.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxscale.data import rows
from jaxscale.data.dataset import Dataset, file_identity
from jaxscale.data.packing import text_windows
from jaxscale.data.split_files import split_files
from jaxscale.data.stream import Part, cached
from jaxscale.data.tokenizer import Located, Tokenizer, read_tokenizer, tokenizer_file
from jaxscale.errors import invalid, message_of
from jaxscale.files import mismatch, readable_text, require_json

# The names of ShareGPT's roles.
_ROLES = {"human": "user", "gpt": "assistant"}
_COLUMNS = "messages", "conversations", "prompt", "completion", "tools"
_PLAIN = """{% for message in messages %}{{ message['role'] + ': ' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}
{%- endfor %}"""
_AT_ONCE = 256  # conversations that are tokenized at a time

Conversation = tuple[str, list[tuple[int, int]]]  # A text, and the places of its answers.


def chat_files(
  directory: str | os.PathLike,
  split: str,
  *,
  tokenizer: str = "bytes",
  separator: str | None = None,
  template: str | None = None,
  sequence_length: int = 256,
  packing: Literal["best_fit", "none"] = "best_fit",
  cache_dir: str | None = None,
) -> Dataset:
  """Create a dataset of windows of conversations from the files of a split.

  Args:
    directory: the directory of the splits.
    split: the name of a .jsonl or .parquet file without its ending, or of a directory of them.
    tokenizer: "bytes" or the path of a tokenizer.json.
    separator: the token that ends generated text; None finds it by its usual names.
    template: a chat template or the path of one; None uses the tokenizer's.
    sequence_length: the tokens per example, S.
    packing: "best_fit" for several conversations in a window, "none" for one.
    cache_dir: the directory for the tokens; None uses the user's cache.

  Returns:
    A dataset with batches {"tokens", "targets", "documents"}, int32 [n, S].

  Raises:
    ConfigError: there are no files, more than 1 % of the rows of a file are damaged, or the
      template is invalid, exceeds its limits, or does not show where answers are.

  Example:
    >>> chat_files("data", "train", tokenizer="qwen/tokenizer.json")   # doctest: +SKIP
  """
  files = split_files(Path(directory), split, [rows.ENDINGS], "Chat")
  tokens = read_tokenizer(tokenizer, separator, field="Chat.tokenizer")
  source, variables, about_template = _template(template, tokenizer, tokens)
  identity = "chat", source, sorted(variables.items()), tokens.key, *files.stamps
  notes: list[str] = []
  parts = _parts(files.paths, source, variables, tokens, notes)
  stream = cached(files.name, parts, "<i4", tokens, identity, cache_dir, notes)
  digest = hashlib.sha256(repr((source, variables)).encode()).hexdigest()[:16]
  stream = stream._replace(is_chat=True, notes=(*files.notes, *about_template, *stream.notes))
  options = tokens.vocab_size, sequence_length, packing, "Chat.packing"
  dataset = text_windows(files.name, stream, *options)
  facts = {**stream.facts, "template": digest}
  return dataset._replace(identity=lambda: facts | file_identity(files.paths))


def _template(
  template: str | None, tokenizer: str, tokens: Tokenizer
) -> tuple[str, dict[str, str], tuple[str, ...]]:
  """Return a template, the special tokens that are its variables, and notes."""
  folder, config = tokenizer_file(tokenizer).parent, {}
  variables = {"eos_token": tokens.decode([tokens.separator], [])}
  if tokenizer != "bytes" and (path := folder / "tokenizer_config.json").exists():
    config = require_json(path, {}, "copy it again, or remove it")
    named = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items()}
    variables |= {k: v for k, v in named.items() if k.endswith("_token") and isinstance(v, str)}
  source, notes = template or "", ()
  if template is None:
    source = config.get("chat_template")
    if isinstance(source, list):  # Several, by name.
      source = {str(x.get("name")): x.get("template") for x in source}.get("default")
    if tokenizer != "bytes":
      source = readable_text(folder / "chat_template.jinja") or source
    if not (isinstance(source, str) and source):
      notes = ("the tokenizer has no chat template; Chat writes each message as 'role: content'",)
      source = _PLAIN
  elif "{" not in source and not (source := readable_text(Path(template))):
    problem = "is neither a template nor a file that can be read"
    raise invalid("Chat.template", template, problem, "give the path of a Jinja2 template")
  if "strftime_now" in source:
    notes += ("the chat template asks for the date; it is 26 Jul 2024, so tokens stay the same",)
  return source, variables, notes


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
  """Return the messages of a row.

  Raises:
    ValueError: the row has none, or of a different form.

  Example:
    >>> messages_of({"prompt": "1 + 1?", "completion": "2"})[1]
    {'role': 'assistant', 'content': '2'}
  """
  messages = row.get("messages")
  if messages is None and (turns := row.get("conversations")) is not None:
    if problem := mismatch(turns, [{"from": str, "value": str}], "conversations"):
      raise ValueError(problem)
    messages = [{"role": _ROLES.get(t["from"], t["from"]), "content": t["value"]} for t in turns]
  elif messages is None and {"prompt", "completion"} <= row.keys():
    turns = ("user", row["prompt"]), ("assistant", row["completion"])
    messages = [{"role": role, "content": content} for role, content in turns]
  if messages is None:
    raise ValueError("has no 'messages', 'conversations', or 'prompt' and 'completion'")
  if problem := mismatch(messages, [{"role": str, "content": (str, None)}], "messages"):
    raise ValueError(problem)
  if any(m.get("content") is None and not m.get("tool_calls") for m in messages):
    raise ValueError("a message has no content")  # Templates would write "None".
  # Parquet has null for every key that only other messages have.
  return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in messages]


def _converter(source: str, variables: dict[str, str]) -> Callable[..., Conversation]:
  """Return the `convert` of `read_rows` that renders the conversation of a row."""
  try:
    from jaxscale.data import chat_template
  except ImportError:
    fix = "pip install 'jaxscale[tokenizers]'"
    raise invalid("Chat.template", ..., "needs the package jinja2", fix) from None

  def convert(row: dict[str, Any], where: str) -> Conversation:
    more = {"tools": row.get("tools"), "documents": None, "add_generation_prompt": False}
    more["messages"] = messages_of(row)
    try:
      text, spans = chat_template.render(source, variables | more)
    except chat_template.TEMPLATE_ERRORS as e:
      problem = f"is refused for {where}: {message_of(e) or type(e).__name__}"
      raise invalid("Chat.template", ..., problem, "correct it or use a different one") from None
    except Exception as e:  # Each operation of a template has errors of its own.
      raise ValueError(f"{type(e).__name__}: {e}") from None
    text.encode()  # Raises UnicodeEncodeError, a ValueError, for a lone surrogate.
    if not (spans := [span for span in spans if span[0] < span[1]]):
      raise ValueError("has no answer")
    return text, spans

  return convert


def _parts(
  paths: Sequence[Path], source: str, variables: dict[str, str], tokens: Tokenizer, notes: list[str]
) -> Iterator[Part]:
  """Yield the tokens of conversations, several at a time; ~token if it is not learned."""
  convert, learned, total = _converter(source, variables), 0, 0
  read = (rows.read_rows(p, _COLUMNS, convert, notes, "Chat.template") for p in paths)
  conversations = itertools.chain.from_iterable(read)
  while some := list(itertools.islice(conversations, _AT_ONCE)):
    located = tokens.locate([text for text, _ in some])
    documents = [signed(*x) for x in zip(located, (spans for _, spans in some), strict=True)]
    learned += sum(int((document >= 0).sum()) for document in documents)
    total += sum(map(len, documents))
    yield documents, 0
  notes.append(f"{learned / max(total, 1):.1%} of {total:,} tokens are in answers, and learned")


def signed(located: Located, spans: Sequence[Sequence[int]]) -> np.ndarray:
  """Return tokens as int32, and ~token for those that no character of a span is in.

  Example:
    >>> signed((np.array([7, 8, 9]), np.array([0, 2, 4]), np.array([2, 4, 6])), [[3, 4]]).tolist()
    [-8, 8, -10]
  """
  tokens, starts, ends = located
  is_learned = np.zeros(len(tokens), bool)
  for begin, end in spans:
    # A token of spaces may have no extent of its own.
    is_learned |= (starts < end) & (np.maximum(ends, starts + 1) > begin)
  return np.where(is_learned, tokens.astype(np.int32), ~tokens.astype(np.int32))
