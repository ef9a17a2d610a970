"""`:::MLLOG` lines, the format that MLPerf's checkers and summaries read.

One line per event: `:::MLLOG ` and a JSON object of namespace, time_ms, event_type,
key, value and metadata. The format and the keys are those of mlperf-logging 4.1.68
(mllog/mllog.py, mllog/constants.py); which of them ResNet must have, in which order
and with what metadata: compliance_checker/training_4.0.0, the last round that had it,
and, for each optimizer, training_3.1.0. The lines are written here and not by that
package: they are one `json.dumps`, and it brings pandas and SciPy along. The tests run
its compliance checker.

A run logs as it trains, by `RunLog`; for a run that did not, `log_from_record`
writes the same lines from its files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import (
  json_objects,
  mismatch,
  open_to_append,
  read_json,
  readable_text,
  replace_text,
  require_json,
)
from jaxscale.metrics.reading import read_metrics
from jaxscale.metrics.scoring import is_reached, mllog_value

TOKEN = ":::MLLOG "
_PACKAGE = Path(__file__).parent.parent.parent
# What a log takes from a run's config.json, and which may not be missing there.
_PHASE = dict.fromkeys(("start", "stop", "batch_size", "accumulate_steps"), int)
_RUN = {
  "config": {"model": {}, "optimizer": {"class": str}, "schedule": {}},
  "derived": {"phases": [_PHASE], "num_train": int},
  "data": {"name": str},
  "devices": [str],
}

_MOST_PHASES = 100_000


class MLLog:
  """Appends events to a file, each written out as it happens.

  Values are JSON, or scalars and arrays of NumPy or JAX. Of the metadata, `time_ms`
  replaces the present, in milliseconds since the epoch.

  Example:
    >>> with MLLog(workdir / "mllog.txt") as log:        # doctest: +SKIP
    ...   log.start("eval_start", epoch_num=4)
    ...   log.event("eval_accuracy", 0.761, epoch_num=4)
    ...   log.end("eval_stop", epoch_num=4)
  """

  def __init__(self, path: str | os.PathLike | None, *, start: int = 0):
    """Begin a log, or continue one.

    Args:
      path: the file; None writes nothing, for processes other than the leader.
      start: the step that the run resumes from. At 0 the file begins anew; else
        events from the first with a later `step_num` on, the end of the run, and a
        block that has not ended, are dropped: they will happen again.
    """
    self.now_ms: float | None = None  # in place of the present, for what is over
    self._file = None
    if path is not None:
      path = Path(path)
      kept = _until(read_mllog(path), start) if start else []
      replace_text(path, "".join(map(_encode, kept)))
      self._file = os.fdopen(open_to_append(path), "a")

  def event(self, key: str, value: Any = None, **metadata: Any) -> None:
    """Something that has no duration."""
    self._write("POINT_IN_TIME", key, value, metadata)

  def start(self, key: str, value: Any = None, **metadata: Any) -> None:
    """An interval begins; MLPerf's keys for it end in `_start`."""
    self._write("INTERVAL_START", key, value, metadata)

  def end(self, key: str, value: Any = None, **metadata: Any) -> None:
    """An interval ends; MLPerf's keys for it end in `_stop`."""
    self._write("INTERVAL_END", key, value, metadata)

  def close(self) -> None:
    """Close the file."""
    if self._file is not None:
      self._file.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _write(self, event_type, key, value, metadata):
    if self._file is None:
      return
    time_ms = metadata.pop("time_ms", self.now_ms)
    line = {
      "namespace": "",
      "time_ms": int(time.time() * 1e3 if time_ms is None else time_ms),
      "event_type": event_type,
      "key": key,
      "value": value,
      "metadata": {**_caller(), **metadata},
    }
    self._file.write(_encode(line))
    self._file.flush()


def read_mllog(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The events of a log; other output between, or a line cut short, is left out."""
  found = (line.partition(TOKEN)[2] for line in readable_text(Path(path)).split("\n"))
  return json_objects(found, {"key": str})


def _encode(line: dict[str, Any]) -> str:
  # Scalars of NumPy and JAX know their Python value.
  return TOKEN + json.dumps(line, default=lambda x: x.tolist()) + "\n"


def _until(events: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
  """The events of the first `start` steps, without a block that has not ended."""
  numbered = {"metadata": {"step_num": int}}
  later = (
    i
    for i, event in enumerate(events)
    if not mismatch(event, numbered) and event["metadata"]["step_num"] > start
  )
  kept = [e for e in events[: next(later, None)] if e["key"] != "run_stop"]
  blocks = [i for i, e in enumerate(kept) if e["key"] in ("block_start", "block_stop")]
  if blocks and kept[blocks[-1]]["key"] == "block_start":
    del kept[blocks[-1]]
  return kept


def _caller() -> dict[str, Any]:
  """File and line of whoever called this module."""
  frame = sys._getframe(1)
  while frame.f_back is not None and frame.f_code.co_filename == __file__:
    frame = frame.f_back
  path = Path(frame.f_code.co_filename)
  name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
  return {"file": str(name), "lineno": frame.f_lineno}


class Submission(NamedTuple):
  """Who ran what, as a submission has to state.

  Attributes:
    benchmark: "resnet" is ResNet-50 on ImageNet; None: named after the data.
    org: who ran it.
    platform: the machine; None: the devices.
    division: "open", or "closed" for the reference model, data and optimizer.
    status: "research", "onprem", "cloud" or "preview".
  """

  benchmark: str | None = None
  org: str = "unnamed"
  platform: str | None = None
  division: str = "open"
  status: str = "research"


_UNNAMED = Submission()


def run_keys(
  described: Mapping[str, Any], submission: Submission = _UNNAMED
) -> dict[str, Any]:
  """What MLPerf requires of a run, from its config.json, by MLPerf's names.

  Example:
    >>> described = json.loads((workdir / "config.json").read_text())  # doctest: +SKIP
    >>> run_keys(described)["global_batch_size"]                       # doctest: +SKIP
    4096
  """
  config, derived = described["config"], described["derived"]
  data, devices = described["data"]["name"], described["devices"]
  is_reference = config["model"].get("depth") == 50 and data == "imagenet2012"
  named = submission._replace(
    benchmark=submission.benchmark or ("resnet" if is_reference else data),
    platform=submission.platform or f"{len(devices)} x {devices[0]}",
  )
  keys = {
    **{f"submission_{field}": value for field, value in named._asdict().items()},
    "seed": config["seed"],
    "global_batch_size": config["batch_size"],
    "gradient_accumulation_steps": derived["phases"][0]["accumulate_steps"],
    "train_samples": derived["num_train"],
    "eval_samples": derived["num_eval"],
    **_optimizer_keys(config, derived),
  }
  model, micro = config["model"], derived["micro_batch_size"]
  # Examples that share one BatchNorm's statistics.
  if model.get("bn_span") is not None and model.get("batch_norm") is not False:
    spans = {"device": micro, "global": micro * derived["num_devices"]}
    keys["model_bn_span"] = spans.get(model["bn_span"], model["bn_span"])
  return keys


def _optimizer_keys(config, derived) -> dict[str, Any]:
  """opt_*: the names that the closed division has for each optimizer."""
  optimizer, schedule = config["optimizer"], config["schedule"]
  name = optimizer["class"].lower()
  common = {
    "base_learning_rate": derived["peak_lr"],
    "learning_rate_warmup_epochs": schedule["warmup_epochs"],
    "weight_decay": optimizer.get("weight_decay", 0.0),
  }
  keys = {"opt_name": name} | {f"opt_{key}": value for key, value in common.items()}
  if config.get("clip_norm") is not None:
    keys["opt_gradient_clip_norm"] = config["clip_norm"]
  if name in ("sgd", "lars"):
    prefix = f"{name}_opt"
    keys |= {f"{prefix}_{key}": value for key, value in common.items()}
    keys[f"{prefix}_end_learning_rate"] = schedule.get("end_lr", 0.0)
    keys[f"{prefix}_momentum"] = optimizer["momentum"]
    if "power" in schedule:
      # Steps as mlcommons/training's LARS schedule counts them.
      steps = derived["total_steps"] - derived["warmup_steps"] + 1
      if (epochs := schedule.get("decay_epochs")) is not None:
        steps = round(epochs * derived["num_train"] / config["batch_size"])
      keys[f"{prefix}_learning_rate_decay_poly_power"] = schedule["power"]
      keys[f"{prefix}_learning_rate_decay_steps"] = steps
  if name == "lars":
    keys["lars_epsilon"] = optimizer.get("eps", 0.0)
  if name in ("lamb", "adamw"):
    decay = "weight_decay_rate" if name == "lamb" else "weight_decay"
    keys |= {
      f"opt_{name}_beta_1": optimizer["b1"],
      f"opt_{name}_beta_2": optimizer["b2"],
      f"opt_{name}_epsilon": optimizer["eps"],
      f"opt_{name}_{decay}": optimizer["weight_decay"],
    }
  return keys


class RunLog(MLLog):
  """The log of one run, in the order that MLPerf wants it.

  Blocks of training lie between evaluations. Epochs are counted from 0 and are
  fractions where steps do not divide them.

  Example:
    >>> log = RunLog(workdir / "mllog.txt", described)          # doctest: +SKIP
    >>> log.evaluating(step, epoch)                              # doctest: +SKIP
    >>> log.evaluated(accuracy)                                  # doctest: +SKIP
    >>> log.stop(success=True)                                   # doctest: +SKIP
  """

  def __init__(
    self,
    path: str | os.PathLike | None,
    described: Mapping[str, Any],
    *,
    start: int = 0,
    epoch: float = 0.0,
    init_ms: float | None = None,
    now_ms: float | None = None,
    submission: Submission = _UNNAMED,
  ):
    """Log the settings and that the run begins; of a resumed run, only that.

    Args:
      path: the file; None in processes other than the leader.
      described: the content of the run's config.json.
      start: the step that the run resumes from.
      epoch: likewise.
      init_ms: when the process began, in milliseconds since the epoch.
      now_ms: the present, for a run that is over; None: the clock's.
      submission: who runs it.
    """
    config = described["config"]
    self._every, self._epochs = config["evaluation"]["every_epochs"], config["epochs"]
    self._step, self._epoch, self._in_block = start, epoch, False
    super().__init__(path, start=start)
    self.now_ms = now_ms
    with contextlib.ExitStack() as on_error:
      on_error.callback(self.close)
      if start:
        self.note("resumed", start)
      else:
        init_ms = init_ms or now_ms
        self.event("cache_clear", True, time_ms=init_ms)
        self.start("init_start", time_ms=init_ms)
        for key, value in run_keys(described, submission).items():
          self.event(key, value)
        self.end("init_stop")
        self.start("run_start")
      self._begin_block()
      on_error.pop_all()

  def evaluating(self, step: int, epoch: float) -> None:
    """Training pauses after `step`, at `epoch`, for an evaluation."""
    if self._in_block:
      self.end("block_stop", **self._block(epoch - self._epoch) | {"step_num": step})
      self._in_block = False
    self._step, self._epoch = step, epoch
    self.start("eval_start", **self._here())

  def evaluated(self, accuracy: float, *, is_last: bool = False) -> None:
    """That evaluation is done; unless it is the last, training continues."""
    self.note("eval_accuracy", accuracy)
    self.end("eval_stop", **self._here())
    if not is_last:
      self._begin_block()

  def stop(self, *, success: bool) -> None:
    """The run is over: it reached its target accuracy, or it did not."""
    status = "success" if success else "aborted"
    self.end("run_stop", **self._here(), status=status)
    self.close()

  def note(self, key: str, value: Any = None, **metadata: Any) -> None:
    """Anything else that happened, at the present step."""
    self.event(key, value, **self._here(), **metadata)

  def _begin_block(self) -> None:
    # Steps do not divide epochs: what is left at the end may be next to nothing.
    planned = min(self._every, self._epochs - self._epoch)
    if planned > 0:
      self._in_block = True
      self.start("block_start", **self._block(planned))

  def _here(self) -> dict[str, Any]:
    return {"epoch_num": round(self._epoch, 4), "step_num": self._step}

  def _block(self, epochs: float) -> dict[str, Any]:
    here = self._here()
    here["first_epoch_num"] = here.pop("epoch_num")
    return here | {"epoch_count": round(epochs, 4)}


def log_from_record(
  workdir: str | os.PathLike, submission: Submission = _UNNAMED
) -> Path | None:
  """Write `workdir/mllog.txt` from what a run left there.

  It ends where the target was first reached. The record has the time at which an
  evaluation was done, not when it began, and of the start only how long before
  the end it was; compilation counts as part of the run. A run that was resumed
  begins with the first line of its record, and an event says so.

  Args:
    workdir: of a run, with config.json, metrics.jsonl and summary.json, and
      batch_sizes.json where trials have chosen them.
    submission: who ran it.

  Returns:
    The path, or None if no evaluation is recorded.
  """
  workdir = Path(workdir)
  lines = read_metrics(workdir / "metrics.jsonl")
  evaluations = [
    (line, {n[5:]: v for n, v in line.items() if n.startswith("eval/")})
    for line in lines
    if "eval/accuracy" in line or "eval/perplexity" in line
  ]
  if not evaluations:
    return None
  remedy = "give the directory of a run of jaxscale train"
  described = require_json(workdir / "config.json", _RUN, remedy)
  try:
    return _from_record(workdir, described, lines, evaluations, submission)
  except ConfigError:
    raise
  except (LookupError, TypeError, ValueError, ArithmeticError) as e:
    (workdir / "mllog.txt").unlink(missing_ok=True)  # or half of it would count
    raise ConfigError(
      f"{workdir / 'config.json'}: lacks what MLPerf asks for, or has it as another "
      f"type ({type(e).__name__}: {e!s:.80}); {remedy}"
    ) from None


def _from_record(
  workdir: Path,
  described: dict[str, Any],
  lines: list[dict[str, Any]],
  evaluations: list[tuple[dict[str, Any], dict[str, float]]],
  submission: Submission,
) -> Path:
  """The same; of a config.json that is no run's it raises many kinds of errors."""
  targets = [described["config"].get(f"target_{n}") for n in ("accuracy", "loss")]
  summary = read_json(workdir / "summary.json", {"seconds": float})
  seconds = summary.get("seconds", 0.0)
  began = lines[-1]["time"] - seconds
  was_resumed = began > lines[0]["time"]
  began_ms = 1e3 * (lines[0]["time"] if was_resumed else began)
  path = workdir / "mllog.txt"
  phases, success = _phases(described, workdir), False
  with RunLog(path, described, now_ms=began_ms, submission=submission) as log:
    if was_resumed:
      log.note("resumed", True)
    for line, values in evaluations:
      log.now_ms = 1e3 * line["time"]
      step, examples = line["step"], 0
      for steps, batch_size in phases:
        examples += min(step, steps) * batch_size
        step -= min(step, steps)
      log.evaluating(line["step"], examples / described["derived"]["num_train"])
      success = bool(is_reached(values, *targets))
      last = success or line is evaluations[-1][0]
      log.evaluated(mllog_value(values), is_last=last)
      if success:
        break
    log.stop(success=success)
  return path


def _phases(described: Mapping[str, Any], workdir: Path) -> list[tuple[int, int]]:
  """(steps, batch size) of each phase; `AdaptiveBatch` chose its sizes in the run.

  A phase ends with the first step that reaches its last example.
  """
  config, derived = described["config"], described["derived"]
  path = workdir / "batch_sizes.json"
  if not path.exists():
    return [(s["stop"] - s["start"], s["batch_size"]) for s in derived["phases"]]
  chosen = require_json(path, [int], "copy the run again")
  every, phases, examples = config["phases"]["every_epochs"], [], 0
  if (count := math.ceil(config["epochs"] / every)) > _MOST_PHASES:
    raise ValueError(f"{count} phases")
  for i in range(count):
    size = chosen[min(i, len(chosen) - 1)]
    end = min((i + 1) * every, config["epochs"]) * derived["num_train"]
    steps = max(math.ceil((end - examples) / size), 0)
    phases.append((steps, size))
    examples += steps * size
  return phases
