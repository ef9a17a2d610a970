"""Progress of a run: a live bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from shutil import get_terminal_size
from typing import Any

from jaxscale.metrics.scoring import headline, user_metrics
from jaxscale.metrics.text import duration

_WIDE = 140  # columns of a terminal that has room for a bar and all numbers


class Progress:
  """Progress of a run: the step, the metrics, the speed and the remaining time."""

  def __init__(
    self,
    total_steps: int,
    *,
    total_examples: int,
    start: int = 0,
    examples: int = 0,
    quiet: bool = False,
    plain: bool = False,
  ):
    """Start the clock.

    Args:
      total_steps: the steps of the whole run.
      total_examples: the examples of the whole run.
      start: the step that the run resumes from.
      examples: the examples seen before that step.
      quiet: True prints nothing, as in all processes but the leader.
      plain: True prints lines also on a terminal, as mpirun gives its processes one that
        nobody sees.
    """
    self.windows = 0  # the number of rates measured so far
    self._quiet = quiet
    self.expect(total_steps, total_examples)
    self._since = (examples, time.perf_counter())
    self._paused = 0.0
    self._bar: Any = None
    if not quiet and not plain and sys.stdout.isatty():
      from rich import progress, table

      step, text = "step {task.completed}/{task.total}", "{task.fields[text]}"
      columns = [step, progress.BarColumn(bar_width=24), text]
      if get_terminal_size().columns < _WIDE:  # Truncate the end, not the step.
        cut = table.Column(no_wrap=True, overflow="ellipsis")
        columns = [progress.TextColumn(f"{step}  {text}", table_column=cut)]
      self._bar = bar = progress.Progress(*columns, transient=True)
      self._task = bar.add_task("train", True, total_steps, start, text="compiling")
      bar.start()

  def expect(self, total_steps: int, total_examples: int) -> None:
    """Set the length of the run."""
    self._total, self._total_examples = total_steps, total_examples
    self._width = len(str(total_steps))

  def rate(self, examples: int) -> float:
    """Return the examples per second since the last call, without pauses.

    Args:
      examples: the examples seen so far.
    """
    now = time.perf_counter()
    done, before = self._since
    seconds = max(now - before - self._paused, 1e-9)
    self._since, self._paused = (examples, now), 0.0
    self.windows += 1
    return (examples - done) / seconds

  def train(self, step: int, metrics: Mapping[str, float], perf: Mapping[str, float]) -> None:
    """Show a step.

    Args:
      step: the step that is done.
      metrics: the metrics of the step.
      perf: `examples_per_s` and `step_s`; also `mfu` and `memory_gb` if they are known.
    """
    rate, (examples, _) = perf["examples_per_s"], self._since
    left = (self._total_examples - examples) / max(rate, 1e-9)
    parts = [f"loss {metrics['loss']:.4f}", *user_metrics(metrics)]
    parts += [f"lr {metrics['learning_rate']:.4g}"]
    took = format(1e3 * perf["step_s"], ",.0f" if perf["step_s"] >= 1 else ".3g")
    parts += [f"{rate:,.0f} examples/s", f"{took} ms/step"]
    parts += [f"MFU {perf['mfu']:.1%}"] if "mfu" in perf else []
    parts += [f"memory {perf['memory_gb']:.3g} GB"] if "memory_gb" in perf else []
    text = "  ".join([*parts, f"{duration(left)} left"])
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text)
    else:
      self.log(f"step {step:>{self._width}}/{self._total}  {text}")

  def evaluated(self, step: int, metrics: dict[str, float]) -> None:
    """Show the result of an evaluation."""
    self.log(f"step {step:>{self._width}}/{self._total}  validation {headline(metrics)}")

  def pause(self, seconds: float) -> None:
    """Exclude time that was not training (evaluation, saving) from the rate."""
    self._paused += seconds

  def log(self, text: str) -> None:
    """Print a line above the bar."""
    if self._bar is not None:  # A run with a bar is not quiet.
      self._bar.console.print(text, highlight=False, markup=False)
    elif not self._quiet:
      print(text, flush=True)

  def close(self) -> None:
    """Restore the terminal."""
    if self._bar is not None:
      self._bar.stop()
