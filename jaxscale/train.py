"""`python -m jaxscale.train --config FILE`: `jaxscale train`, as users type it."""

from jaxscale.errors import leave


def main(argv: list[str]) -> int:
  """Train what the command line asks for; returns the exit code."""
  from jaxscale import cli  # here Ctrl-C is one line already

  return cli.main(["train", *argv], program="python -m jaxscale")


if __name__ == "__main__":
  leave(main)
