"""Generate text with the language model of a run, from its latest intact checkpoint.

The run must have trained on bytes, or with a tokenizer whose file still exists.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, number, whole


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  hint = "try --workdir runs/text"
  parser.option("--workdir DIR", "the workdir of the run", directory, missing=hint)
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

  choice = {k: getattr(args, k) for k in ("seed", "temperature", "top_k", "top_p")}
  text = generate.write(Path(args.workdir), args.prompt, num_tokens=args.tokens, **choice)
  print(args.prompt + text, flush=True)
