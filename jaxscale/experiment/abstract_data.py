"""Data of a config's shape without the data: enough to compile a step."""

from __future__ import annotations

from typing import Any

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.data.tokenizer import read_tokenizer


def stand_in(config: cfg.Config) -> Any:
  """Training and held-out text of the config's shape and of any length, unread.

  Args:
    config: of the run.

  Returns:
    As `parts.make_data`; None: the config does not say what the data are like.

  Raises:
    ConfigError: the file of the tokenizer, which says how many tokens there are, is
      missing or no such file.

  Example:
    >>> build.experiment(config, datasets=stand_in(config))    # doctest: +SKIP
  """
  d = config.data
  match d:
    case cfg.Text():
      vocab_size = 256
    case cfg.TextFiles(vocab_size=int(size)):
      vocab_size = size
    case cfg.TextFiles() | cfg.TFDSText():
      vocab_size = _vocabulary(d)
    case _:
      return None
  info = data.TextInfo(type(d).__name__, vocab_size, d.sequence_length)
  # So long that a run of it has steps: the program does not depend on how many.
  some = data.Dataset(info, 1000 * config.batch_size, _no_rows)
  return some, some


def _vocabulary(d: cfg.TextFiles | cfg.TFDSText) -> int:
  field = f"{type(d).__name__}.tokenizer"
  return read_tokenizer(d.tokenizer, d.separator, field=field).vocab_size


def _no_rows(indices: Any, draws: Any) -> Any:
  raise AssertionError("these data are there for their shape alone")
