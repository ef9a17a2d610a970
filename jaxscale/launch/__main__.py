"""`python -m jaxscale.launch`."""

from jaxscale.errors import leave
from jaxscale.launch.cli import main

if __name__ == "__main__":
  leave(main)
