"""Trials of a sweep: the product of lists, or the result of `get_sweep` in a config."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxscale.config import Config
from jaxscale.config.loading import call
from jaxscale.errors import ConfigError

Texts = Mapping[str, str]  # settings as text by dotted field
Loader = Callable[[Texts], Config]  # builds a config from overrides, or raises
_MOST = 1000  # Slurm's own default of MaxArraySize is 1001, slurm.conf(5)


def product(lists: Sequence[str]) -> list[dict[str, str]]:
  """Return every combination of values; the last list changes fastest.

  Args:
    lists: lists such as `a.b=1,2,3`; commas inside brackets or quotes do not separate.

  Raises:
    ConfigError: a list is malformed, or a setting has two lists.

  Example:
    >>> product(["epochs=1,2", "seed=7"])
    [{'epochs': '1', 'seed': '7'}, {'epochs': '2', 'seed': '7'}]
  """
  values: dict[str, list[str]] = {}
  for text in lists:
    name, equals, rest = text.partition("=")
    name = name.removeprefix("--").removeprefix("config.")
    if not equals or not name or not (parts := split(rest)) or not all(parts):
      raise ConfigError(f"--sweep={text}: give e.g. optimizer.lr=0.1,0.2,0.4")
    if name in values:
      raise ConfigError(f"--sweep={text}: {name} has two lists; join them")
    values[name] = parts
  chosen = itertools.product(*values.values())
  return [dict(zip(values, one, strict=True)) for one in chosen]


def split(text: str) -> list[str]:
  """Split a text at commas outside of brackets and quotes.

  Example:
    >>> split("(1,2),'a,b',3")
    ['(1,2)', "'a,b'", '3']
  """
  parts: list[str] = []
  is_closed = True
  for piece in text.split(","):
    parts = [*parts, piece] if is_closed else [*parts[:-1], f"{parts[-1]},{piece}"]
    count = parts[-1].count
    is_closed = all(count(a) == count(b) for a, b in ("()", "[]", "{}"))
    is_closed = is_closed and not (count("'") % 2 or count('"') % 2)
  return [part.strip() for part in parts]


def from_file(config: str) -> list[dict[str, str]]:
  """Return the trials that `get_sweep` in a config file yields.

  A trial is a mapping from dotted field to value, as in

      def get_sweep():
        for lr in (0.1, 0.2):
          yield {"optimizer.lr": lr, "seed": 1}

  Args:
    config: the config as `FILE[:arg]`; `get_sweep` gets the argument.

  Raises:
    ConfigError: the function is missing, or yields a value that is not a mapping.
  """
  trials = call(config, "get_sweep", "define get_sweep() in it, or use --sweep")
  if isinstance(trials, Mapping) or not isinstance(trials, Iterable):
    raise ConfigError(f"{config}: get_sweep() must yield settings, one dict per trial")
  texts = []
  for trial in trials:
    if not isinstance(trial, Mapping) or not all(isinstance(k, str) for k in trial):
      text = f"{config}: get_sweep() yielded {trial!r}; yield e.g. "
      raise ConfigError(text + "{'optimizer.lr': 0.1}")
    texts.append(as_texts(trial))
  if not texts:
    raise ConfigError(f"{config}: get_sweep() yields no trials; yield at least one")
  return texts


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
  """Convert values by dotted field to the texts of the command line."""
  return {k: v if isinstance(v, str) else repr(v) for k, v in values.items()}


def check(load: Loader, overrides: Texts, trials: Sequence[Texts]) -> None:
  """Check a sweep before its submission.

  Args:
    load: a function that builds the config from overrides, or raises.
    overrides: the settings of all trials.
    trials: the settings of each trial.

  Raises:
    ConfigError: there are too few or too many trials, two trials are equal, or a config is
      invalid.
  """
  if not 1 <= len(trials) <= _MOST:
    raise ConfigError(f"{len(trials)} trials: out of range; give 1 to {_MOST}")
  for i, trial in enumerate(trials):
    try:
      load({**overrides, **trial})
    except ConfigError as e:
      raise ConfigError(f"trial {i}: {e}") from None
    if (first := trials.index(trial)) < i:
      raise ConfigError(f"trial {i} repeats trial {first}: {dict(trial)}; remove one")
