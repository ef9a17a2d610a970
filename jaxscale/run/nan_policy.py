"""What follows a skipped step, and the record of it in the workdir.

A step whose loss or gradient is NaN or Inf changed nothing (`nan_guard`). Then

    stop        the run ends
    skip        it continues with the next batch: nothing to undo
    roll_back   it resumes from the last checkpoint c as if the steps c + 1 … t had
                been done, t being the bad one; their batches are passed over

To roll back undoes what led to the bad step, and trains on other data: PaLM was
restarted from about 100 steps before a spike, without the data of 200 to 500 steps, and
neither those data nor that state alone brought it back (arXiv:2204.02311, section
5.1). The order of the data stays what it was.

`skipped_steps.json` has both. A run that resumes from a checkpoint makes the same
skips by itself, as they follow from data and parameters; what was passed over it passes
over again, wherever it starts. So resuming is exact under each policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from jaxscale import cluster, metrics
from jaxscale.errors import ConfigError, NonFiniteError
from jaxscale.files import require_json

Action = Literal["stop", "skip", "roll_back"]
FILE = "skipped_steps.json"
_RECORD = {"skipped": [{"step": int, "what": str}]}
_RECORD |= {"passed_over": [{"after": int, "to": int, "what": str}]}


class NanPolicy:
  """The skipped steps of one run; every process makes and calls it alike.

  Example:
    >>> policy = NanPolicy(workdir, "skip")                    # doctest: +SKIP
    >>> policy.skip(17, "process 3 (n4), device 6: loss is NaN")  # doctest: +SKIP
  """

  def __init__(self, workdir: Path, action: Action, max_total: int = 10, max_consecutive: int = 3):
    """Resume with what is on record.

    Args:
      workdir: where the record is.
      action: what follows a skipped step.
      max_total: skips, or rolls back, that a run may have; one more ends it.
      max_consecutive: likewise skips of steps that follow one another, or rolls back
        to one checkpoint.

    Raises:
      ConfigError: the record is unreadable.
    """
    self.action, self._limits = action, (max_total, max_consecutive)
    self._path = workdir / FILE
    found, problem = {"skipped": [], "passed_over": []}, None
    try:
      if self._path.exists():
        found = require_json(self._path, _RECORD, "fix it, or use another --workdir")
    except ConfigError as e:
      problem = str(e)
    found, problem = cluster.from_leader([found, problem])  # whose reading is everybody's
    if problem:
      raise ConfigError(problem)
    self.skipped: list[dict[str, Any]] = found["skipped"]
    self.passed_over: list[dict[str, Any]] = found["passed_over"]

  def start_from(self, step: int) -> None:
    """The run resumes after this step: later skips recur, or do not."""
    self.skipped = [s for s in self.skipped if s["step"] <= step]

  def skip(self, step: int, what: str, hopeless: bool = False) -> None:
    """Count a skipped step.

    Args:
      step: which.
      what: which device found what, the same in all processes.
      hopeless: the state itself is bad, so that all further steps would be too.

    Raises:
      NonFiniteError: the action is another one, or these are too many.
    """
    if self.action != "skip" or hopeless:
      raise NonFiniteError(step, what)
    self.skipped.append({"step": step, "what": what})
    self._write()
    steps = {s["step"] for s in self.skipped}
    consecutive = next(n for n in range(1, step + 2) if step - n not in steps)
    if too_many := self._too_many(len(steps), consecutive):
      raise NonFiniteError(step, f"{what} (skipped {too_many})")

  def roll_back(self, error: NonFiniteError, last_good: int) -> None:
    """Pass over what follows the last good checkpoint, the bad step included.

    Args:
      error: why.
      last_good: step of that checkpoint; 0: the beginning.

    Raises:
      NonFiniteError: these are too many.
    """
    to = max(error.step, last_good + 1)
    what = str(error).partition("; last good")[0]
    self.start_from(last_good)
    self.passed_over.append({"after": last_good, "to": to, "what": what})
    self._write()
    consecutive = sum(p["after"] == last_good for p in self.passed_over)
    if too_many := self._too_many(len(self.passed_over), consecutive):
      error.args = (f"{error.args[0]}; rolled back {too_many}",)
      raise error

  def _too_many(self, total: int, consecutive: int) -> str | None:
    """What is over its limit, as words."""
    most, most_consecutive = self._limits
    if consecutive > most_consecutive:
      limit = f"max_consecutive_skipped_steps={most_consecutive}"
      return f"{consecutive} times in a row, {limit}"
    return f"{total} times, max_skipped_steps={most}" if total > most else None

  def done_until(self, step: int) -> int:
    """The step up to which all is passed over after `step`; `step` if nothing is."""
    while ends := [p["to"] for p in self.passed_over if p["after"] <= step < p["to"]]:
      step = max(ends)
    return step

  def next_after(self, step: int, stop: int) -> int:
    """Where training from `step` on has to pause: at `stop`, or before a gap."""
    return min([p["after"] for p in self.passed_over if step < p["after"]] + [stop])

  def count(self, step: int) -> int:
    """Steps skipped up to this one."""
    return sum(s["step"] <= step for s in self.skipped)

  def summary(self) -> dict[str, int]:
    """For `summary.json`."""
    return {"skipped_steps": len(self.skipped), "rolled_back": len(self.passed_over)}

  def _write(self) -> None:
    record = {"skipped": self.skipped, "passed_over": self.passed_over}
    cluster.on_leader(lambda: metrics.write_json(self._path, record), FILE)
