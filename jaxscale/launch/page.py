"""One HTML page of runs: curves, speed, where the time went, starts, settings.

It loads nothing: pictures are in it, so that the file can be sent to a colleague.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.record import flat
from jaxscale.errors import ConfigError
from jaxscale.files import output_path, read_json, read_json_lines, replace_text
from jaxscale.launch import folder as folders
from jaxscale.launch.prediction import Comparison, comparison
from jaxscale.launch.prediction import html as against_plan
from jaxscale.launch.scaling_report import Report
from jaxscale.launch.study_section import study_section
from jaxscale.metrics import plot_metrics, read_metrics, text
from jaxscale.run import provenance
from jaxscale.run.goodput import CATEGORIES, Goodput, goodput, read_activities

# Of `goodput.CATEGORIES`: what is of use is blue, what waits is grey.
_COLORS = (
  "#2f6f9f", "#c8553d", "#e0a458", "#8a6fb0", "#5b9f8f", "#7fb069", "#b0885f",
  "#b8bcc2", "#8c939b", "#d5d8dc",
)  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8881 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto;
  padding: 0 1em }
h1, h2 { line-height: 1.2; margin: 1.6em 0 .4em } h3 { margin: 1.4em 0 .3em }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .15em 1em .15em 0; border-bottom: 1px solid var(--line) }
img, svg { max-width: 100%; height: auto } figure { margin: 1em 0; background: #fff;
  border-radius: 6px; padding: .5em }
.bar { display: flex; height: 1.6em; border-radius: 4px; overflow: hidden }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em }
.keys span { margin-right: 1.4em; white-space: nowrap }
pre { background: var(--faint); padding: .7em; overflow-x: auto; border-radius: 4px }
.bar > div { flex: none }
.grid { display: grid; gap: 1em; margin: 1em 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26em), 1fr)) }
.grid figure { margin: 0 }
.cards { display: flex; flex-wrap: wrap; gap: .6em 2em; margin: 1.2em 0 }
.cards b { display: block; font-size: 1.7em; line-height: 1.2 }
.cards span { opacity: .75; font-size: .9em }
.dense { font-size: .8em } .dense td, .dense th { padding-right: .7em !important }
.notes { font-size: .9em; overflow-wrap: anywhere; padding-left: 1.3em }
"""


class RunRecord(NamedTuple):
  """What a run has on its disk; a file that is missing or damaged is empty.

  Attributes:
    name: of the run.
    workdir: of it.
    events: starts and ends of its jobs, of a run of `jaxscale.launch`.
    goodput: where its time went.
    comparison: of it with its plan; None: it has none.
  """

  name: str
  workdir: Path
  events: Sequence[Mapping[str, Any]]
  goodput: Goodput | None
  comparison: Comparison | None = None


def record(path: Path, plan: Path | None = None) -> RunRecord:
  """Find what there is of a run.

  Args:
    path: folder of a run of `jaxscale.launch`, or workdir of `jaxscale.train`.
    plan: a plan's file; None: plan.json of its workdir, if it has one.

  Raises:
    ConfigError: it is a sweep, or has written nothing.
  """
  if not (path / "run.json").exists():
    found = RunRecord(path.name, path, (), goodput(read_activities(path)))
  else:
    spec = folders.read_spec(path)
    if spec.trials:
      advice = f"give workdirs of it, as {path}/trials/0"
      raise ConfigError(f"{path.name}: is a sweep; {advice}")
    events = folders.read_events(spec, 0)
    found = RunRecord(path.name, spec.workdir(0), events, folders.read_goodput(spec, 0))
  if not (found.workdir / "config.json").exists():
    raise ConfigError(f"{path.name}: has written nothing yet; see `status {path.name}`")
  return found._replace(comparison=comparison(path, plan))


def write_page(file: Path, runs: Sequence[RunRecord], study: Report | None) -> None:
  """Write the page; each run has a section, with its plan if it has one.

  Args:
    file: that is written, or replaced.
    runs: one section each.
    study: the comparison of them; None: there is none.

  Raises:
    ConfigError: it cannot be written.
  """
  title = study.name if study else ", ".join(run.name for run in runs)
  body = [f"<h1>{escape(title)}</h1>"]
  if study:
    body += study_section(study)
  body += [part for run in runs for part in _sections(run, is_alone=len(runs) == 1)]
  made = time.strftime("%Y-%m-%d %H:%M %Z")
  head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
  view = "<meta name='viewport' content='width=device-width'>"
  page = f"<!doctype html><html lang='en'><head>{head}{view}</head><body>"
  page += "\n".join(body) + f"<p>jaxscale report, {made}</p></body></html>\n"
  try:
    replace_text(output_path(file), page)
  except OSError as e:
    raise ConfigError(f"{file}: {e.strerror}, give another file") from None


def _sections(run: RunRecord, is_alone: bool) -> Iterable[str]:
  """Of one run, from what most people look for to what few do."""
  if not is_alone:
    yield f"<h2>{escape(run.name)}</h2>"
  shape = {"outcome": str, "step": int, "total_steps": int, "devices": str}
  summary = read_json(run.workdir / "summary.json", shape)
  lines = read_metrics(run.workdir / "metrics.jsonl")
  yield f"<p>{escape(_outcome(summary, lines))}</p>"
  yield _curves(run.workdir) if lines else ""
  yield "<h3>Speed</h3>" + _speed(lines, summary)
  if run.comparison:
    yield "<h3>Against the plan</h3>" + against_plan(run.comparison)
  if run.goodput:
    yield "<h3>Where the time went</h3>" + _time_bar(run.goodput)
  yield "<h3>Starts</h3>" + _starts(run)
  described = read_json(run.workdir / "config.json", {"config": {}})
  config = described["config"] if described else {}
  settings = [[_without_class(name), str(v)] for name, v in flat(config).items()]
  yield _folded("Settings", text.html_table([], settings, left=(0, 1)))
  yield _folded("Environment of the last start", _environment(run.workdir))


def _outcome(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
  """How far it came and how well, as one sentence."""
  if not summary:
    step = max((line["step"] for line in lines), default=0)
    return f"At step {step:,}; no summary.json yet."
  done = f"{summary['step']:,} of {summary['total_steps']:,} steps"
  parts = [f"{summary['outcome'].capitalize()} after {done} on {summary['devices']}"]
  scores = {"held-out accuracy": "accuracy", "loss": "loss", "perplexity": "perplexity"}
  for label, name in scores.items():
    if isinstance(value := summary.get(name), int | float):
      parts.append(f"{label} {value:{'.2%' if name == 'accuracy' else '.4g'}}")
  return ", ".join(parts) + "."


def _curves(workdir: Path) -> str:
  """The picture of metrics.png, drawn anew as SVG."""
  with tempfile.TemporaryDirectory() as folder:
    drawn = plot_metrics(workdir, Path(folder, "metrics.svg"))
    image = drawn.read_text(encoding="utf-8") if drawn else ""
  return f"<figure>{image[image.find('<svg') :]}</figure>" if image else ""


_SPEEDS = {
  "examples/s": ("perf/examples_per_s", ",.0f"), "seconds/step": ("perf/step_s", ".3g"),
  "TFLOP/s of a device": ("perf/tflops_per_device", ".3g"), "MFU": ("perf/mfu", ".1%"),
  "HFU": ("perf/hfu", ".1%"), "waits for input": ("perf/input_wait", ".1%"),
  "exchange that nothing hides": ("perf/exposed_share", ".1%"),
  "spread of processes": ("perf/spread", ".1%"),
  "memory of a device (GB)": ("perf/peak_memory_gb", ".3g"),
}  # fmt: skip


def _speed(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
  """Medians and quartiles of the windows between two logged steps."""
  rows = []
  for label, (name, form) in _SPEEDS.items():
    values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    if values:
      low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else (None, values[0], None)
      )
      cells = (text.cell(x, form) for x in (median, low, high))
      rows.append([label, *cells, f"{len(values):,}"])
  table = text.html_table(["", "median", "25 %", "75 %", "windows"], rows)
  peak, source = summary.get("peak_tflops_per_device"), summary.get("peak_source")
  if isinstance(peak, int | float):
    table += f"<p>Peak of a device: {peak:g} TFLOP/s ({escape(str(source))}).</p>"
  return table if rows else "<p>Nothing was measured yet.</p>"


def _time_bar(spent: Goodput) -> str:
  """All categories side by side, with a legend."""
  parts, keys = [], []
  for name, color in zip(CATEGORIES, _COLORS, strict=True):
    if (seconds := spent.seconds[name]) <= 0:
      continue
    share = seconds / spent.wall_s
    label = f"{name} {text.duration(seconds)} ({share:.0%})"
    style = f"background:{color}"
    parts.append(f"<div style='{style};flex:{share:.6f}' title='{label}'></div>")
    keys.append(f"<span><i class='key' style='{style}'></i>{label}</span>")
  bar = f"<div class='bar'>{''.join(parts)}</div><p class='keys'>{''.join(keys)}</p>"
  share = text.cell(spent.share, ".0%")
  return f"{bar}<p>Goodput: {share} of {text.duration(spent.wall_s)}.</p>"


def _starts(run: RunRecord) -> str:
  """A line for each start of the run: when, where from, how far, how it ended."""
  # Of each start, what is known last.
  last = {
    x.start: x for x in sorted(read_activities(run.workdir), key=lambda x: x.time)
  }
  rows = []
  for start, found in sorted(last.items()):
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))
    after = ", ".join(f"{step:,}" for step in found.resumed) or text.NOTHING
    ran = text.duration(found.time - start)
    reached = f"{max(found.step - 1, 0):,}"
    rows.append([began, after, reached, ran, "done" if found.done else ""])
  head = ["start", "from step", "to step", "ran", ""]
  ends = []
  for event in run.events:
    if event["event"] == "end":
      then = f"; {event['next']}" if event["next"] else ""
      ends.append(f"<li>job {escape(event['job'])}: exit code {event['code']}"
                  f"{escape(then)}</li>")  # fmt: skip
  jobs = f"<ul>{''.join(ends)}</ul>" if ends else ""
  return text.html_table(head, rows) + jobs


def _environment(workdir: Path) -> str:
  """Commit, host, command, versions and variables."""
  shape = {"commit": (str, None), "host": str, "command": str}
  lines = read_json_lines(workdir / provenance.FILE, None, shape)
  if not lines:
    return "<p>Not on record.</p>"
  last = dict(lines[-1])
  command, packages = last.pop("command"), last.pop("packages", {})
  last.pop("time", None)
  rows = [[name, str(v)] for name, v in flat(last).items() if v not in (None, [])]
  known = packages.items() if isinstance(packages, dict) else ()
  versions = " ".join(f"{name}=={version}" for name, version in known)
  return (
    f"<pre>{escape(command)}</pre>{text.html_table([], rows, left=(0, 1))}"
    f"<pre style='white-space:pre-wrap'>{escape(versions)}</pre>"
  )


def _without_class(name: str) -> str:
  """The name of a setting whose value is a class: of the whole config, Config."""
  return "Config" if name == "class" else name.removesuffix(".class")


def _folded(title: str, content: str) -> str:
  return f"<details><summary>{escape(title)}</summary>{content}</details>"
