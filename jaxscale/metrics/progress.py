"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from shutil import get_terminal_size
from typing import Any

from jaxscale.metrics.scoring import headline, user_metrics
from jaxscale.metrics.text import duration

_WIDE = 140  # columns of a terminal on which a bar and all numbers have room


class Progress:
  """Prints where a run is, how fast it goes, and how long it will take."""

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
      total_steps: of the whole run.
      total_examples: that it sees.
      start: the step that the run resumes from.
      examples: seen up to there.
      quiet: print nothing (every process but the leader).
      plain: lines also on a terminal: a job's may be no person's (mpirun's log).
    """
    self.windows = 0  # rates measured so far
    self._quiet = quiet
    self.expect(total_steps, total_examples)
    self._since = (examples, time.perf_counter())
    self._paused = 0.0
    self._bar: Any = None
    if not quiet and not plain and sys.stdout.isatty():
      from rich import progress, table

      step, text = "step {task.completed}/{task.total}", "{task.fields[text]}"
      columns = [step, progress.BarColumn(bar_width=24), text]
      if get_terminal_size().columns < _WIDE:  # the end is cut, not the step
        cut = table.Column(no_wrap=True, overflow="ellipsis")
        columns = [progress.TextColumn(f"{step}  {text}", table_column=cut)]
      self._bar = bar = progress.Progress(*columns, transient=True)
      self._task = bar.add_task("train", True, total_steps, start, text="compiling")
      bar.start()

  def expect(self, total_steps: int, total_examples: int) -> None:
    """The run is going to be this long."""
    self._total, self._total_examples = total_steps, total_examples
    self._width = len(str(total_steps))

  def rate(self, examples: int) -> float:
    """Examples per second since the last call, without what was paused.

    Args:
      examples: seen so far.
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
      step: that is done.
      metrics: of it.
      perf: `examples_per_s` and `step_s`; `mfu` and `memory_gb` where they are known.
    """
    rate, (examples, _) = perf["examples_per_s"], self._since
    left = (self._total_examples - examples) / max(rate, 1e-9)
    parts = [f"loss {metrics['loss']:.4f}", *user_metrics(metrics)]
    parts += [f"lr {metrics['learning_rate']:.4g}"]
    parts += [f"{rate:,.0f} examples/s", f"{1e3 * perf['step_s']:,.3g} ms/step"]
    parts += [f"MFU {perf['mfu']:.1%}"] if "mfu" in perf else []
    parts += [f"memory {perf['memory_gb']:.3g} GB"] if "memory_gb" in perf else []
    text = "  ".join([*parts, f"{duration(left)} left"])
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text)
    else:
      self.say(f"step {step:>{self._width}}/{self._total}  {text}")

  def evaluated(self, step: int, metrics: dict[str, float]) -> None:
    """Show the result of an evaluation."""
    self.say(f"step {step:>{self._width}}/{self._total}  validation {headline(metrics)}")

  def pause(self, seconds: float) -> None:
    """Take time that was not training (evaluation, saving) off the rate."""
    self._paused += seconds

  def say(self, text: str) -> None:
    """Print a line above the bar."""
    if self._bar is not None:  # then it is not quiet
      self._bar.console.print(text, highlight=False, markup=False)
    elif not self._quiet:
      print(text, flush=True)

  def close(self) -> None:
    """Leave the terminal as it was."""
    if self._bar is not None:
      self._bar.stop()
