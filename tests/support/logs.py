"""Lines of jaxscale's log."""


def logged(caplog):
  """Return the lines that jaxscale has logged, of pytest's `caplog` at level INFO."""
  return [record.getMessage() for record in caplog.records if record.name == "jaxscale"]
