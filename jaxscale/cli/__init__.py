"""`jaxscale COMMAND`: one module per command, one table, one parser for all.

A new command is a module in this package with `add_arguments(parser)` and `run(args)`,
which returns the exit code (None means 0), and a line in `commands.COMMANDS`. Modules import
JAX and other large packages inside `run`, so that `--help`, a typo or a missing file is
answered at once. Names of this package load on first use, so that the console script can
handle Ctrl-C before the table and the parser are imported.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
