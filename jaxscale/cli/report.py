"""How a training scales: `python -m jaxscale.cli.report STUDY`, or RUN RUN ….

The table and the picture of what `python -m jaxscale.launch scaling` has submitted,
or of any runs of one config at several sizes. From a notebook: `study.report()`.
"""

from __future__ import annotations

from jaxscale.errors import leave
from jaxscale.launch.report import main

if __name__ == "__main__":
  leave(main)
