"""Generate text with the language model of a run.

The run must have trained on bytes, or with a tokenizer, of which it keeps a copy.
"""

from __future__ import annotations

import sys

from jaxscale.cli.evaluate import add_run, workdir_of
from jaxscale.cli.parser import Namespace, Parser, number, whole
from jaxscale.errors import printable

_CHOICE = "seed", "step", "temperature", "top_k", "top_p", "trust"


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_run(parser)
  parser.option("--prompt TEXT", "the text to continue (default: none)", str, default="")
  parser.option("--tokens N", "the largest number of bytes or tokens", whole(1), default=256)
  text = "the sampling temperature; 0 always takes the most likely token"
  parser.option("--temperature T", text, number(">= 0"), default=1.0)
  parser.option("--top-k K", "the number of likeliest tokens to keep (default: all)", whole(1))
  text = "the total probability of the likeliest tokens to keep (default: 1)"
  parser.option("--top-p P", text, number("in (0, 1]"))
  parser.option("--seed S", "the random seed", number("in [0, 4294967295]", int), default=0)


def run(args: Namespace) -> None:
  """Generate and print text."""
  from jaxscale.run import generate

  choice = {k: getattr(args, k) for k in _CHOICE}
  text = args.prompt
  text += generate.write(workdir_of(args), args.prompt, num_tokens=args.tokens, **choice)
  # A model may have learned, or been given, the escape sequences of terminals. U+200D joins emoji.
  print(printable(text, keep="\n\t\u200d") if sys.stdout.isatty() else text, flush=True)
