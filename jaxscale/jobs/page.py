"""HTML report of runs: curves, speed, use of time, starts and settings.

The page is one file that contains its pictures and loads nothing, so it can be sent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxscale.config.record import flat
from jaxscale.files import output_path, read_json, read_json_lines, replace_text
from jaxscale.jobs.folder import one_line
from jaxscale.jobs.measured import SUMMARY, Located, locate, quartiles, resumed_text
from jaxscale.jobs.prediction import comparison
from jaxscale.jobs.scaling_report import Report, svg
from jaxscale.metrics import plot_metrics, read_metrics, text
from jaxscale.run import provenance
from jaxscale.run.goodput import read_activities

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8881 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .15em 1em .15em 0; border-bottom: 1px solid var(--line) }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 6px }
pre { background: var(--faint); padding: .7em; white-space: pre-wrap }
"""
_SPEEDS = text.columns(
  """
  examples/s: examples_per_s ,.0f; seconds/step: step_s .3g
  TFLOP/s of a device: tflops_per_device .3g; MFU: mfu .1%; HFU: hfu .1%
  waits for input: input_wait .1%; exchange that nothing hides: exposed_share .1%
  spread of processes: spread .1%; memory of a device (GB): peak_memory_gb .3g
  """
)


def write_page(
  file: Path, paths: Sequence[Path], study: Report | None, plan: Path | None = None
) -> None:
  """Write the page with a section per run, including its plan if it has one.

  Args:
    file: the file of the page, which is replaced if it exists.
    paths: folders of runs, or workdirs.
    study: the comparison of the runs; None if there is none.
    plan: the file of a plan; None means plan.json of each workdir, if it exists.

  Raises:
    ConfigError: a path is a sweep or has no records, or the page cannot be written.
  """
  runs = [locate(path) for path in paths]
  title = study.name if study else ", ".join(run.name for run in runs)
  body = [f"<h1>{escape(title)}</h1>", study._repr_html_() if study else ""]
  for run, path in zip(runs, paths, strict=True):
    body += [f"<h2>{escape(run.name)}</h2>"] * (len(runs) > 1)
    body += _sections(run)
    if compared := comparison(path, plan):
      rows = text.html_table(*compared.table()) if compared.rows else ""
      body.append(f"<h3>Plan</h3><p>{escape(compared.heading())}</p>{rows}")
  written = time.strftime("%Y-%m-%d %H:%M %Z")
  head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
  view = "<meta name='viewport' content='width=device-width'>"
  page = f"<!doctype html><html lang='en'><head>{head}{view}</head><body>"
  page += "\n".join(body) + f"<p>jaxscale report, {written}</p></body></html>\n"
  with one_line(file, "use a different file"):
    replace_text(output_path(file), page)


def _sections(run: Located) -> Iterable[str]:
  """Yield the parts of a run's section, the most important ones first."""
  summary = read_json(run.workdir / "summary.json", SUMMARY)
  lines = read_metrics(run.workdir / "metrics.jsonl")
  yield f"<p>{escape(_outcome(summary, lines))}</p>"
  yield svg(lambda path: plot_metrics(run.workdir, path)) if lines else ""
  yield "<h3>Speed</h3>" + _speed(lines, summary)
  if run.goodput:
    yield f"<h3>Where the time went</h3><p>{escape(str(run.goodput))}</p>"
  yield "<h3>Starts</h3>" + _starts(run)
  config = read_json(run.workdir / "config.json", {"config": {}}).get("config", {})
  settings = [[name, str(value)] for name, value in flat(config).items()]
  yield _folded("Settings", text.html_table([], settings, left=(0, 1)))
  yield _folded("Environment of the last start", _environment(run.workdir))


def _outcome(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
  """Return the progress and the quality of a run in one sentence."""
  step = max((line["step"] for line in lines), default=0)
  if not summary:
    return f"At step {step:,}; no summary.json yet."
  if resumed := resumed_text(step, summary):
    return f"{resumed.capitalize()}."
  done = f"{summary['step']:,} of {summary['total_steps']:,} steps"
  parts = [f"{summary['outcome'].capitalize()} after {done} on {summary['devices']}"]
  for name, form in (("accuracy", ".2%"), ("loss", ".4g"), ("perplexity", ".4g")):
    if isinstance(value := summary.get(name), int | float):
      parts.append(f"validation {name} {value:{form}}")
  return ", ".join(parts) + "."


def _speed(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
  """Return a table of medians and quartiles over the windows between logged steps."""
  rows = []
  for label, (key, form) in _SPEEDS.items():
    if values := [line[name] for line in lines if (name := f"perf/{key}") in line]:
      ends = quartiles(values) if len(values) > 1 else (None, None)
      cells = (text.cell(x, form) for x in (statistics.median(values), *ends))
      rows.append([label, *cells, f"{len(values):,}"])
  if not rows:
    return "<p>No measurements yet.</p>"
  table = text.html_table(["", "median", "25 %", "75 %", "windows"], rows)
  peak, source = summary.get("peak_tflops_per_device"), summary.get("peak_source")
  if isinstance(peak, int | float):
    table += f"<p>Peak of a device: {peak:g} TFLOP/s ({escape(str(source))}).</p>"
  return table


def _starts(run: Located) -> str:
  """Return a table of the run's starts: time, first and last step, duration, end."""
  activities = sorted(read_activities(run.workdir), key=lambda x: x.time)
  rows = []
  for start, newest in sorted({x.start: x for x in activities}.items()):
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))
    after = ", ".join(f"{step:,}" for step in newest.resumed) or text.NOTHING
    ran, reached = text.duration(newest.time - start), max(newest.step - 1, 0)
    rows.append([began, after, f"{reached:,}", ran, "done" if newest.done else ""])
  jobs = [[x["job"], str(x["code"]), x["next"]] for x in run.events if x["event"] == "end"]
  tables = text.html_table(["start", "from step", "to step", "ran", ""], rows)
  return tables + (text.html_table(["job", "exit code", "then"], jobs) if jobs else "")


def _environment(workdir: Path) -> str:
  """Return the commit, host, command, versions and variables of the last start."""
  starts = read_json_lines(workdir / provenance.FILE, None, {"command": str})
  if not starts:
    return "<p>Not recorded.</p>"
  start = dict(starts[-1])
  command = start.pop("command")
  rows = [[name, str(v)] for name, v in flat(start).items() if v not in (None, [])]
  return f"<pre>{escape(command)}</pre>{text.html_table([], rows, left=(0, 1))}"


def _folded(title: str, content: str) -> str:
  return f"<details><summary>{escape(title)}</summary>{content}</details>"
