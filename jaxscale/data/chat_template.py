"""Render conversations with a chat template in Jinja2's sandbox, as transformers does.

A template is a program that comes with a tokenizer. The sandbox gives it no files, no imports and
no attributes of Python's objects, and it cannot change its variables. Loops over `range` have up
to 100,000 turns, a text has up to 64 Mi characters, and numbers alone can be multiplied.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# No text can contain these marks.
_BEGIN, _END = (f"<{secrets.token_hex(16)}>" for _ in range(2))
_HAS_BLOCKS = re.compile(r"\{%[-+]?\s*generation\b")
# The date that Llama 3.1's template has without a clock: tokens must not depend on the day.
_DATE = "26 Jul 2024"
_MOST = 1 << 26  # characters of a text


class RefusedError(jinja2.TemplateError):
  """Error of a template for every conversation."""


_REFUSED = RefusedError, SecurityError, jinja2.TemplateSyntaxError, jinja2.TemplateNotFound
_LIMITS = MemoryError, RecursionError, OverflowError
TEMPLATE_ERRORS = *_REFUSED, *_LIMITS  # All others are errors of a conversation.


class _Generation(Extension):
  """The block {% generation %} … {% endgeneration %} around an answer."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

  def _marked(self, caller: Any) -> str:
    return f"{_BEGIN}{caller()}{_END}"


class _Sandbox(ImmutableSandboxedEnvironment):
  """Sandbox without powers and repeated texts, which could take any time and memory."""

  intercepted_binops = frozenset({"*", "**"})

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    if operator == "**" or not all(isinstance(x, int | float) for x in (left, right)):
      raise SecurityError(f"uses {operator} for more than products of numbers")
    return super().call_binop(context, operator, left, right)


@functools.cache
def compiled(source: str) -> jinja2.Template:
  """Return a template in the sandbox, with the functions that chat templates use."""

  def fail(message: str) -> str:
    raise jinja2.TemplateError(message)

  extensions = [_Generation, "jinja2.ext.loopcontrols"]
  options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": extensions}
  sandbox = _Sandbox(loader=jinja2.DictLoader({}), **options)
  sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
  sandbox.globals |= {"raise_exception": fail, "strftime_now": lambda _: _DATE}
  return sandbox.from_string(source)


def _text_of(source: str, variables: dict[str, Any]) -> str:
  parts, size = [], 0
  for part in compiled(source).generate(variables):
    parts.append(part)
    if (size := size + len(part)) > _MOST:
      raise RefusedError(f"writes more than {_MOST:,} characters")
  return "".join(parts)


def render(source: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
  """Return the text of a conversation, and the places [start, end] of its answers.

  Without {% generation %} in the template, an answer is what its message adds to the text of
  the messages before it.

  Args:
    source: the template.
    variables: its variables, with "messages".

  Raises:
    RefusedError: the text is too long, or the text of the first messages is not the beginning
      of the whole text.
    Exception: an error of `TEMPLATE_ERRORS`, or any error of the conversation.

  Example:
    >>> template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    >>> turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    >>> render(template, {"messages": turns})
    ('user: 1? assistant: 2 ', [(9, 22)])
  """
  spans, messages = [], variables["messages"]
  text = _text_of(source, variables)
  if _HAS_BLOCKS.search(source):
    text, *parts = re.split(f"{_BEGIN}|{_END}", text)
    for number, part in enumerate(parts):
      spans += [(len(text), len(text) + len(part))] * (number % 2 == 0)
      text += part
    return text, spans
  for i, message in enumerate(messages):
    if message["role"] == "assistant":
      asked = {"messages": messages[:i], "add_generation_prompt": True}
      before = _text_of(source, variables | asked)
      after = _text_of(source, variables | {"messages": messages[: i + 1]})
      if not (text.startswith(after) and after.startswith(before)):
        problem = "writes messages differently when others follow, so it is not known where answers"
        fix = "put {% generation %} and {% endgeneration %} around them in the template"
        raise RefusedError(f"{problem} begin and end; {fix}")
      spans.append((len(before), len(after)))
  return text, spans
