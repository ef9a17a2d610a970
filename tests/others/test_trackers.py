"""The trackers themselves: one run of theirs over a kill -9, and no network.

What they hold is read by their own readers: MLflow's client, Trackio's storage, and
protobufs of W&B in LevelDB's log format (its doc/log_format.md), after 7 bytes of W&B.
"""

import collections
import json
import os
from pathlib import Path

import pytest

from jaxscale import config, metrics
from jaxscale.config.bases import TrackerContext
from support.commands import run, run_python
from support.extending import blocks
from support.processes import free_port, killed_at_end, wait_until
from support.tiny_runs import command, newest_step, start

pytest.importorskip("wandb")
pytest.importorskip("mlflow")
pytest.importorskip("trackio")

KEY = "0123456789abcdef0123456789abcdef01234567"
ALL = (
  "--config.log.trackers=Wandb,MLflow,Trackio",  # the last of docs/extending.md
  *(f"--config.log.trackers.{x}.flush_s=40" for x in ("Wandb", "MLflow", "Trackio")),
)
# Slow until it is killed, and then fast enough that trackers are open before its end.
(TRACKIO,) = (block for block in blocks() if "class Trackio" in block)
PACED = f"""
import contextlib, os, time
from jaxscale import config, metrics

{TRACKIO}"""
PACED += """

class Paced(config.Digits):
  def build(self):
    train, held_out = super().build()
    def load(indices, draws):
      time.sleep(float(os.environ.get("PACE", 0)))
      return train.load(indices, draws)
    return train._replace(load=load), held_out

def get_config():
  return config.Config(
    model=config.MLP(hidden=(16,)), data=Paced(), optimizer=config.SGD(lr=0.1),
    batch_size=128, epochs=60, input_threads=1,
    evaluation=config.Evaluation(every_epochs=3),
    checkpoint=config.Checkpoint(every_epochs=1), log=config.Log(every_steps=3),
  )
"""


def wandb_files(workdir):
  return sorted((workdir / "wandb").glob("*run-*/run-*.wandb"))


def wandb_records(path):
  """Yield the records of a .wandb file, up to a truncated one."""
  from wandb.proto.wandb_internal_pb2 import Record

  content, at, parts = path.read_bytes(), 7, b""
  while at + 7 <= len(content):
    left = 32768 - at % 32768
    if left < 7:  # no header fits in what is left of a block
      at += left
      continue
    size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
    parts = (b"" if kind in (1, 2) else parts) + content[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # whole, or the last part
      yield Record.FromString(parts)


def wandb_values(path):
  """{name: [(step, value), ...]} of a run's history."""
  found = collections.defaultdict(list)
  for item in wandb_records(path):
    if item.WhichOneof("record_type") == "history":
      row = {(i.key or i.nested_key[0]): i.value_json for i in item.history.item}
      for name, value in row.items():
        if not name.startswith("_"):
          found[name].append((int(row["_step"]), float(value)))
  return found


def mlflow_run(workdir):
  """(run, {name: [(step, value), ...]}) of the only run in the store."""
  from mlflow.tracking import MlflowClient

  os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
  client = MlflowClient(tracking_uri=(workdir / "mlruns").as_uri())
  group = client.get_experiment_by_name("jaxscale")
  (run,) = client.search_runs([group.experiment_id])
  found = {
    name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
    for name in run.data.metrics
  }
  return run, found


READ_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("jaxscale")
rows = SQLiteStorage.get_logs("jaxscale", run.name, run_id=run.id)
print(json.dumps([run.name, run.config, rows]))
"""


def trackio_run(folder):
  """(name, config, {name: [(step, value), ...]}) of the only run in its database."""
  done = run_python("-c", READ_TRACKIO, TRACKIO_DIR=str(folder), PYTHONWARNINGS="default")
  assert done.returncode == 0, done.stderr
  name, settings, rows = json.loads(done.stdout)
  found = collections.defaultdict(list)
  for row in rows:
    for key in row.keys() - {"step", "timestamp"}:
      found[key].append((row["step"], row[key]))
  return name, settings, found


def recorded(workdir):
  """Return the points (step, value) of metrics.jsonl by name."""
  found = collections.defaultdict(list)
  for line in metrics.read_metrics(workdir / "metrics.jsonl"):
    for name in line.keys() - {"step", "time"}:
      found[name].append((line["step"], line[name]))
  return found


def is_taken(workdir, trackio_folder):
  """Return whether each tracker has stored lines, and there is a checkpoint."""
  stored = [*workdir.glob("mlruns/*/*/metrics/train/loss"), *wandb_files(workdir)]
  is_stored = len(stored) == 2 and (trackio_folder / "jaxscale.db").exists()
  return is_stored and newest_step(workdir) > 0


def steps(found):
  return {name: [step for step, _ in values] for name, values in found.items()}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
  """Return the workdir of a killed run, and the output of its next start."""
  workdir = tmp_path_factory.mktemp("resumed") / "run"
  folder = workdir.parent / "trackio"
  config = workdir.parent / "paced.py"
  config.write_text(PACED)
  env = {"TRACKIO_DIR": str(folder), "WANDB_API_KEY": KEY}
  with killed_at_end(start(workdir, *ALL, config=str(config), PACE="0.1", **env)) as process:
    wait_until(lambda: is_taken(workdir, folder), process)
  last = newest_step(workdir)
  again = start(workdir, *ALL, config=str(config), PACE="0.02", **env)
  out, err = again.communicate(timeout=300)
  assert "resuming from the checkpoint of step" in out, err
  assert again.returncode == 0 and last < newest_step(workdir)
  assert "metrics.jsonl has all" not in out and "did not finish" not in out, out
  return workdir, folder, out


def test_wandb_has_one_run_with_every_step_once(resumed):
  workdir, _, out = resumed
  (path,) = wandb_files(workdir)  # the folder of the start that was killed is gone
  assert wandb_values(path) == recorded(workdir)
  (run,) = [x.run for x in wandb_records(path) if x.WhichOneof("record_type") == "run"]
  assert run.run_id == metrics.read_json(workdir / "tracking.json")["id"]
  settings = {item.key: json.loads(item.value_json) for item in run.config.update}
  assert settings["model"]["class"] == "MLP" and settings["batch_size"] == 128
  started = metrics.read_json_lines(workdir / "starts.jsonl")[-1]
  assert settings["environment"]["commit"] == started["commit"]
  sync = [x for x in out.splitlines() if "wandb sync" in x][-1].partition("wandb sync ")
  assert Path(sync[2]) == path.parent
  listed = run_python("-m", "wandb", "sync", "--dry-run", sync[2])
  assert run.run_id in listed.stdout + listed.stderr


def test_mlflow_has_one_run_with_every_step_once(resumed):
  workdir, *_ = resumed
  run, found = mlflow_run(workdir)
  wanted = recorded(workdir)
  assert steps(found) == steps(wanted)
  # Steps that were done again are as they were, but for the clock.
  for name in wanted:
    assert name.startswith("perf/") or found[name] == wanted[name]
  assert run.data.params["model.class"] == "MLP" and run.info.status == "FINISHED"
  started = metrics.read_json_lines(workdir / "starts.jsonl")[-1]
  assert run.data.tags["mlflow.source.git.commit"] == str(started["commit"])
  (text,) = workdir.glob("mlruns/*/*/artifacts/environment.json")
  assert json.loads(text.read_text())["packages"] == started["packages"]


def test_trackio_has_one_run_with_every_step_once(resumed):
  workdir, folder, _ = resumed
  name, settings, found = trackio_run(folder)
  assert found == recorded(workdir)
  assert name == metrics.read_json(workdir / "tracking.json")["id"]
  assert settings["optimizer"]["class"] == "SGD" and settings["environment"]["host"]


def test_no_file_has_the_key(resumed):
  workdir, folder, out = resumed
  assert KEY not in out
  for path in [*workdir.rglob("*"), *folder.rglob("*")]:
    assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_without_a_route_the_run_ends_with_every_step(tmp_path):
  """W&B online through a proxy that is not there, and MLflow at a dead port."""
  dead, trackers = f"http://127.0.0.1:{free_port()}", "--config.log.trackers"
  settings = f"=Wandb,MLflow .Wandb.mode=online .MLflow.uri={dead} .Wandb.flush_s=1"
  words = [f"{trackers}{word}" for word in f"{settings} .MLflow.flush_s=1".split()]
  env = dict(HTTPS_PROXY=dead, HTTP_PROXY=dead, WANDB_API_KEY=KEY)
  done = run(*command(tmp_path, *words), **env)
  assert done.returncode == 0, done.stderr
  summary = metrics.read_json(tmp_path / "summary.json")
  assert summary["outcome"] == "done"
  logged = [step for step, _ in recorded(tmp_path)["train/loss"]]
  assert logged == [*range(7, 78, 7), summary["total_steps"]]
  assert "did not finish in 1 s" in done.stdout and KEY not in done.stdout


def context(workdir, note=print):
  return TrackerContext("run-1", "run", workdir, {"seed": 0}, {"commit": None}, note)


def test_a_run_that_is_online_gets_what_its_server_lacks(tmp_path, monkeypatch):
  """With W&B's own functions replaced: there is no server of it here."""
  import wandb

  given, lines = {}, []

  class Run:
    step = 4  # the next one that the server takes

    def log(self, values, step):
      lines.append((step, values["train/loss"]))

    def finish(self, exit_code):
      lines.append(exit_code)

  def init(**options):
    given.update(options)
    return Run()

  monkeypatch.setattr(wandb, "login", lambda **options: True)
  monkeypatch.setattr(wandb, "init", init)
  settings = config.Wandb(mode="online", project="p", entity="team")
  source = metrics.TrackerSource("W", lambda n: settings.build(context(tmp_path, n)), 60)
  before = metrics.MetricWriter(tmp_path, tensorboard=False)
  for step in range(1, 7):
    before.write(step, {"train/loss": 1 / step})
  before.close()
  writer = metrics.MetricWriter(tmp_path, start=5, tensorboard=False, trackers=[source])
  writer.write(6, {"train/loss": 1 / 6})
  writer.close("failed")
  assert lines == [(4, 1 / 4), (5, 1 / 5), (6, 1 / 6), 1]
  wanted = {"mode": "online", "resume": "allow", "id": "run-1", "entity": "team"}
  assert {k: given[k] for k in wanted} == wanted


def test_online_without_a_key_is_offline(tmp_path, monkeypatch):
  for name in [n for n in os.environ if n.startswith("WANDB_")]:
    monkeypatch.delenv(name)
  monkeypatch.setenv("NETRC", str(tmp_path / "none"))
  notes = []
  made = config.Wandb(mode="online").build(context(tmp_path, notes.append))
  made.log(1, 0.0, {"train/loss": 0.5})
  made.finish("done")
  assert notes and "no API key (wandb login); this start of the run is" in notes[0]
  (path,) = wandb_files(tmp_path)
  # Its own process writes the file, and is waited for when ours ends.
  wait_until(lambda: wandb_values(path) == {"train/loss": [(1, 0.5)]})
