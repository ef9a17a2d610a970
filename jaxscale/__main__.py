"""`python -m jaxscale COMMAND`."""

from jaxscale.errors import leave


def main(argv: list[str]) -> int:
  """Run a command; returns the exit code."""
  from jaxscale import cli  # here Ctrl-C is one line already

  return cli.main(argv, program="python -m jaxscale")


if __name__ == "__main__":
  leave(main)
