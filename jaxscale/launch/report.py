"""The report of a scaling study: a table, a CSV file and a picture."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.validation import nearest
from jaxscale.errors import EXIT_DONE, ConfigError, one_line_errors
from jaxscale.launch import folder as folders
from jaxscale.launch import measured, table
from jaxscale.launch.compare import Scaling, compare, law
from jaxscale.launch.table import NOTHING
from jaxscale.metrics import plot_scaling

USAGE = """\
usage: python -m jaxscale.cli.report STUDY [--csv FILE] [--png FILE] [--runs DIR]
       python -m jaxscale.cli.report RUN [RUN ...] [--csv FILE] [--png FILE] [--runs DIR]

How a training scales: throughput, efficiency, exposed communication and the spread
between processes, of the same config at several sizes.

  STUDY       what `python -m jaxscale.launch scaling` was given as --name
  RUN         a run of jaxscale.launch, by name or folder, or a workdir of
              jaxscale.train
  --csv FILE  the table in full (default: scaling.csv in the study's folder, or here)
  --png FILE  the picture (default: scaling.png beside it)
  --runs DIR  where the runs are (default runs)

exit code: 0 done, 2 a mistake in what was asked for, 1 anything else"""
_OPTIONS = ("csv", "png", "runs")

_HEAD = (
  "run", "nodes", "processes", "devices", "batch", "examples/s", "quartiles", "windows",
  "speed-up", "efficiency", "exposed", "spread", "loss", "accuracy",
)  # fmt: skip
_COLUMNS = (
  "run", "nodes", "processes", "devices", "device_kind", "global_batch",
  "examples_per_s", "examples_per_s_q1", "examples_per_s_q3", "windows", "speed_up",
  "efficiency", "exposed_share", "compute_s", "exposed_s", "spread", "loss", "accuracy",
  "perplexity",
)  # fmt: skip


class Report(NamedTuple):
  """A study that was measured, as table and picture.

  Attributes:
    name: of the study.
    study: its numbers.
    csv: the file of the table.
    png: the file of the picture.
  """

  name: str
  study: Scaling
  csv: Path
  png: Path

  def __repr__(self) -> str:
    return text(self.name, self.study)

  __str__ = __repr__

  def _repr_html_(self) -> str:
    image = base64.b64encode(self.png.read_bytes()).decode()
    head, *notes = (line for line in _words(self.name, self.study) if line)
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
      f"<p>{escape(head)}</p>{table.as_html(_HEAD, _cells(self.study))}"
      f'<ul>{lines}</ul><img width="960" src="data:image/png;base64,{image}">'
    )


def report(name: str, paths: Sequence[Path], csv_file: Path, png_file: Path) -> Report:
  """Read runs, and write the table and the picture of what they are together.

  Args:
    name: of the study, for the headings.
    paths: folders of runs, or workdirs.
    csv_file: is written.
    png_file: is written.

  Raises:
    ConfigError: they are not one study, or a file cannot be written.
  """
  runs, waiting = [], []
  for path in paths:
    try:
      runs.append(measured.read(path))
    except measured.NotBegunError as e:
      waiting.append(str(e))
  if waiting and not runs:
    raise ConfigError(waiting[0])
  study = compare(runs)
  study = study._replace(notes=(*study.notes, *waiting))
  for file, write in (
    (csv_file, lambda: csv_file.write_text(as_csv(study))),
    (png_file, lambda: plot_scaling(as_plot(name, study), png_file)),
  ):
    try:
      write()
    except OSError as e:
      raise ConfigError(f"{file}: {e.strerror}, give another file") from None
  return Report(name, study, csv_file, png_file)


def text(name: str, study: Scaling) -> str:
  """The table for a terminal, and below it what is missing, and why."""
  head, *notes = _words(name, study)
  return "\n".join([head, table.as_text(_HEAD, _cells(study)), *notes])


def _words(name: str, study: Scaling) -> list[str]:
  """The heading, and the notes."""
  batches = [row.run.batch for row in study.rows]
  rows = {
    "strong": f"strong scaling, global batch {batches[0]:,}",
    "weak": f"weak scaling, batch {batches[0] // study.rows[0].run.devices:,} a device",
    "one size": "one size, nothing to compare it with",
  }
  head = f"{name}: {rows[study.kind]}"
  if study.base and study.kind != "one size":
    devices = f"{study.base} device{'s' * (study.base != 1)}"
    head += f"; speed-up and efficiency against {devices}"
  missing: dict[str, list[str]] = {}
  for row in study.rows:
    for why in row.run.missing:
      missing.setdefault(why, []).append(row.run.name)
  gaps = [f"{NOTHING} {', '.join(names)}: {why}" for why, names in missing.items()]
  alone = [row.run.name for row in study.rows if row.run.processes == 1]
  if alone:
    gaps.append(f"{NOTHING} {', '.join(alone)}: spread: one process has no other")
  return [head, *study.notes, *gaps]


def _cells(study: Scaling) -> list[list[str]]:
  def shown(value: float | None, layout: str) -> str:
    return NOTHING if value is None else format(value, layout)

  rows = []
  for row in study.rows:
    run = row.run
    ends = [f"{q:,.0f}" for q in run.quartiles or ()]
    rows.append([
      run.name,
      shown(run.nodes, ","),
      f"{run.processes:,}",
      f"{run.devices:,}",
      f"{run.batch:,}",
      shown(run.rate, ",.0f"),
      " to ".join(ends) or NOTHING,
      str(len(run.rates)),
      shown(row.speed_up, ".2f"),
      shown(row.efficiency, ".0%"),
      shown(run.exposed, ".0%"),
      shown(run.spread, ".0%"),
      shown(run.loss, ".4f"),
      table.result(run.accuracy, run.perplexity) or NOTHING,
    ])  # fmt: skip
  return rows


def as_csv(study: Scaling) -> str:
  """The table in full precision; what is not known is empty."""
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(_COLUMNS)
  for row in study.rows:
    run = row.run
    writer.writerow([
      run.name, run.nodes, run.processes, run.devices, run.kind, run.batch, run.rate,
      *(run.quartiles or (None, None)), len(run.rates), row.speed_up, row.efficiency,
      run.exposed, run.compute_s, run.exposed_s, run.spread, run.loss, run.accuracy,
      run.perplexity,
    ])  # fmt: skip
  return out.getvalue()


def as_plot(name: str, study: Scaling) -> dict[str, Any]:
  """What `plot_scaling` draws."""
  curve, label, base = [], "", study.base
  if base and study.serial is not None:
    most = max(row.run.devices for row in study.rows)
    grid = [base * (most / base) ** (i / 60) for i in range(61)]
    curve = [(n, law(study.kind, study.serial, n / base)) for n in grid]
    who = "Amdahl" if study.kind == "strong" else "Gustafson"
    label = f"{who}, serial share {study.serial:.1%}"
  return {
    "title": _words(name, study)[0].partition(";")[0],
    "base": base,
    "law": curve,
    "law_label": label,
    "rows": [
      {
        "devices": row.run.devices,
        "rate": row.run.rate,
        "speed_up": row.speed_up,
        "low": row.low,
        "high": row.high,
        "efficiency": row.efficiency,
        "compute_s": row.run.compute_s,
        "exposed_s": row.run.exposed_s,
        "spread": row.run.spread,
      }
      for row in study.rows
    ],
  }


@one_line_errors
def main(argv: list[str]) -> int:
  """`python -m jaxscale.cli.report`; returns the exit code."""
  if {"--help", "-h"} & set(argv):
    print(USAGE)
    return EXIT_DONE
  names, options = _parse(argv)
  runs = options.get("runs", "runs")
  if not names:
    raise ConfigError("jaxscale.cli.report: of which runs? give names, or a study's")
  study = folders.find_study(names[0], runs) if len(names) == 1 else None
  place, paths = study or (Path(), [find(name, runs) for name in names])
  files = (
    Path(options.get(kind, place / f"scaling.{kind}")) for kind in ("csv", "png")
  )
  found = report(place.name or "scaling", paths, *files)
  print(found)
  print(f"{found.csv}\n{found.png}")
  return EXIT_DONE


def find(name: str, runs: str) -> Path:
  """The folder of a run, or a workdir."""
  if (Path(name) / "config.json").is_file():
    return Path(name).absolute()
  return folders.find(name, runs)


def _parse(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
  names, options, args = [], {}, list(argv)
  while args:
    arg = args.pop(0)
    if not arg.startswith("-"):
      names.append(arg)
      continue
    name, given, value = arg.removeprefix("--").partition("=")
    if name not in _OPTIONS:
      known = [f"--{n}" for n in (*_OPTIONS, "help")]
      raise ConfigError(f"{arg}: not an option, {nearest(arg, known)}")
    if not given:
      if not args:
        raise ConfigError(f"{arg}: a value is missing, write {arg}=VALUE")
      value = args.pop(0)
    options[name] = value
  return names, options
