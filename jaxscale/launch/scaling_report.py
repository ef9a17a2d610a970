"""The report of a scaling study, with its speed-up, efficiency and a fitted law.

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

import base64
import csv
import io
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxscale.config.record import flat
from jaxscale.errors import ConfigError
from jaxscale.files import output_path, replace_text
from jaxscale.launch import folder as folders
from jaxscale.launch.measured import MeasuredRun, NotBegunError, read
from jaxscale.launch.planned_scaling import PlannedScaling, exposed_share, plan_of
from jaxscale.launch.published import PUBLISHED
from jaxscale.launch.status import quality
from jaxscale.metrics import plot_scaling, text

Kind = Literal["strong", "weak", "one size"]
_LAWS = {"strong": "Amdahl", "weak": "Gustafson"}

# What may differ within a study: its subject, and what does not change a step.
_MAY_DIFFER = (
  "batch_size", "mesh", "accumulate_steps", "seed", "epochs", "steps",
  "target_accuracy", "stop_at_target", "input_threads", "evaluation", "checkpoint",
  "checks", "log", "exchange.algorithm", "exchange.dims", "exchange.links",
)  # fmt: skip
# Of those, what a reader of the table has to know.
_NOTED = (
  "accumulate_steps", "seed", "epochs", "steps", "exchange.algorithm", "exchange.dims",
)  # fmt: skip
# Columns of the table: a column of the CSV file, or one made of two, and its format.
_COLUMNS = {
  "run": ("run", ""), "nodes": ("nodes", ","), "processes": ("processes", ","),
  "devices": ("devices", ","), "batch": ("global_batch", ","),
  "examples/s": ("examples_per_s", ",.0f"), "quartiles": ("quartiles", ""),
  "windows": ("windows", ""), "speed-up": ("speed_up", ".2f"),
  "efficiency": ("efficiency", ".0%"), "planned": ("planned_efficiency", ".0%"),
  "exposed": ("exposed_share", ".0%"),
  "spread": ("spread", ".0%"), "goodput": ("goodput", ".0%"),
  "loss": ("loss", ".4f"), "accuracy": ("quality", ""),
}  # fmt: skip


class ScalingRow(NamedTuple):
  """A run of a study; None is what is not known.

  Attributes:
    run: what was measured.
    speed_up: relative to the smallest size.
    low: speed-up of the first quartile of the windows.
    high: speed-up of the third quartile.
    efficiency: speed-up divided by that of the devices.
  """

  run: MeasuredRun
  speed_up: float | None
  low: float | None
  high: float | None
  efficiency: float | None


class Scaling(NamedTuple):
  """Runs of one config at several sizes.

  Attributes:
    kind: strong or weak scaling.
    rows: one per run, sorted by devices.
    base: devices that speed-ups are relative to; None: no run has a throughput.
    serial: the fitted share, or None: fewer than two sizes, or outside 0 to 1, where
      the law does not apply.
    notes: what a reader must know, one line each.
    planned: what the plan of its runs says, if they have one.
  """

  kind: Kind
  rows: tuple[ScalingRow, ...]
  base: int | None
  serial: float | None
  notes: tuple[str, ...]
  planned: PlannedScaling = PlannedScaling()


def compare(runs: Sequence[MeasuredRun]) -> Scaling:
  """A study from its runs.

  Raises:
    ConfigError: they are not one study: other models, data, optimizers, devices, or
      neither the same batch nor the same batch per device.
  """
  if not runs:
    raise ConfigError("no runs to compare, give the names of some")
  runs = sorted(runs, key=lambda r: (r.devices, r.nodes or 0, r.name))
  differences = _check_same(runs)
  kind = _kind_of(runs)
  base = min((r.devices for r in runs if r.rate), default=0)
  of_base = [r.rate for r in runs if r.rate and r.devices == base]
  rows = []
  for run in runs:
    rates = (run.rate, *(run.quartiles or (None, None)))
    up, low, high = (r / statistics.median(of_base) if r else None for r in rates)
    rows.append(ScalingRow(run, up, low, high, up * base / run.devices if up else None))
  points = [(row.run.devices / base, row.speed_up) for row in rows if row.speed_up]
  serial = serial_share(kind, points) if kind != "one size" else None
  is_share = serial is not None and 0 <= serial <= 1
  planned = plan_of(runs, base or None)
  notes = (*differences, *_notes(kind, rows, serial), *planned.notes)
  law_share = serial if is_share else None
  return Scaling(kind, tuple(rows), base or None, law_share, notes, planned)


def _kind_of(runs: Sequence[MeasuredRun]) -> Kind:
  """Which kind of scaling the batch sizes are; ConfigError: neither."""
  if len({r.batch for r in runs}) == 1:
    return "one size" if len({r.devices for r in runs}) == 1 else "strong"
  if len({r.batch / r.devices for r in runs}) == 1:
    return "weak"
  pairs = ", ".join(f"{r.batch} on {r.devices} ({r.name})" for r in runs)
  text = f"global batches of {pairs} devices: neither the same (strong scaling) nor "
  raise ConfigError(f"{text}the same per device (weak); give the runs of one study")


def serial_share(kind: Kind, points: Sequence[tuple[float, float]]) -> float | None:
  """Amdahl's or Gustafson's s, by least squares; below 0 where scaling is better.

  Args:
    kind: strong or weak.
    points: (devices, speed-up), both relative to the smallest size.

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
  """The speed-up by Amdahl or Gustafson on n times the smallest size."""
  if kind == "strong":
    return 1 / (serial + (1 - serial) / n)
  return n - serial * (n - 1)


def _check_same(runs: Sequence[MeasuredRun]) -> list[str]:
  """Refuse runs that are not one study; allowed differences, as notes."""
  kind = min({r.kind for r in runs} - {""}, default="")  # "": not on record yet
  others = ({"training examples": r.num_train, "devices": r.kind or kind} for r in runs)
  every = [flat(r.config) | other for r, other in zip(runs, others, strict=True)]
  noted = {}
  for run, settings in zip(runs[1:], every[1:], strict=True):
    for name in {**every[0], **settings}:
      if (old := every[0].get(name)) == (new := settings.get(name)):
        continue
      if not {name, name.split(".")[0]} & {*_MAY_DIFFER}:
        text = f"{runs[0].name} and {run.name} differ in {name} ({old!r} and {new!r}), "
        text += "so they are not a scaling study; give runs of one config"
        raise ConfigError(text)
      if name in _NOTED:
        pairs = zip(runs, every, strict=True)
        noted[name] = [f"{s.get(name)} ({r.name})" for r, s in pairs]
  for name in runs[0].versions:
    values = dict.fromkeys(str(r.versions.get(name)) for r in runs)
    if len(values) > 1:
      noted[name] = list(values)
  return [f"{n} is not the same in all: {', '.join(v)}" for n, v in noted.items()]


def _notes(kind: Kind, rows: Sequence[ScalingRow], serial: float | None) -> list[str]:
  notes, runs = [], [row.run for row in rows]
  if serial is not None:
    sizes = len({row.run.devices for row in rows if row.speed_up})
    more = f"at most {1 / serial:,.1f} times as fast, on any number" if serial else ""
    if kind == "weak":
      more = f"each additional one adds {1 - serial:.1%} of the ideal"
    text = f", fitted to {sizes} sizes: {serial:.1%} of the smallest size's time does "
    text += f"not get shorter with more devices; {more}"
    if serial <= 0:
      text = ": no serial share, scaling is ideal or better"
    elif serial > 1:
      text = ": does not apply, more devices are slower than the smallest size"
    notes.append(_LAWS[kind] + text)
  places = {(r.nodes, r.kind, r.hosts) for r in runs}
  if len(places) == 1 and kind != "one size" and runs[0].nodes == 1:
    text = f"all sizes ran on one machine ({runs[0].hosts}) and shared its processor "
    text += "cores: this shows what more processes cost, not what more nodes give"
    notes += [text] * (runs[0].kind == "cpu")
  losses = [r.loss for r in runs if r.loss is not None]
  alike = {tuple(map(r.config.get, ("seed", "epochs", "steps"))) for r in runs}
  if kind == "strong" and len(alike) == 1 and len(losses) == len(runs):
    apart = f"{max(losses) - min(losses):.1g}"
    notes.append(f"validation losses differ by at most {apart}")
  return notes


class Report(NamedTuple):
  """A study that was measured, as table and picture.

  Attributes:
    name: name of the study.
    study: its numbers.
    csv: file of the table; None: it is not written.
    png: file of the picture, likewise.
  """

  name: str
  study: Scaling
  csv: Path | None = None
  png: Path | None = None

  def __repr__(self) -> str:
    head, *notes = summary(self.name, self.study)
    return "\n".join([head, text.table(*table(self.study)), *notes])

  __str__ = __repr__

  def _repr_html_(self) -> str:
    image = base64.b64encode(self.png.read_bytes()).decode() if self.png else ""
    image = f'<img width="960" src="data:image/png;base64,{image}">' if image else ""
    head, *notes = summary(self.name, self.study)
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
      f"<p>{escape(head)}</p>{text.html_table(*table(self.study))}"
      f"<ul>{lines}</ul>{image}"
    )


def report(
  name: str,
  paths: Sequence[Path],
  csv_file: str | Path | None = None,
  png_file: str | Path | None = None,
  plan: Path | None = None,
) -> Report:
  """Read runs and compare them; write the table and the picture that are asked for.

  Args:
    name: name of the study, for the headings.
    paths: folders of runs, or workdirs.
    csv_file: file of the table; None: it is not written.
    png_file: file of the picture, likewise.
    plan: a plan's file; None: those of the runs, if they have any.

  Raises:
    ConfigError: they are not one study, or a file cannot be written.
  """
  runs, waiting = [], []
  for path in paths:
    try:
      runs.append(read(path, plan))
    except NotBegunError as e:
      waiting.append(str(e))
  if waiting and not runs:
    raise ConfigError(waiting[0])
  study = compare(runs)
  study = study._replace(notes=(*study.notes, *waiting))
  try:
    table_file = output_path(csv_file) if csv_file else None
    picture = output_path(png_file) if png_file else None
    if table_file:
      replace_text(table_file, as_csv(study))
    if picture:
      plot_scaling(as_plot(name, study), picture)
  except OSError as e:
    file = e.filename or csv_file
    raise ConfigError(f"{file}: {e.strerror}, give another file") from None
  return Report(name, study, table_file, picture)


def find(name: str, runs: str) -> Path:
  """The folder of a run, or a workdir, by its path or its name in `runs`."""
  for path in (Path(name), folders.directory(runs) / name):
    if (path / "config.json").is_file():
      return path.absolute()
  workdirs = [p.parent.name for p in folders.directory(runs).glob("*/config.json")]
  return folders.find(name, runs, workdirs)


def summary(name: str, study: Scaling) -> list[str]:
  """The heading, then the notes, then what is missing and why."""
  first = study.rows[0].run
  kinds = {
    "strong": f"strong scaling, global batch {first.batch:,}",
    "weak": f"weak scaling, batch {first.batch // first.devices:,} per device",
    "one size": "one size, nothing to compare it with",
  }
  head = f"{name}: {kinds[study.kind]}"
  if study.base and study.kind != "one size":
    head += f"; speed-up and efficiency relative to {text.plural(study.base, 'device')}"
  missing: dict[str, list[str]] = {}
  for run in (row.run for row in study.rows):
    alone = ("spread: there is one process",) * (run.processes == 1)
    for why in (*run.missing, *alone):
      missing.setdefault(why, []).append(run.name)
  gaps = [f"{text.NOTHING} {', '.join(names)}: {why}" for why, names in missing.items()]
  times = [f"{r.run.name}: {r.run.goodput}" for r in study.rows if r.run.goodput]
  origins = [f"{r.run.name}: {r.run.origin}" for r in study.rows if r.run.origin]
  return [head, *study.notes, *gaps, *times, *origins]


def _values(row: ScalingRow, planned: PlannedScaling) -> dict[str, Any]:
  """A row by the columns of the CSV file."""
  run = row.run
  step = run.planned.step if run.planned else None
  low, high = run.quartiles or (None, None)
  return {
    "run": run.name, "nodes": run.nodes, "processes": run.processes,
    "devices": run.devices, "device_kind": run.kind, "global_batch": run.batch,
    "examples_per_s": run.rate, "examples_per_s_q1": low, "examples_per_s_q3": high,
    "windows": len(run.rates), "speed_up": row.speed_up, "efficiency": row.efficiency,
    "exposed_share": run.exposed, "compute_s": run.compute_s,
    "exposed_s": run.exposed_s, "spread": run.spread,
    "goodput": run.goodput.share if run.goodput else None, "loss": run.loss,
    "accuracy": run.accuracy, "perplexity": run.perplexity,
    "planned_examples_per_s": step.rate() if step else None,
    "planned_efficiency": planned.efficiency(run.devices) if step else None,
    "planned_exposed": exposed_share(step) if step else None,
  }  # fmt: skip


def table(study: Scaling) -> tuple[list[str], list[list[str]]]:
  """Titles and rows of cells; without a plan, without its column."""
  columns = dict(_COLUMNS)
  if study.planned.plan is None:
    del columns["planned"]
  rows = []
  for row in study.rows:
    values, run = _values(row, study.planned), row.run
    ends = " to ".join(f"{q:,.0f}" for q in run.quartiles or ())
    values |= {"quartiles": ends or None}
    values |= {"quality": quality(run.accuracy, run.perplexity) or None}
    rows.append([text.cell(values[name], form) for name, form in columns.values()])
  return [*columns], rows


def as_csv(study: Scaling) -> str:
  """The table in full precision; what is not known is empty."""
  rows = [_values(row, study.planned) for row in study.rows]
  out = io.StringIO()
  writer = csv.DictWriter(out, rows[0], lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return out.getvalue()


def as_plot(name: str, study: Scaling) -> dict[str, Any]:
  """What `plot_scaling` draws."""
  curve, label, base = [], "", study.base
  if base and study.serial is not None:
    most = max(row.run.devices for row in study.rows)
    grid = [base * (most / base) ** (i / 60) for i in range(61)]
    curve = [(n, law(study.kind, study.serial, n / base)) for n in grid]
    label = f"{_LAWS[study.kind]}, serial share {study.serial:.1%}"
  title = summary(name, study)[0].partition(";")[0]
  rows = [
    _values(row, study.planned)
    | {"low": row.low, "high": row.high, "evaluations": row.run.evaluations}
    for row in study.rows
  ]
  published = [x.as_plot() for x in PUBLISHED] if study.kind != "one size" else []
  return {
    "title": title, "base": base, "law": curve, "law_label": label, "rows": rows,
    "plan": study.planned.curve, "published": published,
  }  # fmt: skip
