"""Entry point of `python -m jaxscale COMMAND`."""

from jaxscale.errors import leave


def main(argv: list[str]) -> int:
  """Run a command and return its exit code."""
  from jaxscale import cli  # imported late, when `leave` already handles Ctrl-C

  return cli.main(argv, program="python -m jaxscale")


if __name__ == "__main__":
  leave(main)
