"""Record of the examples that a run could not read, over all processes and restarts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Literal, get_args

from jaxscale import cluster, data, metrics

Split = Literal["training", "held-out"]  # "held-out" is the key in damaged.json.


class DamageRecord:
  """Damaged and unusual examples by split, saved as `damaged.json` in the workdir.

  Example:
    >>> record = DamageRecord(workdir, start=0)                # doctest: +SKIP
    >>> record.watch("training", train_data)                   # doctest: +SKIP
  """

  def __init__(self, workdir: Path, start: int):
    """Load the record of the workdir, unless the run starts from the beginning."""
    self._path = workdir / "damaged.json"
    self._total = {split: data.DamagedExamples() for split in get_args(Split)}
    self._watched: list[tuple[Split, data.DamagedExamples]] = []
    self._reported = ""
    one = {"damaged": {str: str}, "unusual": {str: str}}
    if start:  # A run that starts from the beginning counts anew.
      before = metrics.read_json(self._path, dict.fromkeys(self._total, one))
      for split in self._total if before else ():
        self._total[split].update(before[split])
      self._reported = self._as_json() if before else ""

  def watch(self, split: Split, dataset: data.Dataset) -> None:
    """Count also the examples that `dataset` cannot read in this process."""
    if dataset.damaged is not None:
      self._watched.append((split, dataset.damaged))

  def collect(self) -> list[str]:
    """Gather the records of all processes; return one line per split if anything is new.

    All processes must call it.
    """
    if not self._watched:
      return []
    for reports in cluster.gather([(s, d.as_dict()) for s, d in self._watched]):
      for split, one in reports:
        self._total[split].update(one)
    if self._as_json() == self._reported:
      return []
    self._reported = self._as_json()
    if cluster.is_leader():
      # With a full disk the file keeps its content; the lines below report the examples.
      with contextlib.suppress(OSError):
        metrics.write_json(self._path, json.loads(self._reported))
    reports = {k: x.describe() for k, x in self._total.items() if x.count or x.unusual}
    return [f"{k.replace('held-out', 'validation')} data: {x}" for k, x in reports.items()]

  @property
  def count(self) -> int:
    """The number of distinct damaged examples at the last `collect`."""
    return sum(damage.count for damage in self._total.values())

  def _as_json(self) -> str:
    return json.dumps({s: d.as_dict() for s, d in self._total.items()}, sort_keys=True)
