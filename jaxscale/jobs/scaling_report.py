"""Report of a scaling study: speed-up, efficiency and a fitted law.

In strong scaling all runs have the same global batch, in weak scaling the same batch
per device. With R(n) examples per second on n devices, in both

    speed-up   S(n) = R(n) / R(b)             b: the smallest number of devices
    efficiency E(n) = S(n) / (n / b)

The share s of the smallest run's time that more devices do not shorten is fitted by
least squares, as one number: S = 1 / (s + (1 - s) b/n) by Amdahl (1967,
doi:10.1145/1465482.1465560) for strong, S = n/b - s (n/b - 1) by Gustafson (1988,
doi:10.1145/42411.42415) for weak scaling. It describes what was measured; the step
report explains it.
"""

from __future__ import annotations

import csv
import io
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxscale.config.record import flat
from jaxscale.errors import ConfigError
from jaxscale.files import output_path, replace_text
from jaxscale.jobs.folder import one_line
from jaxscale.jobs.measured import MeasuredRun, NotBegunError, read
from jaxscale.jobs.status import quality
from jaxscale.metrics import plot_scaling, text
from jaxscale.planning.stored import not_compared

Kind = Literal["strong", "weak", "one size"]
CSV, PNG = "scaling.csv", "scaling.png"
_LAWS = {"strong": "Amdahl", "weak": "Gustafson"}

# What may differ within a study: its subject, and what does not change a step.
_MAY_DIFFER = """
batch_size mesh accumulate_steps seed epochs steps target_accuracy stop_at_target input_threads
evaluation checkpoint checks log callbacks exchange.algorithm exchange.dims versions
"""
# Settings among these whose differences the report notes.
_NOTED = "accumulate_steps seed epochs steps exchange.algorithm exchange.dims versions"
# Columns of the table: the title, the key and the format.
_COLUMNS = text.columns(
  """
  run: run; nodes: nodes ,; processes: processes ,; devices: devices ,; batch: global_batch ,
  examples/s: examples_per_s ,.0f; quartiles: quartiles; windows: windows; speed-up: speed_up .2f
  efficiency: efficiency .0%; planned: planned_efficiency .0%; exposed: exposed_share .0%
  spread: spread .0%; goodput: goodput .0%; loss: loss .4f; accuracy: quality
  """
)


class Report(NamedTuple):
  """Runs of one config at several sizes, shown as a table and with a picture.

  Attributes:
    name: the name of the study.
    kind: strong or weak scaling.
    rows: the values of each run by the columns of the CSV file, and its "evaluations", sorted
      by devices; None if a value is not known.
    base: the number of devices that speed-ups are relative to; None if no run has a
      throughput.
    serial: the fitted share; None for fewer than two sizes, or outside 0 to 1, where the law
      does not apply.
    notes: the notes on the comparison, then the missing values with the reasons.
  """

  name: str
  kind: Kind
  rows: tuple[dict[str, Any], ...]
  base: int | None
  serial: float | None
  notes: tuple[str, ...]

  def heading(self) -> str:
    """Return the name, the kind of scaling and what it is relative to."""
    if self.kind == "one size":
      return f"{self.name}: all runs have one size, so there is no speed-up to report"
    batch, devices = self.rows[0]["global_batch"], self.rows[0]["devices"]
    size = f"global batch {batch:,}"
    if self.kind == "weak":
      size = f"batch {batch // devices:,} per device"
    base = text.plural(self.base or 0, "device")
    relative = f"; speed-up and efficiency relative to {base}" * bool(self.base)
    return f"{self.name}: {self.kind} scaling, {size}{relative}"

  def __repr__(self) -> str:
    return "\n".join([self.heading(), text.table(*table(self)), *self.notes])

  def _repr_html_(self) -> str:
    lines = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
    with tempfile.TemporaryDirectory() as folder:
      file = plot_scaling(as_plot(self), Path(folder, "picture.svg"))
      image = file.read_text(encoding="utf-8")
    table_and_notes = f"{text.html_table(*table(self))}<ul>{lines}</ul>"
    return f"<p>{escape(self.heading())}</p>{table_and_notes}{image[image.find('<svg') :]}"


def compare(runs: Sequence[MeasuredRun], name: str = "scaling") -> Report:
  """Compare the runs of a study.

  Raises:
    ConfigError: the runs differ in model, data, optimizer or devices, or have neither the
      same batch nor the same batch per device.
  """
  if not runs:
    raise ConfigError("no runs to compare; give the name of at least one run")
  runs = sorted(runs, key=lambda r: (r.devices, r.nodes or 0, r.name))
  notes, kind = _check_same(runs), _kind_of(runs)
  base = min((r.devices for r in runs if r.rate), default=0)
  smallest = [r for r in runs if r.rate and r.devices == base]
  rate = statistics.median(r.rate or 0.0 for r in smallest) if smallest else 0.0
  planned = next((r.planned.step.rate for r in smallest if r.planned and r.planned.step), 0.0)
  rows = [_row(run, base, rate, planned) for run in runs]
  points = [(row["devices"] / base, row["speed_up"]) for row in rows if row["speed_up"]]
  serial = serial_share(kind, points) if kind != "one size" else None
  if serial is not None:
    notes.append(_law_note(kind, serial, len({n for n, _ in points})))
  notes += [*_limits(kind, runs), *_gaps(runs)]
  share = serial if serial is not None and 0 <= serial <= 1 else None
  return Report(name, kind, tuple(rows), base or None, share, tuple(notes))


def _row(run: MeasuredRun, base: int, rate: float, planned: float) -> dict[str, Any]:
  """Return a run by the columns of the CSV file, and its evaluations.

  Args:
    run: the run.
    base: the number of devices of the smallest size.
    rate: the examples per second on these devices.
    planned: the planned examples per second on these devices; 0 if not planned.
  """
  report, step = run.step_report, run.planned and run.planned.step
  low, high = run.quartiles or (None, None)
  up = run.rate / rate if run.rate else None
  planned_up = step.rate / planned if step and planned else None
  row: dict[str, Any] = dict(run=run.name, nodes=run.nodes, processes=run.processes)
  row |= dict(devices=run.devices, device_kind=run.kind, global_batch=run.batch)
  row |= dict(examples_per_s=run.rate, examples_per_s_q1=low, examples_per_s_q3=high)
  row |= dict(windows=len(run.rates), speed_up=up, efficiency=up and up * base / run.devices)
  row |= {name: report.get(name) for name in ("exposed_share", "compute_s", "exposed_s")}
  row["spread"] = report.get("spread") if run.processes > 1 else None
  row["goodput"] = run.goodput.share if run.goodput else None
  row |= {name: run.summary.get(name) for name in ("loss", "accuracy", "perplexity")}
  row["planned_examples_per_s"] = step.rate if step else None
  row["planned_efficiency"] = planned_up and planned_up * base / run.devices
  return row | {"evaluations": run.evaluations}


def _kind_of(runs: Sequence[MeasuredRun]) -> Kind:
  """Return the kind of scaling by the batch sizes; raise ConfigError for neither."""
  if len({r.batch for r in runs}) == 1:
    return "one size" if len({r.devices for r in runs}) == 1 else "strong"
  if len({r.batch / r.devices for r in runs}) == 1:
    return "weak"
  pairs = ", ".join(f"{r.batch} on {r.devices} ({r.name})" for r in runs)
  text = f"global batches of {pairs} devices: neither the same (strong scaling) nor "
  raise ConfigError(f"{text}the same per device (weak); give the runs of one study")


def serial_share(kind: Kind, points: Sequence[tuple[float, float]]) -> float | None:
  """Fit Amdahl's or Gustafson's s by least squares; below 0 for better than ideal scaling.

  Args:
    kind: strong or weak scaling.
    points: the (devices, speed-up), both relative to the smallest size.

  Example:
    >>> round(serial_share("strong", [(1, 1.0), (4, 1 / (0.1 + 0.9 / 4))]), 6)
    0.1
    >>> round(serial_share("weak", [(1, 1.0), (4, 3.7)]), 6)
    0.1
  """
  if kind == "strong":  # 1/S - b/n = s (1 - b/n)
    pairs = [(1 - 1 / n, 1 / s - 1 / n) for n, s in points]
  else:  # n/b - S = s (n/b - 1)
    pairs = [(n - 1, n - s) for n, s in points]
  squares = sum(x * x for x, _ in pairs)
  return sum(x * y for x, y in pairs) / squares if squares else None


def law(kind: Kind, serial: float, n: float) -> float:
  """Return the speed-up by Amdahl or Gustafson on n times the smallest size."""
  return 1 / (serial + (1 - serial) / n) if kind == "strong" else n - serial * (n - 1)


def _check_same(runs: Sequence[MeasuredRun]) -> list[str]:
  """Check that runs are one study; return allowed differences as notes."""
  kind = min({r.kind for r in runs} - {""}, default="")  # "": not on record yet
  every = [
    flat({**run.config, "versions": run.versions})
    | {"training examples": run.num_train, "devices": run.kind or kind}
    for run in runs
  ]
  notes = {}
  for run, settings in zip(runs[1:], every[1:], strict=True):
    for name in {**every[0], **settings}:
      if (old := every[0].get(name)) == (new := settings.get(name)):
        continue
      if not {name, name.split(".")[0]} & {*_MAY_DIFFER.split()}:
        text = f"{runs[0].name} and {run.name} differ in {name} ({old!r} and {new!r}), "
        text += "so they are not a scaling study; give runs of one config"
        raise ConfigError(text)
      if {name, name.split(".")[0]} & {*_NOTED.split()}:
        pairs = zip(runs, every, strict=True)
        values = ", ".join(f"{s.get(name)} ({r.name})" for r, s in pairs)
        notes[name] = f"{name} is not the same in all: {values}"
  return [*notes.values()]


def _law_note(kind: Kind, serial: float, sizes: int) -> str:
  """Describe the fitted share."""
  text = f", fitted to {sizes} sizes: {serial:.1%} of the smallest size's time does "
  text += "not get shorter with more devices; "
  if serial <= 0:
    text = ": no serial share, scaling is ideal or better"
  elif serial > 1:
    text = ": does not apply, more devices are slower than the smallest size"
  elif kind == "weak":
    text += f"each additional one adds {1 - serial:.1%} of the ideal"
  else:
    text += f"at most {1 / serial:,.1f} times as fast, on any number"
  return _LAWS[kind] + text


def _limits(kind: Kind, runs: Sequence[MeasuredRun]) -> Iterator[str]:
  """Yield the limits of the comparison, one line each."""
  machines = {(r.nodes, r.kind, r.hosts) for r in runs}
  if machines == {(1, "cpu", runs[0].hosts)} and kind != "one size":
    text = f"all sizes ran on one machine ({runs[0].hosts}) and shared its processor "
    yield f"{text}cores: this shows what more processes cost, not what more nodes give"
  losses = [r.summary["loss"] for r in runs if "loss" in r.summary]
  alike = {tuple(map(r.config.get, ("seed", "epochs", "steps"))) for r in runs}
  if kind == "strong" and len(alike) == 1 and len(losses) == len(runs):
    yield f"validation losses differ by at most {max(losses) - min(losses):.1g}"
  for run in runs:
    if run.planned and not run.planned.step:
      yield f"{run.name}: {not_compared(run.planned.reason)}"


def _gaps(runs: Sequence[MeasuredRun]) -> Iterator[str]:
  """Yield the missing values with the reasons, then each run's goodput and origin."""
  missing = text.grouped((reason, run.name) for run in runs for reason in run.missing)
  for reason, names in missing.items():
    yield f"{text.NOTHING} {', '.join(names)}: {reason}"
  yield from (f"{run.name}: {run.goodput}" for run in runs if run.goodput)
  yield from (f"{run.name}: {run.origin}" for run in runs if run.origin)


def report(name: str, paths: Sequence[Path], folder: str | Path | None = None) -> Report:
  """Read and compare runs; write the table and the picture if a folder is given.

  Args:
    name: the name of the study, for the headings.
    paths: the folders of runs, or workdirs.
    folder: the folder for `CSV`, the table, and `PNG`, the picture; None writes none.

  Raises:
    ConfigError: the runs are not one study, or a file cannot be written.
  """
  runs, waiting = [], []
  for path in paths:
    try:
      runs.append(read(path))
    except NotBegunError as e:
      waiting.append(str(e))
  if waiting and not runs:
    raise ConfigError(waiting[0])
  study = compare(runs, name)
  study = study._replace(notes=(*study.notes, *waiting))
  if folder:
    with one_line(folder, "use a different directory"):
      replace_text(output_path(Path(folder, CSV)), as_csv(study))
      plot_scaling(as_plot(study), output_path(Path(folder, PNG)))
  return study


def table(study: Report) -> tuple[list[str], list[list[str]]]:
  """Return titles and rows of cells, without the columns that no run has a value for."""
  hidden = dict.fromkeys(("speed_up", "efficiency")) if study.kind == "one size" else {}
  rows = []
  for row in study.rows:
    ends = [row[f"examples_per_s_{q}"] for q in ("q1", "q3")]
    quartiles = None if None in ends else " to ".join(f"{q:,.0f}" for q in ends)
    good = quality(row["accuracy"], row["perplexity"]) or None
    values = row | {"quartiles": quartiles, "quality": good} | hidden
    rows.append([text.cell(values[name], form) for name, form in _COLUMNS.values()])
  kept = [any(cell != text.NOTHING for cell in column) for column in zip(*rows, strict=True)]
  return [*compress(_COLUMNS, kept)], [[*compress(row, kept)] for row in rows]


def as_csv(study: Report) -> str:
  """Return the table as CSV in full precision; unknown values are empty."""
  out = io.StringIO()
  names = [name for name in study.rows[0] if name != "evaluations"]
  writer = csv.DictWriter(out, names, lineterminator="\n", extrasaction="ignore")
  writer.writeheader()
  writer.writerows(study.rows)
  return out.getvalue()


def as_plot(study: Report) -> dict[str, Any]:
  """Return the input of `plot_scaling`."""
  curve, label, base, rows = [], "", study.base, study.rows
  if base and study.serial is not None:
    most = max(row["devices"] for row in rows) / base
    grid = [most ** (i / 60) for i in range(61)]
    curve = [(base * n, law(study.kind, study.serial, n)) for n in grid]
    label = f"{_LAWS[study.kind]}, serial share {study.serial:.1%}"
  title = study.heading().partition(";")[0]
  return {"title": title, "base": base, "law": curve, "law_label": label, "rows": rows}
