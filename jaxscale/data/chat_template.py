"""Render conversations with a chat template, in a process of its own with little power.

    python -m jaxscale.data.chat_template

A template is a program in Jinja2 that comes with a tokenizer. It runs in Jinja2's sandbox without
access to files, with limited memory, and for a limited CPU time per conversation, after which the
system kills the process. `chat.py` starts it.

The process reads and writes JSON lines. The first line has the template and its limits (seconds,
bytes); each further line has the variables of a conversation, with "messages". A reply has "text"
and "spans", the places [start, end] of the answers in it; or "damaged", the problem of this
conversation; or "refused", the problem of the template.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import secrets
import signal
import sys
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


class Refused(jinja2.TemplateError):
  """Error of a template for every conversation."""


_ERRORS = Refused, SecurityError, jinja2.TemplateSyntaxError, jinja2.TemplateNotFound
_LIMITS = MemoryError, RecursionError, OverflowError


class _Generation(Extension):
  """The block {% generation %} … {% endgeneration %} around an answer."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

  def _marked(self, caller: Any) -> str:
    return f"{_BEGIN}{caller()}{_END}"


def compiled(source: str) -> jinja2.Template:
  """Return a template in the sandbox, with the functions that chat templates use."""

  def fail(message: str) -> str:
    raise jinja2.TemplateError(message)

  extensions = [_Generation, "jinja2.ext.loopcontrols"]
  options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": extensions}
  sandbox = ImmutableSandboxedEnvironment(loader=jinja2.DictLoader({}), **options)
  sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
  sandbox.globals |= {"raise_exception": fail, "strftime_now": lambda _: _DATE}
  return sandbox.from_string(source)


def render(
  template: jinja2.Template, variables: dict[str, Any], has_blocks: bool
) -> tuple[str, list[tuple[int, int]]]:
  """Return the text of a conversation, and the places [start, end] of its answers.

  Args:
    template: the template.
    variables: its variables, with "messages".
    has_blocks: whether the template marks answers with {% generation %}. Otherwise an answer
      is what its message adds to the text of the messages before it.

  Raises:
    Refused: the text of the first messages is not the beginning of the whole text.
  """
  spans, messages = [], variables["messages"]
  text = template.render(variables)
  if has_blocks:
    text, *parts = re.split(f"{_BEGIN}|{_END}", text)
    for number, part in enumerate(parts):
      spans += [(len(text), len(text) + len(part))] * (number % 2 == 0)
      text += part
    return text, spans
  for i, message in enumerate(messages):
    if message["role"] == "assistant":
      asked = {"messages": messages[:i], "add_generation_prompt": True}
      before = template.render(variables | asked)
      after = template.render(variables | {"messages": messages[: i + 1]})
      if not (text.startswith(after) and after.startswith(before)):
        problem = "writes messages differently when others follow, so it is not known where answers"
        fix = "put {% generation %} and {% endgeneration %} around them in the template"
        raise Refused(f"{problem} begin and end; {fix}")
      spans.append((len(before), len(after)))
  return text, spans


def main() -> None:
  """Answer the lines of standard input until it ends."""
  source, (seconds, size) = json.loads(sys.stdin.readline())
  resource.setrlimit(resource.RLIMIT_AS, (size, size))
  has_blocks, template = _HAS_BLOCKS.search(source) is not None, None
  for line in sys.stdin:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # Its signal ends the process, also in C code.
    try:
      template = template or compiled(source)
      text, spans = render(template, json.loads(line), has_blocks)
      reply: Any = {"text": text, "spans": spans}
    except _ERRORS as e:
      reply = {"refused": str(e)}
    except _LIMITS as e:
      reply = {"refused": f"exceeds a limit ({str(e) or type(e).__name__})"}
    except Exception as e:  # Each operation of a template has errors of its own.
      reply = {"damaged": f"{type(e).__name__}: {e}"}
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
  main()
