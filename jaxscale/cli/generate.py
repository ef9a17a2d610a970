"""Print a text and what a language model that RUN has trained continues it with.

The model is that of the newest intact checkpoint; its text must be bytes, or of a
tokenizer that is still where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxscale.cli.parser import Parser, directory, value, whole

A_RUN = "give the directory of a run, e.g. --workdir runs/text"


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.option(
    "--workdir DIR", "of a run of `jaxscale train`", directory, missing=A_RUN
  )
  parser.option(
    "--prompt TEXT", "what is continued (default: a new document)", default=""
  )
  parser.option(
    "--tokens N",
    "at most so many bytes, or tokens of its tokenizer; the text may end before",
    whole(1),
    default=256,
  )
  parser.option(
    "--temperature T",
    "what the scores are divided by; below 1 safer, above 1 wilder choices, 0: always "
    "the likeliest",
    value(float, "a number >= 0", lambda x: 0 <= x < float("inf")),
    default=1.0,
  )
  parser.option("--top-k K", "choose among the K likeliest (default: all)", whole(1))
  parser.option(
    "--top-p P",
    "choose among the likeliest that together have probability P (default: all)",
    value(float, "a number in (0, 1]", lambda x: 0 < x <= 1),
  )
  parser.option(
    "--seed S",
    "of the choices; another seed, another text",
    value(int, "one in [0, 2**32)", lambda x: 0 <= x < 2**32),
    default=0,
  )


def run(args: argparse.Namespace) -> None:
  """Generate, and print."""
  from jaxscale.run import generate

  text = generate.write(
    Path(args.workdir),
    args.prompt,
    seed=args.seed,
    num_tokens=args.tokens,
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
  )
  print(args.prompt + text, flush=True)
