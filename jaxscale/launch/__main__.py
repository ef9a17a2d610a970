"""`python -m jaxscale.launch`."""

from jaxscale.exits import leave
from jaxscale.launch.cli import main

if __name__ == "__main__":
  leave(main)
