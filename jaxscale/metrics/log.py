"""Log of a run: lines by `logging`, shown on the terminal of process 0.

Every module logs to `logger`. `shown` prints the lines above the progress bar during a run. An
application can add its own handler to the logger "jaxscale".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from jaxscale.errors import printable

logger = logging.getLogger("jaxscale")


class LineHandler(logging.Handler):
  """Handler that shows each record as plain text.

  Attributes:
    show: a function that is called with a text of one or more lines; None prints the text.
  """

  show: Callable[[str], None] | None = None

  def emit(self, record: logging.LogRecord) -> None:
    """Show one record, with names from data and peers made printable."""
    text = printable(record.getMessage(), keep="\n\t")
    if self.show is None:
      print(text, flush=True)
    else:
      self.show(text)


@contextlib.contextmanager
def shown(is_quiet: bool = False) -> Iterator[LineHandler]:
  """Print the lines logged inside the block; yield the handler, whose `show` can be set.

  The lines do not go to the root's handlers, which would print them again, in every process. If
  one run is inside another, the inner one shows them.

  Args:
    is_quiet: True drops all lines, as in all processes but process 0.
  """
  before = logger.handlers, logger.level, logger.propagate
  handler = LineHandler()
  others = [other for other in logger.handlers if not isinstance(other, LineHandler)]
  logger.handlers, logger.propagate = [*others, handler], False
  logger.setLevel(logging.CRITICAL + 1 if is_quiet else logging.INFO)
  logger.disabled = False  # `logging.config` disables loggers that it does not know.
  try:
    yield handler
  finally:
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)
