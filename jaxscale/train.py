"""Entry point of `python -P -m jaxscale.train --config FILE`, the same as `jaxscale train`."""

import sys

from jaxscale.errors import leave


def main(argv: list[str]) -> int:
  """Run `jaxscale train` and return its exit code."""
  from jaxscale import cli  # imported late, when `leave` already handles Ctrl-C

  return cli.main(["train", *argv], program=f"python {'-P ' * sys.flags.safe_path}-m jaxscale")


if __name__ == "__main__":
  leave(main)
