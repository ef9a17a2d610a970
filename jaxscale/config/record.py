"""What a run was of, by the config.json in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale.config.validation import from_plain
from jaxscale.errors import ConfigError


class Described(NamedTuple):
  """What the config.json of a run says; `describe_run` reads it.

  Attributes:
    workdir: of the run.
    config: its settings, as JSON.
    data: of its images (`data.DatasetInfo`) or its text (`data.TextInfo`), likewise.
  """

  workdir: Path
  config: dict[str, Any]
  data: dict[str, Any]

  @property
  def is_text(self) -> bool:
    """Whether the run is of text."""
    return "vocab_size" in self.data

  @property
  def num_classes(self) -> int | None:
    """Classes, or words of the vocabulary, without what only pads."""
    return self.data.get("vocab_size" if self.is_text else "num_classes")

  def settings(self) -> cfg.Config:
    """The config itself.

    Raises:
      ConfigError: it is of another version of jaxscale, which had other settings.
    """
    try:
      return from_plain(cfg.Config, self.config)
    except ConfigError as e:
      raise ConfigError(f"--workdir={self.workdir}: its config.json has {e}") from None


def describe_run(workdir: str | Path) -> Described:
  """What a run was of, by its config.json; neither data nor devices are looked at.

  Raises:
    ConfigError: it is no run's directory.
  """
  try:
    described = json.loads((Path(workdir) / "config.json").read_text())
    config, data = described["config"], described["data"]
    _ = config["model"]["class"], data["name"]
  except FileNotFoundError:
    raise ConfigError(
      f"--workdir={workdir}: no config.json there; give the directory of a run of "
      "jaxscale.train"
    ) from None
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ConfigError(
      f"--workdir={workdir}: its config.json cannot be read ({type(e).__name__}); "
      "give the directory of a run of jaxscale.train"
    ) from None
  return Described(Path(workdir), config, data)
