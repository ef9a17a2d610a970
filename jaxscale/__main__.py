"""`python -m jaxscale COMMAND`."""

import functools

from jaxscale.cli import main
from jaxscale.errors import leave

if __name__ == "__main__":
  leave(functools.partial(main, program="python -m jaxscale"))
