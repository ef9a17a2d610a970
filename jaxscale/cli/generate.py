"""Continue a text with a run's language model, from its newest intact checkpoint.

The run's text must be bytes, or of a tokenizer that is still where it was.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, number, whole


def add_arguments(parser: Parser) -> None:
  """The options."""
  hint = "try --workdir runs/text"
  parser.option("--workdir DIR", "directory of the run", directory, missing=hint)
  parser.option("--prompt TEXT", "what is continued (default: nothing)", str, default="")
  parser.option("--tokens N", "at most so many bytes or tokens", whole(1), default=256)
  text = "what scores are divided by: 0 the likeliest, below 1 safer, above 1 wilder"
  parser.option("--temperature T", text, number(">= 0"), default=1.0)
  parser.option("--top-k K", "choose among the K likeliest (default: all)", whole(1))
  text = "choose among the likeliest that together have probability P (default: all)"
  parser.option("--top-p P", text, number("in (0, 1]"))
  seed = number("in [0, 4294967295]", int)
  parser.option("--seed S", "of the choices: another one, another text", seed, default=0)


def run(args: Namespace) -> None:
  """Generate, and print."""
  from jaxscale.run import generate

  choice = {k: getattr(args, k) for k in ("seed", "temperature", "top_k", "top_p")}
  text = generate.write(Path(args.workdir), args.prompt, num_tokens=args.tokens, **choice)
  print(args.prompt + text, flush=True)
