"""`jaxscale COMMAND`: one module per command, one table, one parser for all.

A new command is a module here with `add_arguments(parser)` and `run(args)`, which
returns the exit code (None: 0), and a line in `commands.COMMANDS`. The module imports
what it needs inside `run`: `--help`, a typo or a missing file is answered before JAX
loads. Names load when they are first asked for: the console script answers Ctrl-C
before the table and the parser are imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
