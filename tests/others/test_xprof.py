"""XProf's own reader on a trace of a run, as xprof is installed."""

import json
import re

import pytest

from jaxscale.planning import trace
from jaxscale.run.fit import fit
from support.configs import tiny_digits

pytest.importorskip("xprof")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  every = {"evaluation__every_epochs": "9.1", "checkpoint__every_epochs": "9.1"}
  fit(tiny_digits(epochs="10", log__profile="100:110", **every), workdir)
  return trace.find(workdir)


def page(files, name):
  """Return the data of an XProf page for a trace."""
  from xprof.convert import raw_to_tool_data

  content, _ = raw_to_tool_data.xspace_to_tool_data([*map(str, files)], name, {})
  return json.loads(content)


def test_it_shows_our_steps_and_parts(files):
  events = [e for e in page(files, "trace_viewer")["traceEvents"] if e.get("ph") == "X"]
  named = [re.fullmatch(r"train (\d+)", e["name"]) for e in events]
  assert [int(m[1]) for m in named if m] == list(range(100, 111))
  names = [e["name"] for e in events]
  assert names.count("input") == names.count("step") == 11
  assert names.count("evaluation") == names.count("saving") == 1
  (saving,) = (e for e in events if e["name"] == "saving")
  summary = trace.summarize(files)
  assert summary.host["saving"] == pytest.approx(1e-6 * saving["dur"])


def test_it_counts_operations_as_we_do(files):
  theirs, ours = {}, {}
  for event in page(files, "trace_viewer")["traceEvents"]:
    if name := event.get("args", {}).get("hlo_op"):
      theirs[name] = theirs.get(name, 0) + 1
  for op in trace.summarize(files).ops:
    ours[op.name] = ours.get(op.name, 0) + op.count
  assert ours == theirs and len(ours) > 20


def test_it_finds_the_steps_time(files):
  """On the page that says whether a run waits for its input."""
  _, steps, hosts, *_ = page(files, "overview_page")
  assert hosts["p"]["host_count"] == "1"
  assert steps["p"]["hardware_type"] == "CPU_ONLY"
  mean = trace.summarize(files).seconds / 11
  assert 0 < float(steps["p"]["steptime_ms_average"]) <= 1e3 * mean
