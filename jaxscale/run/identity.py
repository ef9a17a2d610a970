"""Identity of a run: its data, the user's own code, and JAX's numeric settings.

The identity is saved in config.json and in each checkpoint. It is compared when a run
resumes, and between the processes of a start. Paths and file times are not part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxscale import cluster
from jaxscale.config import Config
from jaxscale.config.own_code import BYTECODE
from jaxscale.config.plain import class_name, code_of
from jaxscale.config.record import Described, flat
from jaxscale.config.validation import shown
from jaxscale.data.dataset import facts_of
from jaxscale.errors import ConfigError, invalid
from jaxscale.experiment import build
from jaxscale.files import mismatch
from jaxscale.metrics.text import few

ACCEPTABLE = "data", "code"
# JAX settings that change numbers; only x64 also changes the dtypes of the state.
_SETTINGS = """jax_enable_x64 jax_default_matmul_precision jax_default_prng_impl
  jax_threefry_partitionable""".split()
# Settings of the compiler, which may also change rounding, with their values in older files.
_COMPILER: dict[str, Any] = {"compiler_options": {}, "compiler_preset": "none"}
SHAPE = {"data": {}, "code": {str: str}, "environment": {}}


class Change(NamedTuple):
  """A difference between a run at its start and now.

  Attributes:
    kind: the kind: "data", "code", "x64" or "settings".
    text: the difference, with both values.
  """

  kind: str
  text: str


def accepted(kinds: Collection[str]) -> set[str]:
  """Return the kinds of changes to accept.

  Raises:
    ConfigError: there is no such kind of change.
  """
  kinds = {*(kinds.split(",") if isinstance(kinds, str) else kinds)}
  if unknown := sorted(kinds.difference(ACCEPTABLE)):
    fix = f"use {' or '.join(ACCEPTABLE)}"
    raise invalid("accept_changes", unknown[0], "is not a kind of change", fix)
  return kinds


def identity_of(experiment: build.Experiment) -> dict[str, Any]:
  """Return the identity of a run, as JSON."""
  train, evaluation = experiment.train_data, experiment.eval_data
  facts = {"train": facts_of(train), "evaluation": facts_of(evaluation)}
  if names := getattr(train.info, "class_names", ()):
    facts |= {"class_names": list(names)}
  environment = {name: getattr(jax.config, name, None) for name in _SETTINGS}
  config = experiment.config
  # Trackers and metrics of evaluations do not count, and callbacks count as long as a run
  # has them.
  trains = dataclasses.replace(config, log=type(config.log)(), metrics=(), callbacks=())
  code = code_of(trains).hashes
  callbacks = {class_name(type(c)): code_of(c).hashes for c in config.callbacks}
  return {"data": facts, "code": code, "callbacks": callbacks, "environment": environment}


def without_source(identity: Mapping[str, Any]) -> list[str]:
  """Return a line on own code that is compared by its bytecode, if there is any."""
  code = identity["code"].items()
  names = [key.split(":", 1)[1] for key, value in code if value.startswith(BYTECODE)]
  reason = "compared by bytecode, which differs between versions of Python"
  return [f"note: code without source ({few(names)}) is {reason}"] * bool(names)


def check_alike(identity: dict[str, Any]) -> None:
  """Check that all processes of a start have the same identity; all call it.

  Raises:
    ConfigError: two processes differ; the message has both and the difference.
  """
  first, *others = cluster.gather(identity)
  for process, other in enumerate(others, 1):
    if differing := [*changes(first, other)]:
      text = "; ".join(change.text for change in differing[:3])
      text = text.replace(" in the workdir and ", " in process 0 and ")
      text = text.replace(" now", f" in process {process}")
      fix = "make all processes read the same data and code, with the same settings of JAX"
      raise ConfigError(f"processes 0 and {process} differ: {text}; {fix}")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
  """Yield the differences between two identities, data first."""
  if mismatch(old, SHAPE):
    return
  old_data, new_data = dict(old["data"]), dict(new["data"])
  names = [x.pop("class_names", None) for x in (old_data, new_data)]
  if names[0] != names[1] and all(isinstance(x, list) for x in names):
    yield Change("data", renamed(*names))
  yield from _differing("data", flat(old_data), flat(new_data), str)
  yield from _differing("code", old["code"], new["code"], _code_name)
  before, now = (x.get("callbacks", {}) for x in (old, new))
  for name in before.keys() & now.keys():
    yield from _differing("code", before[name], now[name], _code_name)
  x64 = [bool(x["environment"].get("jax_enable_x64")) for x in (old, new)]
  if x64[0] != x64[1]:
    yield Change("x64", "JAX_ENABLE_X64 is {:d} in the workdir and {:d} now".format(*x64))


def check_code(described: Described, config: Config) -> None:
  """Refuse to apply a model or loss whose code is not that of the run.

  Definitions of names that the run did not use are not compared.

  Args:
    described: the run.
    config: its settings, with the user's classes as they are now.

  Raises:
    ConfigError: a definition differs.
  """
  old, new = described.code, code_of((config.model, config.loss)).hashes
  if names := [_code_name(key) for key, now in new.items() if old.get(key, now) != now]:
    problem = f"was trained with different code of {few(names)}"
    fix = "restore it, or pass model= of a class with another name to jaxscale.load"
    raise invalid("run", str(described.workdir), problem, fix)


def renamed(old: list[str], new: list[str]) -> str:
  """Describe the first difference between two lists of class names."""
  if len(old) != len(new):
    return f"there are {len(old)} classes in the workdir and {len(new)} now"
  at = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
  return f"class {at} is {shown(old[at])} in the workdir and {shown(new[at])} now"


def _code_name(key: str) -> str:
  return "{1} in {0}".format(*key.split(":", 1))


def _differing(
  kind: str, old: Mapping[str, Any], new: Mapping[str, Any], name: Callable[[str], str]
) -> Iterator[Change]:
  for key in {**old, **new}:
    before, now = old.get(key, "missing"), new.get(key, "missing")
    if before == now:
      continue
    is_text = all(isinstance(x, str) and x != "missing" for x in (before, now))
    text = "differs" if is_text else f"is {shown(before)} in the workdir and {shown(now)} now"
    yield Change(kind, f"{name(key)} {text.replace(repr('missing'), 'missing')}")


def other_environment(described: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Describe differences that may change rounding or random numbers; "" if there are none.

  Args:
    described: the config.json of the run.
    now: the config.json that the run would have now.
  """

  def known(side: Mapping[str, Any]) -> dict[str, Any]:
    settings = (side.get("identity") or {}).get("environment", {})
    kind = {"devices": side.get("device_kind"), "python": side.get("python")}
    compiler = {name: side["config"].get(name, unset) for name, unset in _COMPILER.items()}
    return kind | {**side.get("versions", {})} | {**settings} | compiler

  old, new = known(described), known(now)
  differs = [n for n in old if n in new and old[n] != new[n] and n != "jax_enable_x64"]
  return ", ".join([f"{name} {old[name]} in the workdir and {new[name]} now" for name in differs])
