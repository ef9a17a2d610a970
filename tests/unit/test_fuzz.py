"""Every reader of a run's files, given anything: a value, or an error of one line.

    FUZZ_EXAMPLES=10000 .venv/bin/python -m pytest tests/unit/test_fuzz*.py -rP

tries 10,000 inputs for each reader, which takes some minutes, and prints for each what
it took; without it 50. None may take 3 s of processor time, and no reader 256 MB.
What comes from elsewhere is in test_fuzz_data.py, texts and messages in
test_fuzz_texts.py.
"""

import contextlib
import json
import zlib

import numpy as np
import pytest
from hypothesis import strategies as st

from jaxscale.checkpoint import lock
from jaxscale.checkpoint.checkpoint_files import MANIFEST, read_manifest
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.cluster.launch import Job
from jaxscale.cluster.requeue import count_start
from jaxscale.config.loading import load_config
from jaxscale.config.record import FORMAT, describe_run, to_plain
from jaxscale.data import stream
from jaxscale.files import parse_json
from jaxscale.jobs import batch_study, measured, prediction, scaling_report, spec, status
from jaxscale.jobs import folder as folders
from jaxscale.metrics import MetricWriter, plot, read_metrics
from jaxscale.planning import stored
from jaxscale.run.adaptive_batch import read_chosen
from jaxscale.run.damaged_examples import DamageRecord
from jaxscale.run.goodput import goodput, read_activities
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.provenance import last_start
from jaxscale.run.workdir import claim_workdir, length_before, start_devices
from jaxscale.weights.safetensors import read_index, write
from support import fuzzing
from support.bad_files import HUGE
from support.fuzzed import fuzzed
from support.fuzzing import damaged, one_line
from support.job_script import RUN
from support.plans import PLAN, workdir

limits = pytest.fixture(fuzzing.limits, autouse=True)
place = pytest.fixture(fuzzing.place, scope="module")


@fuzzed(
  st.one_of(st.binary(max_size=64), damaged({"a": [1, {"b": "c"}], "d": 1.5})),
  examples=[b"[" * 9000, b'{"a":' * 5000, HUGE],
)
def test_json(content):
  with one_line(ValueError):
    parse_json(content)


CONFIG = load_config("configs/digits.py")
DERIVED = dict(phases=[dict(batch_size=8, image_size=None, start=0, stop=9)], num_train=9)
DERIVED |= dict(total_steps=9, num_devices=8, start_devices=8, peak_lr=0.1, eval_every=1)
RUN_JSON = dict(format=FORMAT, config=to_plain(CONFIG), derived=DERIVED, processes=1)
RUN_JSON |= dict(versions={"jaxscale": "0.2"}, python="3.11", devices=["cpu"])
RUN_JSON["data"] = dict(name="digits", num_classes=10, mean=[1.0], image_shape=[8, 8])


@fuzzed(damaged(RUN_JSON))
def test_config_json(place, content):
  """A run that is done and has saved is asked for the most."""
  (place / "config.json").write_bytes(content)
  (place / "checkpoints" / "9").mkdir(parents=True, exist_ok=True)
  summary = {"outcome": "done", "step": 9, "total_steps": 9}
  (place / "summary.json").write_text(json.dumps(summary))
  start_devices(place, CONFIG)
  length_before(place, CONFIG)
  with one_line():
    claim_workdir(place, CONFIG)
  with one_line():
    run = describe_run(place)
    assert run.num_classes is None or run.num_classes < 2**63
    run.settings()


LINE = {"step": 5, "time": 1.0, "train/loss": 0.5, "perf/examples_per_s": 9.0}


@fuzzed(
  st.lists(damaged(LINE), max_size=3),
  examples=[
    [b'{"step": 1, "time": 1, "train/loss": ' + b"9" * 400 + b"}"],
    [b'{"step": 9223372036854775807, "time": 1e308, "train/loss": 1}'] * 2,
  ],
)
def test_metrics(place, lines):
  path = place / "metrics.jsonl"
  path.write_bytes(b"\n".join([json.dumps(LINE).encode(), *lines]))
  with one_line():
    found = read_metrics(path)
    status.seconds_to_go(found, 100)
  assert all(isinstance(x, (int, float)) for line in found for x in line.values())


TRIAL = {"batch_size": "8", "seed": "1", "stop_at_target": "True"}
SPEC = spec.to_json(RUN._replace(executor="local", trials=(TRIAL,)))
EVENT = dict(event="end", job="7_0", restarts=0, nodes=1, code=0, next="stop", hosts="n1", time=1)
FILES = {
  "run.json": SPEC,
  "submissions.jsonl": {"job": "7", "tasks": [0], "executor": "local", "time": 1},
  "events/0.jsonl": EVENT,
  "supervisor.jsonl": {"pid": 99999, "born": 5, "host": "n1"},
  "trials/0/metrics.jsonl": LINE,
  "trials/0/config.json": RUN_JSON,
  "trials/0/summary.json": {"outcome": "done", "step": 9, "target_step": 5},
}
ONE_FILE = st.one_of(*(st.tuples(st.just(f), damaged(d)) for f, d in FILES.items()))


@fuzzed(st.lists(ONE_FILE, min_size=1, max_size=2))
def test_status_of_a_folder(place, files):
  for name in FILES:
    (place / "run" / name).parent.mkdir(parents=True, exist_ok=True)
    (place / "run" / name).write_text(json.dumps(FILES[name]))
  for name, content in files:
    (place / "run" / name).write_bytes(content)
  with one_line():
    text = str(status.statuses(folders.all_folders(str(place))))
  assert text and not set(text) & {"\x1b", "\r"} and len(text.splitlines()) < 9
  text.encode()
  with one_line():
    study = batch_study.read(place / "run")
    assert batch_study.table(study) and json.dumps(study, allow_nan=False)


EVALUATED = LINE | {"eval/accuracy": 0.9, "eval/loss": 0.3}


@pytest.fixture(scope="module")
def plotted(place):
  """Return a folder with a drawn picture: drawing the first one takes a second."""
  (folder := place / "plotted").mkdir()
  (folder / "metrics.jsonl").write_text(json.dumps(EVALUATED))
  plot.plot_metrics(folder)
  return folder


@fuzzed(
  st.lists(damaged(EVALUATED), min_size=1, max_size=3),
  examples=[
    [b'{"step": 1, "time": 1, "train/loss": 1e308, "eval/accuracy": 1e308}'] * 2,
    [b'{"step": 1, "time": 1, "train/loss": -1, "perf/examples_per_s": NaN}'],
  ],
  share=500,
)  # a picture takes 0.3 s
@pytest.mark.filterwarnings("ignore")  # Matplotlib's, of numbers that no loss has
def test_what_a_run_plots_and_resumes(plotted, lines):
  folder = plotted
  (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
  with one_line():
    plot.plot_metrics(folder)
  MetricWriter(folder, start=5, tensorboard=False).close()
  assert all(x["step"] <= 5 for x in read_metrics(folder / "metrics.jsonl"))


@fuzzed(damaged(RUN_JSON), damaged({"outcome": "done", "devices": "1 x cpu", "loss": 1}))
def test_a_measured_run(place, config, summary):
  (place / "config.json").write_bytes(config)
  (place / "summary.json").write_bytes(summary)
  (place / "metrics.jsonl").write_text(json.dumps(LINE))
  (place / "run.json").unlink(missing_ok=True)
  with one_line():
    measured.read(place)


MEASURED = {"step": 0, "time": 1e9, "perf/compute_s": 0.7, "perf/exposed_s": 0.2}
MEASURED |= {"perf/exposed_share": 0.2, "perf/examples_per_s": 64.0}
MEASURED |= {"perf/input_wait": 0.1, "perf/tflops_per_device": 400.0, "eval/loss": 2.0}


@fuzzed(damaged(PLAN), st.lists(damaged(MEASURED), max_size=3))
def test_a_run_with_a_plan(place, content, lines):
  if not (path := place / "planned").exists():
    workdir(path)
    (path / "whole").write_bytes((path / "metrics.jsonl").read_bytes())
  (path / "plan.json").write_bytes(content)
  whole = (path / "whole").read_bytes()
  (path / "metrics.jsonl").write_bytes(b"\n".join([*lines, whole]))
  with one_line():
    stored.read_plan(path / "plan.json")
  found = prediction.comparison(path)
  assert found is not None and (found.rows or len(str(found).splitlines()) == 1)
  assert len(found.note().splitlines()) == 1
  assert not set(str(found)) & {"\x1b", "\r"}
  scaling_report.as_plot(scaling_report.compare([measured.read(path)]))


LEAF = {"shape": [2, 3], "dtype": "float32", "checksum": "00ff"}
SPLIT = {"mesh": {"data": 8}, "over": ["data"], "dims": {"w": [None, "data"]}}
SAVED = dict(step=5, metrics={"loss": 1.0}, leaves={"params/w": LEAF}, split=SPLIT)


@fuzzed(damaged(SAVED), examples=[b'{"crc32": 1}'])
def test_manifest(place, content):
  with contextlib.suppress(ValueError, TypeError, RecursionError):  # its checksum known
    found = json.loads(content)
    text = json.dumps(found, sort_keys=True).encode()
    content = json.dumps(found | {"crc32": zlib.crc32(text)}).encode()
  (place / MANIFEST).write_bytes(content)
  with one_line(DamagedError):
    assert read_manifest(place)["leaves"] is not None


def read_owner(folder):
  owner = lock._read(folder / "owner")
  return str(owner), lock.is_alive(owner), lock.is_restart("slurm-7-r2", owner.job)


def read_goodput(folder):
  return (found := goodput(read_activities(folder))) and str(found)


def find_study(folder):
  return folders.find_study(folder.name, str(folder.parent))


SKIPPED = {"step": 1, "what": "x"}
RESTARTS, COUNTS = dict(step=1, idle=1, restarts=1, job="7"), dict(tokens=5, documents=1, bytes=5)
DAMAGED = {"damaged": {"1": "a"}, "unusual": {"2": "b"}}
ACTIVITY = dict(start=5.0, time=9.0, step=3, resumed=[1], seconds={"step": 4.0})
ACTIVITY |= dict(queued=[1.0, 2.0], done=False)
RECORDS = {
  "skipped_steps.json": (
    {"skipped": [SKIPPED], "passed_over": [{"after": 1, "to": 2, "what": "x"}]},
    lambda folder: NanPolicy(folder, "skip").start_from(1),
  ),
  "batch_sizes.json": ([8, 16], read_chosen),
  "damaged.json": (
    dict.fromkeys(("training", "held-out"), DAMAGED),
    lambda folder: DamageRecord(folder, 1).count,
  ),
  "restarts.json": (RESTARTS, lambda folder: count_start(folder, Job("slurm", "7", 2), 5)),
  "owner": (dict(host="h", pid=9, job="slurm-7-r1", since=1.0, process="x"), read_owner),
  "cached.json": (COUNTS, lambda folder: stream.counts_of(folder / "cached.bin", "<u1")),
  "starts.jsonl": (dict(commit="ab", changed=["x"], host="h", command="train"), last_start),
  "activity.jsonl": (ACTIVITY, read_goodput),
  "scaling.json": ({"runs": ["a", "b"]}, find_study),
  "model.safetensors.index.json": ({"weight_map": {"w": "a.safetensors"}}, read_index),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(place, name):
  document, read = RECORDS[name]
  folder = place / "records"
  folder.mkdir(exist_ok=True)
  (folder / "cached.bin").write_bytes(b"12345")
  (folder / "cached.lengths").write_bytes(bytes(8))
  write(folder / "a.safetensors", {"w": (np.dtype("f4"), (2,))}, [np.ones(2, "f4")])

  @fuzzed(damaged(document))
  def check(content):
    (folder / name).write_bytes(content)
    with one_line():
      read(folder)

  check()
