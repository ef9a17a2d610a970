"""Predictions and evaluations of a finished run: `jaxscale predict` and `jaxscale evaluate`.

Both run as a session of any number of processes. The devices split each batch; process 0
receives all outputs and writes them, one batch at a time.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale import cluster, data, metrics
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config import Config
from jaxscale.config.record import Described
from jaxscale.data.dataset import NO_CLASS, with_target_range
from jaxscale.errors import invalid
from jaxscale.experiment.build import make_data
from jaxscale.experiment.loss import make_objective
from jaxscale.experiment.make_layout import make_totals
from jaxscale.experiment.model import as_functions, make_metrics
from jaxscale.files import replacing
from jaxscale.metrics.log import shown
from jaxscale.optim.tree_paths import path_name
from jaxscale.run.hooks import until_stopped
from jaxscale.run.identity import renamed
from jaxscale.run.inputs import of_path
from jaxscale.run.trained import Predictions, Trained, info_of, of_run
from jaxscale.training import loop
from jaxscale.training.metrics import separate
from jaxscale.training.step import make_eval_step


def predict(
  described: Described,
  config: Config,
  to: Path,
  watch: Watch,
  *,
  path: Path | None = None,
  batch_size: int | None = None,
  step: int | str | None = None,
) -> str:
  """Write the predictions of a run's model to a file; all processes call it.

  Args:
    described: the run.
    config: its settings, of which `data` and `evaluation` may be others.
    to: a .parquet, .csv or .npz file, which process 0 writes.
    watch: the watch of the session.
    path: a folder of images, an image, or a .npy or .npz file; None predicts the validation
      data of `config`.
    batch_size: the number of examples per batch; None uses `evaluation.batch_size`.
    step: the step of the checkpoint; "best" selects the best by `checkpoint.best_metric`, and
      None the newest intact one.

  Returns:
    One line that describes the result.

  Raises:
    ConfigError: the data do not fit the model, or the file cannot be written.
    StopRequested: all processes are asked to stop; no file is written.
  """
  is_leader = cluster.is_leader()
  if described.is_text:
    fix = "use jxs.load(run).predict(tokens) for logits, or jaxscale generate for text"
    raise invalid("RUN", str(described.workdir), "is a language model", fix)
  trained, dataset, has_targets = _opened(described, config, path, step, rows_only=True)
  size, first, clock = trained.rows(dataset.num_examples, batch_size), 0, time.monotonic()
  batches = until_stopped(trained.batches(dataset, size), trained.mesh, watch, trained.step)
  writer = open_predictions(to) if is_leader else contextlib.nullcontext(lambda columns: None)
  with writer as write:
    for outputs, targets in trained.run(batches, dataset.num_examples):
      rows = range(first, first := first + len(jax.tree.leaves(outputs)[0]))
      if is_leader:
        names = [dataset.name(i) if dataset.name else i for i in rows]
        is_damaged = np.zeros(len(rows), bool)
        if dataset.damaged is not None and len(targets):
          is_damaged = targets == NO_CLASS
        targets = targets if has_targets else ()
        write(_columns(trained.predictions(outputs), names, targets, is_damaged))
  text = f"done: predictions of step {trained.step} for {_speed(first, clock)}"
  return f"{text}; see {to}{_damaged(dataset)}"


def evaluate(
  described: Described,
  config: Config,
  watch: Watch,
  *,
  path: Path | None = None,
  step: int | str | None = None,
) -> tuple[str, dict[str, Any]]:
  """Compute every metric of a run's model on its validation data or on others.

  The arguments are those of `predict`.

  Returns:
    One line that describes the result, and the result as JSON.

  Raises:
    ConfigError: the data do not fit the model, or have no targets.
    StopRequested: all processes are asked to stop.
  """
  trained, dataset, has_targets = _opened(described, config, path, step, rows_only=False)
  if not has_targets:
    fix = (
      "use subdirectories that are named as the run's classes, or all arrays of the data in .npz"
    )
    raise invalid("--data", str(path), "has no targets", fix)
  model, mesh, layout, info = trained.model, trained.mesh, trained.layout, trained.info
  clock = time.monotonic()
  chosen = make_metrics(config, info)
  objective = make_objective(config, info, as_functions(model), mesh)
  totals = make_totals(model, layout, objective, mesh, chosen)
  batches = trained.batches(dataset, trained.rows(dataset.num_examples))
  on_devices = until_stopped(batches, mesh, watch, trained.step)
  state = trained.params, trained.model_state
  eval_step = make_eval_step(totals, mesh, layout)
  values, arrays = separate(loop.evaluate(eval_step, *state, on_devices, chosen), info)
  speed = _speed(dataset.num_examples, clock)
  line = f"done: {metrics.headline(values)} of step {trained.step} on {speed}{_damaged(dataset)}"
  name = dataset.info.name if path is None else str(path)
  result = {"step": trained.step, "examples": dataset.num_examples, "data": name}
  result |= {name: array.tolist() for name, array in arrays.items()}
  return line, {"run": str(described.workdir)} | result | {"evaluation": values}


def _speed(examples: int, clock: float) -> str:
  seconds = time.monotonic() - clock
  return f"{examples:,} examples in {seconds:.1f} s ({examples / seconds:,.0f} examples/s)"


def _opened(
  described: Described, config: Config, path: Path | None, step: int | str | None, rows_only: bool
) -> tuple[Trained, data.Dataset, bool]:
  """Return the model, the data, and whether they have targets."""
  info, has_targets = info_of(described), True
  if path is None:
    dataset = make_data(config)[1]
    info = _fitting(info, dataset.info)
  else:
    dataset, has_targets = of_path(config, info, path)
  if has_targets and (limits := config.loss.target_range(info)):
    dataset = with_target_range(dataset, limits)
  with shown(is_quiet=not cluster.is_leader()):
    trained = of_run(described, config, info, step=step, rows_only=rows_only)
  return trained, dataset, has_targets


def _fitting(info: Any, new: Any) -> Any:
  """Return the description of a run's data with the shapes of others.

  Raises:
    ConfigError: the others have different classes, or the model cannot take them.
  """
  fix, sizes = "give data like those that the run was trained with", ("image_shape",)
  if isinstance(info, data.TextInfo):
    sizes, alike = ("sequence_length", "bytes_per_token"), ("vocab_size",)
  else:
    alike = ("dtype", "label_shape") + ("num_classes",) * (new.num_classes > info.num_classes)
  names: list[list[str]] = [[*getattr(x, "class_names", ())] for x in (info, new)]
  problem = "is of another kind of data" * (type(info) is not type(new))
  for name in alike if not problem else ():
    if getattr(new, name) != getattr(info, name):
      problem = f"has {name}={getattr(new, name)}, but the run has {getattr(info, name)}"
  if all(names) and names[0] != names[1]:
    problem = f"has other classes: {renamed(*names).replace('workdir', 'run')}"
    fix = "use --data FOLDER, whose subdirectories are matched with the classes by name"
  if problem:
    raise invalid("--config.data", new.name, problem, fix)
  return info._replace(name=new.name, **{name: getattr(new, name) for name in sizes})


def _columns(
  found: Predictions, names: list[Any], targets: Any, is_damaged: np.ndarray
) -> dict[str, Any]:
  """Return the columns of some rows; damaged examples have no prediction."""
  columns: dict[str, Any] = {"id": names}
  labels: Any = found.labels
  if found.probabilities is not None and labels.ndim == 1:
    columns["label"] = np.where(is_damaged, NO_CLASS, labels)
    if found.class_names:
      columns["class"] = np.where(is_damaged, "", found.classes)
    columns["probability"] = found.probabilities.max(-1)
  columns |= {"target": targets} if len(targets) else {}
  outputs = jax.tree.leaves_with_path({"outputs": found.outputs})
  numbers = {path_name(path): leaf for path, leaf in outputs}
  if found.probabilities is not None:
    numbers = {"probabilities": found.probabilities}
  columns |= {name: np.array(array, np.float32) for name, array in numbers.items()}
  for name in {"probability", *numbers} & columns.keys():
    columns[name][is_damaged] = np.nan
  return columns


@contextlib.contextmanager
def open_predictions(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
  """Yield a function that appends columns to a file, which exists once the block is complete.

  Args:
    path: the file. A .csv has no probabilities of all classes; the arrays of a .npz are kept in
      memory until the end.

  Raises:
    ConfigError: the format needs a package that is not installed.
  """
  with replacing(path) as file:
    if path.suffix == ".npz":
      parts: list[dict[str, Any]] = []
      yield parts.append
      whole: Any = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
      np.savez(file, **whole)
    elif path.suffix == ".csv":
      text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
      yield functools.partial(_write_rows, csv.writer(text), [])
      text.detach()  # Flushes, and leaves the file open.
    else:
      try:
        from pyarrow.parquet import ParquetWriter
      except ImportError:
        fix = "install it (pip install pyarrow), or write .csv or .npz"
        raise invalid("--to", str(path), "needs the package pyarrow", fix) from None
      with contextlib.ExitStack() as stack:

        @functools.cache
        def writer(schema: Any) -> Any:
          return stack.enter_context(ParquetWriter(file, schema))

        yield lambda columns: writer((rows := _arrow(columns)).schema).write_table(rows)


def _write_rows(table: Any, heads: list[str], columns: dict[str, Any]) -> None:
  """Write rows of a .csv, whose first line names the columns."""
  cells = {}
  for name, values in columns.items():
    flat = np.asarray(values).reshape(len(values), -1)
    if flat.shape[1] == 1:
      cells[name] = map(str, flat[:, 0])
    elif name != "probabilities":
      cells |= {f"{name}_{i}": map(str, flat[:, i]) for i in range(flat.shape[1])}
  if not heads:
    heads.extend(cells)
    table.writerow(heads)
  table.writerows(zip(*cells.values(), strict=True))


def _arrow(columns: dict[str, Any]) -> Any:
  """Return the columns as a pyarrow table, those of several dims as lists of one length."""
  import pyarrow as pa

  arrays = {}
  for name, values in columns.items():
    flat = np.asarray(values).reshape(len(values), -1)
    arrays[name] = pa.array(flat.ravel())
    if np.ndim(values) > 1:
      arrays[name] = pa.FixedSizeListArray.from_arrays(arrays[name], flat.shape[1])
  return pa.table(arrays)


def _damaged(dataset: data.Dataset) -> str:
  """Return the end of a line, with the damaged examples of all processes."""
  if dataset.damaged is None:
    return ""
  everywhere = data.DamagedExamples()
  for record in cluster.gather(dataset.damaged.as_dict()):
    everywhere.update(record)
  return f"; {everywhere.describe()}" if everywhere.count or everywhere.unusual else ""
