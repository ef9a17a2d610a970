"""Lines of jaxscale's log."""

import contextlib
import logging


class _Lines(logging.Handler):
  def __init__(self):
    super().__init__(logging.INFO)
    self.lines = []

  def emit(self, record):
    self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged():
  """Yield the list of the lines that are logged inside."""
  logger, handler = logging.getLogger("jaxscale"), _Lines()
  before = logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try:
    yield handler.lines
  finally:
    logger.removeHandler(handler)
    logger.setLevel(before)
