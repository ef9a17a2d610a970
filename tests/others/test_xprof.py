"""XProf's own reader on a trace of a run, as xprof is installed."""

import json
import re

import pytest

from jaxscale.run.fit import fit
from jaxscale.run.trace_request import process_file, session_folder
from support.configs import tiny_digits

pytest.importorskip("xprof")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  every = {"evaluation__every_epochs": "9.1", "checkpoint__every_epochs": "9.1"}
  fit(tiny_digits(epochs="10", log__profile="100:110", **every), workdir)
  return process_file(session_folder(workdir, "steps_100-110"), 0)


def page(file, name, **options):
  """Return the content of an XProf page for a trace."""
  from xprof.convert import raw_to_tool_data

  content, _ = raw_to_tool_data.xspace_to_tool_data([str(file)], name, options)
  return content


def test_it_shows_our_steps_and_activities(file):
  events = json.loads(page(file, "trace_viewer"))["traceEvents"]
  names = [e["name"] for e in events if e.get("ph") == "X"]
  steps = [re.fullmatch(r"train (\d+)", name) for name in names]
  assert [int(m[1]) for m in steps if m] == list(range(100, 111))
  assert names.count("input") == names.count("step") == 11
  assert names.count("evaluation") == names.count("saving") == 1
  devices = {e["args"]["device_ordinal"] for e in events if "hlo_op" in e.get("args", {})}
  assert devices == {*"01234567"}


def test_it_shows_the_scopes_of_our_step(file):
  from xprof.convert import raw_to_tool_data

  assert "graph_viewer" in raw_to_tool_data.xspace_to_tool_names([str(file)])
  # A trace lists all programs of the process, those of other tests too; ours came last.
  programs = file.parent.glob("jit_train_step*.hlo_proto.pb")
  program = max(programs, key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
  options = {"type": "long_txt", "module_name": program.name.removesuffix(".hlo_proto.pb")}
  text = str(page(file, "graph_viewer", graph_viewer_options=options | {"show_metadata": 1}))
  for scope in ("gradients/jvp(", "gradients/transpose(jvp(", "exchange/", "update/"):
    assert 'op_name="jit(train_step)/' in text and scope in text, scope


def test_it_finds_the_steps_time(file):
  """On the page that says whether a run waits for its input."""
  _, steps, hosts, *_ = json.loads(page(file, "overview_page"))
  assert hosts["p"]["host_count"] == "1"
  assert steps["p"]["hardware_type"] == "CPU_ONLY"
  assert float(steps["p"]["steptime_ms_average"]) > 0
