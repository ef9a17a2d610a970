"""Branched batch study: which batch sizes are as good per example, from a run's checkpoints.

From each checkpoint, copies of the state train at every batch size on the same next examples,
as in `ByBranch`. It costs a fraction of a training at each size, and shows how the largest
good size changes during the run (arXiv:2505.23971, abstract).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxscale import cluster
from jaxscale.checkpoint import checksum, load_params
from jaxscale.checkpoint.restore import restore_step
from jaxscale.config import ByBranch, Config
from jaxscale.errors import invalid
from jaxscale.experiment import build
from jaxscale.experiment.phases import examples_at
from jaxscale.files import write_json
from jaxscale.metrics.text import cell, columns, table
from jaxscale.parallel.layout_exchange import exchange_split
from jaxscale.run.branches import Branches, compare_branches
from jaxscale.run.open_run import with_chosen_sizes
from jaxscale.run.train_phases import phase_at, train_batches

FILE = "branches.json"  # in the workdir of the run
_COLUMNS = columns(
  "step: step ,; examples: examples ,; batch: batch_size ,; loss: larger_loss .4f; "
  "difference: difference .4f; error: error .4f; as good: as_good"
)


def branch_study(
  config: Config,
  workdir: Path,
  sizes: Sequence[int],
  examples: int,
  at: Callable[[int, str], None] = lambda step, activity: None,
) -> str:
  """Train branches of a run at several batch sizes; return a table by checkpoint and size.

  All processes call it; process 0 writes the table to `branches.json` in the workdir. A size is
  as good if its loss is at most 1 % above that of the smallest size, standard error included,
  over the second half of the examples. The learning rate follows `phases.follow`.

  Args:
    config: the settings of the run.
    workdir: the workdir of the run.
    sizes: the batch sizes, each of which divides the largest.
    examples: the examples of each branch, at least 4 steps of the largest size.
    at: a function of the step and the activity, as `LoopControl.at`.

  Raises:
    ConfigError: a size does not divide the largest or the devices, or no checkpoint fits.
  """
  sizes, most = sorted(sizes), max(sizes)
  if any(most % size for size in sizes) or examples < 4 * most:
    problem = f"is less than 4 steps of {most:,}, or a batch size does not divide {most:,}"
    raise invalid("--branch", examples, problem, f"give {4 * most} or more, and e.g. 64,128,256")
  whole, rows = with_chosen_sizes(workdir, build.experiment(config)), []
  for step in (n for n in load_params.saved_steps(workdir) if n < whole.derived.total_steps):
    current = build.at_phase(whole, phase_at(whole, step - 1))
    parts = current.abstract_state(), current.exchange.resize, exchange_split(whole.trained_layout)
    try:
      state, _ = restore_step(workdir / "checkpoints" / str(step), *parts)
    except checksum.DamagedError as e:
      raise invalid("checkpoint", step, f"is damaged: {e}", "remove its folder") from e
    poll = functools.partial(at, step, "compiling")
    branches = Branches(current, state, lambda tried, n=step: train_batches(tried, n), poll)
    runs = [branches.at_size(size, config.accumulate_steps) for size in sizes]
    if None in runs:
      raise invalid("--batch-sizes", sizes[runs.index(None)], "does not fit the devices", "omit it")
    losses = branches.side_by_side([run for run in runs if run], examples // most)
    for i, size in enumerate(sizes):
      found = compare_branches(losses[[0, i]])
      row = dict(step=step, examples=examples_at(whole.derived.phases, step), batch_size=size)
      is_good = found.difference + found.error <= ByBranch().margin * abs(found.loss)
      rows.append(row | found._asdict() | {"as_good": "yes" if is_good else "no"})
  if not rows:
    fix = "train with e.g. checkpoint.every_epochs=0.5 and checkpoint.keep_last=100"
    raise invalid("--config", str(workdir), "has no checkpoint before its end", fix)
  cluster.on_leader(functools.partial(write_json, workdir / FILE, rows), FILE)
  return table([*_COLUMNS], [[cell(r[key], f) for key, f in _COLUMNS.values()] for r in rows])
