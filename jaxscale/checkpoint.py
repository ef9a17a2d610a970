"""Checkpoints: the train state by Orbax, with a manifest of checksums.

Orbax writes asynchronously and commits by an atomic rename, so a run that is
killed finds whole checkpoints or none. It does not notice flipped bytes in
array data; the manifest (checksum.py), kept in the checkpoint's own metadata,
does. A damaged checkpoint is set aside as `<step>.damaged`, never deleted.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from jaxscale import carry_over, checksum, cluster
from jaxscale.settings import ConfigError
from jaxscale.state import TrainState


class Checkpoints:
  """The checkpoints of one run; every process makes and calls it alike.

  Example:
    >>> with Checkpoints("runs/x/checkpoints") as checkpoints:
    ...   state = checkpoints.restore(abstract) or init()
    ...   checkpoints.save(state, {"accuracy": 0.9})   # doctest: +SKIP
  """

  def __init__(self, directory: str | Path, *, keep_last: int = 2, keep_best: int = 1):
    """Open (or make) a directory of checkpoints.

    Args:
      directory: one subdirectory a step.
      keep_last: how many of the newest stay.
      keep_best: how many with the highest metric "accuracy" stay as well.
    """
    self.directory = Path(directory).absolute()
    self._keep = keep_last, keep_best
    self._opened: Any = None

  @property
  def _checkpointer(self) -> Any:
    """Orbax's checkpointer, opened when it is first needed.

    Its import takes 0.3 s, and a run that starts anew saves only later.
    """
    if self._opened is None:
      from orbax.checkpoint import v1 as ocp

      policies = ocp.training.preservation_policies
      keep_last, keep_best = self._keep
      best = policies.BestN(
        get_metric_fn=lambda metrics: metrics["accuracy"],
        n=keep_best,
        keep_checkpoints_without_metrics=False,
      )
      last = policies.LatestN(keep_last)
      self._opened = ocp.training.Checkpointer(
        str(self.directory),
        preservation_policy=policies.AnyPreservationPolicy([last, best]),  # pyright: ignore
        cleanup_tmp_directories=True,  # what a killed run left half-written
      )
    return self._opened

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def steps(self) -> list[int]:
    """Steps that have a committed checkpoint, oldest first."""
    if not self.directory.exists():
      return []
    return [c.step for c in self._checkpointer.checkpoints]

  def save(self, state: TrainState, metrics: dict[str, float] | None = None) -> None:
    """Start writing the state; returns once it is copied off the devices.

    A step that is saved already is left alone. Waits for the save before.

    Args:
      state: what to save; it may be donated as soon as this returns.
      metrics: of an evaluation at this step; "accuracy" ranks the best.

    Raises:
      FloatingPointError: the state holds NaN or Inf; nothing is written.
      OSError: the save before this one failed, e.g. the disk is full.
    """
    self.wait()
    step = int(state.step)
    if step in self.steps():
      return
    leaves = checksum.manifest(state)
    self._checkpointer.save_checkpointables_async(
      step,
      {"state": state},
      force=True,
      metrics=metrics,
      custom_metadata={"leaves": leaves, "crc32": _crc32(leaves)},
    )

  def wait(self) -> None:
    """Until what was saved is on disk."""
    if self._opened is not None:
      self._opened.wait()

  def close(self) -> None:
    """Wait, then let go of the directory."""
    if self._opened is not None:
      self._opened.close()
      self._opened = None

  def restore(
    self, abstract: TrainState, resize: carry_over.Resize | None = None
  ) -> TrainState | None:
    """The newest intact state, laid out as asked for; None if there is none.

    Args:
      abstract: shapes, dtypes and shardings (`state.abstract_state`); any mesh.
      resize: `Exchange.resize`, for a state that was saved on another number of
        devices. Not called on as many, where the state is the one that was saved
        bit for bit.

    Raises:
      ConfigError: it belongs to another model, optimizer or exchange, or to another
        number of devices and cannot be carried over, or every checkpoint there is
        damaged.
    """
    steps = cluster.from_leader(self.steps())
    for step in reversed(steps):
      try:
        return self._restore_step(step, abstract, resize)
      except _DamagedError as damage:
        older = [s for s in steps if s < step]
        if cluster.is_leader():
          print(
            f"checkpoint {step} is damaged ({damage}); set aside as {step}.damaged, "
            + (f"going on from {older[-1]}" if older else "and there is no older one")
          )
        self._set_aside(step)
    if steps:
      raise ConfigError(
        f"{self.directory}: every checkpoint is damaged; use another --workdir "
        "to start anew"
      )
    return None

  def _restore_step(
    self, step: int, abstract: TrainState, resize: carry_over.Resize | None
  ) -> TrainState:
    try:
      saved: Any = self._checkpointer.metadata(step).custom_metadata
      leaves, crc32 = saved["leaves"], saved["crc32"]
    except Exception as e:
      raise _DamagedError(f"its manifest is unreadable: {_one_line(e)}") from e
    if crc32 != _crc32(leaves):
      raise _DamagedError("its manifest has changed")
    path = self.directory / str(step)
    other = carry_over.other_count(leaves, abstract, resize)
    saved = other.saved if other else abstract
    _check_same_leaves(path, leaves, saved)
    if other and other.resize is None:
      raise carry_over.refusal(path, other)
    try:
      state = self._load(step, abstract, other)
      found = checksum.manifest(state, saved)
    except Exception as e:
      raise _DamagedError(_one_line(e)) from e
    for name, leaf in found.items():
      if leaf["checksum"] != leaves[name]["checksum"]:
        raise _DamagedError(f"the checksum of {name} does not match")
    if other:
      state = carry_over.resized_state(other, state, abstract)
      if cluster.is_leader():
        print(f"checkpoint {step}: {carry_over.story(other)}")
    return state

  def _load(
    self, step: int, abstract: TrainState, other: carry_over.OtherCount | None
  ) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    if other:
      abstract = carry_over.to_load(other, abstract)
      # Zeros fill what an array lacks of the shape asked for, so that N entries lie
      # evenly on devices that do not divide N.
      context.array.loading.enable_padding_and_truncation = True
    with context:
      return self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]

  def _set_aside(self, step: int) -> None:
    self.close()

    def rename():
      earlier = len(list(self.directory.glob(f"{step}.damaged*")))
      suffix = ".damaged" + (f"-{earlier}" if earlier else "")
      (self.directory / str(step)).rename(self.directory / f"{step}{suffix}")

    cluster.on_leader(rename, f"set aside {step}")


class _DamagedError(Exception):
  """Why a checkpoint cannot be trusted."""


def _crc32(leaves: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(leaves, sort_keys=True).encode())


def _one_line(error: Exception) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def _check_same_leaves(path: Path, saved: dict[str, Any], abstract: TrainState) -> None:
  """Refuse a checkpoint whose leaves are not those of this experiment."""
  wanted = checksum.describe(abstract)

  def of_exchange(name):
    return name.startswith("exchange_state/")

  # The exchange's last: its state has the shapes of the model, which is named first.
  for name in sorted(saved.keys() | wanted.keys(), key=lambda n: (of_exchange(n), n)):
    whose = "exchange" if of_exchange(name) else "model and optimizer"
    if name not in wanted:
      difference = f"it has {name}, which this {whose} does not keep"
    elif name not in saved:
      difference = f"it has no {name}, which this {whose} needs"
    elif any(saved[name][key] != wanted[name][key] for key in ("shape", "dtype")):
      there, here = saved[name], wanted[name]
      difference = (
        f"{name} is {there['dtype']}{there['shape']} there and "
        f"{here['dtype']}{here['shape']} here"
      )
    else:
      continue
    back = "go on with the exchange it was saved with, or " if of_exchange(name) else ""
    raise ConfigError(
      f"{path}: a checkpoint of another experiment, {difference}; {back}use another "
      "--workdir"
    )
