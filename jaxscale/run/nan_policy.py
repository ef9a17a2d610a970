"""NaN policy: what a run does after a skipped step, and the record of skipped steps.

A step whose loss or gradient is NaN or Inf changes nothing (`nan_guard`). After such a step:

    stop        the run ends
    skip        the run continues with the next batch; there is nothing to undo
    roll_back   the run resumes from the last checkpoint c as if the steps c + 1 … t had
                been done, where t is the bad step; their batches are skipped

A roll back undoes what led to the bad step and trains on different data: PaLM was
restarted from about 100 steps before a spike and skipped the data of 200 to 500 steps.
Neither those data nor that state alone reproduced the spike (arXiv:2204.02311, section
5.1). The order of the data does not change.

`skipped_steps.json` records both. A run that resumes from a checkpoint skips the same
steps again, as skips follow from data and parameters. Rolled back steps stay skipped,
wherever the run resumes. So resuming is exact under each policy.
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
  """Skipped steps of one run; every process must make the same calls.

  Example:
    >>> policy = NanPolicy(workdir, "skip")                    # doctest: +SKIP
    >>> policy.skip(17, "process 3 (n4), device 6: loss is NaN")  # doctest: +SKIP
  """

  def __init__(self, workdir: Path, action: Action, max_total: int = 10, max_consecutive: int = 3):
    """Load the record of the workdir.

    Args:
      workdir: the run's workdir, which has the record.
      action: the action after a skipped step.
      max_total: the allowed number of skips or roll backs; one more ends the run.
      max_consecutive: the allowed number of skips of consecutive steps, or of roll backs
        to one checkpoint.

    Raises:
      ConfigError: the record cannot be read.
    """
    self.action, self._limits = action, (max_total, max_consecutive)
    self._path = workdir / FILE
    record, problem = {"skipped": [], "passed_over": []}, None
    try:
      if self._path.exists():
        record = require_json(self._path, _RECORD, "fix it, or use another --workdir")
    except ConfigError as e:
      problem = str(e)
    record, problem = cluster.from_leader([record, problem])  # All use what process 0 read.
    if problem:
      raise ConfigError(problem)
    self.skipped: list[dict[str, Any]] = record["skipped"]
    self.rollbacks: list[dict[str, Any]] = record["passed_over"]

  def start_from(self, step: int) -> None:
    """Forget skips after `step`, from which the run resumes; they recur if they must."""
    self.skipped = [s for s in self.skipped if s["step"] <= step]

  def skip(self, step: int, what: str, hopeless: bool = False) -> None:
    """Count a skipped step.

    Args:
      step: the skipped step.
      what: the devices and their values, the same text in all processes.
      hopeless: True if the state itself is bad, so that all further steps would be too.

    Raises:
      NonFiniteError: the action is not "skip", or too many steps were skipped.
    """
    if self.action != "skip" or hopeless:
      raise NonFiniteError(step, what, self.action == "skip")
    self.skipped.append({"step": step, "what": what})
    self._write()
    steps = {s["step"] for s in self.skipped}
    consecutive = next(n for n in range(1, step + 2) if step - n not in steps)
    if too_many := self._too_many(len(steps), consecutive):
      raise NonFiniteError(step, f"{what} (skipped {too_many})", is_skipping=True)

  def roll_back(self, error: NonFiniteError, last_good: int) -> None:
    """Skip the steps from the last good checkpoint to the bad step, from now on.

    Args:
      error: the error of the bad step.
      last_good: the step of that checkpoint; 0 is the beginning.

    Raises:
      NonFiniteError: there were too many roll backs.
    """
    to = max(error.step, last_good + 1)
    what = str(error).partition("; last good")[0]
    self.start_from(last_good)
    self.rollbacks.append({"after": last_good, "to": to, "what": what})
    self._write()
    consecutive = sum(p["after"] == last_good for p in self.rollbacks)
    if too_many := self._too_many(len(self.rollbacks), consecutive):
      error.args = (f"{error.args[0]}; rolled back {too_many}",)
      raise error

  def _too_many(self, total: int, consecutive: int) -> str | None:
    """Describe the limit that is exceeded; None if there is none."""
    most, most_consecutive = self._limits
    if consecutive > most_consecutive:
      limit = f"max_consecutive_skipped_steps={most_consecutive}"
      return f"{consecutive} times in a row, {limit}"
    return f"{total} times, max_skipped_steps={most}" if total > most else None

  def done_until(self, step: int) -> int:
    """Return the last of the steps to skip after `step`; `step` if none is skipped."""
    while ends := [p["to"] for p in self.rollbacks if p["after"] <= step < p["to"]]:
      step = max(ends)
    return step

  def next_after(self, step: int, stop: int) -> int:
    """Return the step to train to: `stop`, or the step before the next skipped ones."""
    return min([p["after"] for p in self.rollbacks if step < p["after"]] + [stop])

  def count(self, step: int) -> int:
    """Return the number of steps skipped up to this one."""
    return sum(s["step"] <= step for s in self.skipped)

  def summary(self) -> dict[str, int]:
    """Return the values for `summary.json`."""
    return {"skipped_steps": len(self.skipped), "rolled_back": len(self.rollbacks)}

  def _write(self) -> None:
    record = {"skipped": self.skipped, "passed_over": self.rollbacks}
    cluster.on_leader(lambda: metrics.write_json(self._path, record), FILE)
