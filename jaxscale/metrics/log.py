"""The log of a run: lines by `logging`, shown on the terminal of process 0.

Every module logs to `logger`. `shown` prints its lines above the progress bar while a run
lasts; an application that wants them elsewhere too adds a handler of its own to the
logger "jaxscale".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

logger = logging.getLogger("jaxscale")


class LineHandler(logging.Handler):
  """Shows each record as plain text.

  Attributes:
    show: called with a text of one or more lines; None prints it.
  """

  show: Callable[[str], None] | None = None

  def emit(self, record: logging.LogRecord) -> None:
    """Show one record."""
    if self.show is None:
      print(record.getMessage(), flush=True)
    else:
      self.show(record.getMessage())


@contextlib.contextmanager
def shown(is_quiet: bool = False) -> Iterator[LineHandler]:
  """Print the lines of the log inside; yield the handler, whose `show` may be set.

  The lines go to no handler of the root, which would print them again, and in every
  process. Where one run is inside another, the inner one shows them.

  Args:
    is_quiet: drop all lines (every process but process 0).
  """
  before = logger.handlers, logger.level, logger.propagate
  handler = LineHandler()
  others = [other for other in logger.handlers if not isinstance(other, LineHandler)]
  logger.handlers, logger.propagate = [*others, handler], False
  logger.setLevel(logging.CRITICAL + 1 if is_quiet else logging.INFO)
  logger.disabled = False  # `logging.config` disables loggers that it does not know
  try:
    yield handler
  finally:
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)
