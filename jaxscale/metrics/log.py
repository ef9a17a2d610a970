"""The log of a run: lines by `logging`, shown on the terminal of process 0.

Every module logs to `logger`. `shown` prints its lines above the progress bar while a run
lasts; an application that wants them elsewhere adds a handler of its own to the logger
"jaxscale", or to the root.
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

  Args:
    is_quiet: print nothing (every process but process 0).
  """
  handler, level = LineHandler(), logger.level
  handler.setLevel(logging.CRITICAL + 1 if is_quiet else logging.INFO)
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try:
    yield handler
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)
