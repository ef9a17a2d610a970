"""The section of a scaling study on a report's page: findings, pictures, table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

from jaxscale.launch.published import PUBLISHED
from jaxscale.launch.scaling_report import Report, ScalingRow, as_plot, summary, table
from jaxscale.metrics import plot_scaling, text
from jaxscale.metrics.scaling_plot import PANELS


def study_section(found: Report) -> Iterator[str]:
  """What a reader wants first: how far it scales; then why, and all numbers.

  Args:
    found: of `scaling_report.report`.
  """
  study = found.study
  head, *notes = summary(found.name, study)
  about = head.partition(": ")[2]
  yield f"<p>{escape(about[:1].upper() + about[1:])}.</p>"
  yield _findings(found)
  figures = "".join(f"<figure>{_svg(found, name)}</figure>" for name in PANELS)
  yield f"<div class='grid'>{figures}</div>"
  yield f"<div class='dense'>{text.html_table(*table(study))}</div>"
  items = "".join(f"<li>{escape(note)}</li>" for note in notes)
  yield f"<ul class='notes'>{items}</ul>" if items else ""
  if study.kind != "one size":
    items = "".join(f"<li>{escape(str(x))}</li>" for x in PUBLISHED)
    why = "Of other models, chips and networks, published by others; not measured here:"
    title = "Published results in the picture (grey)"
    yield f"<h3>{title}</h3><p>{why}</p><ol type='a' class='notes'>{items}</ol>"


def _findings(found: Report) -> str:
  """The largest size in a few large numbers."""
  study = found.study
  rows = [row for row in study.rows if row.speed_up]
  if study.kind == "one size" or not rows:
    return ""
  cards = list(_cards(found, rows[-1]))
  shown = "".join(
    f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
    for value, label in cards
  )
  return f"<div class='cards'>{shown}</div>"


def _cards(found: Report, row: ScalingRow) -> Iterator[tuple[str, str]]:
  run, study = row.run, found.study
  sizes = f"{run.devices:,} against {text.plural(study.base or 1, 'device')}"
  yield f"{row.speed_up:.2f}×", f"speed-up, {sizes}"
  planned = study.planned.efficiency(run.devices)
  label = "efficiency" + (f", {planned:.0%} planned" if planned is not None else "")
  yield f"{row.efficiency:.0%}", label
  if run.rate:
    yield f"{run.rate:,.0f}", f"examples/s on {text.plural(run.devices, 'device')}"
  if run.exposed is not None:
    yield f"{run.exposed:.0%}", "of a step is exposed communication"
  losses = [r.run.loss for r in study.rows if r.run.loss is not None]
  if len(losses) > 1:
    yield f"{max(losses) - min(losses):.2g}", "largest difference of validation loss"


def _svg(found: Report, panel: str) -> str:
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "panel.svg")
    plot_scaling(as_plot(found.name, found.study), path, [panel])
    image = path.read_text(encoding="utf-8")
  return image[image.find("<svg") :]
