"""Each file of a workdir, damaged: one line says so, or the run resumes."""

import json
import os
import re
import shutil
import zlib

import pytest

from jaxscale.checkpoint.checkpoint_files import MANIFEST
from jaxscale.cluster.launch import Job
from jaxscale.cluster.requeue import count_start
from jaxscale.config.record import describe_run
from jaxscale.errors import user_message
from jaxscale.metrics import MetricWriter, read_metrics
from jaxscale.run.adaptive_batch import read_chosen
from jaxscale.run.damaged_examples import DamageRecord
from jaxscale.run.fit import fit
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.workdir import claim_workdir, forget_unsaved, length_before, start_devices
from support.bad_files import DEEP, EVERY, HUGE, put
from support.cases import all_slow_except
from support.configs import tiny_digits
from support.errors import config_error


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("finished") / "run"
  return fit(tiny_digits(), workdir).state, workdir


@pytest.fixture
def workdir(finished, tmp_path):
  return shutil.copytree(finished[1], tmp_path / "run")


def changed(content, *path, to):
  """config.json, or any JSON, with one value replaced."""
  node = content = json.loads(content)
  for key in path[:-1]:
    node = node[key]
  node[path[-1]] = to
  return json.dumps(content).encode()


# Where in config.json, and what is there instead.
NUMBERS = {
  "settings that are a number": ("config", 5),
  "a model that is text": ("config model", "MLP"),
  "no class": ("config model class", None),
  "steps as text": ("derived total_steps", "45"),
  "devices as text": ("derived num_devices", "8"),
  "derived that is a list": ("derived", []),
  "data that are text": ("data", "digits"),
  "versions that are a list": ("format", []),
}


NO_FILES = "a directory", "a pipe"


def damage_config(workdir, name):
  path, whole = workdir / "config.json", (workdir / "config.json").read_bytes()
  if name == "a pipe":
    path.unlink()
    os.mkfifo(path)
  else:
    where, value = NUMBERS.get(name, ("", None))
    put(path, changed(whole, *where.split(), to=value) if where else EVERY.get(name))


@pytest.mark.parametrize("name", [*EVERY, *NUMBERS, *NO_FILES])
def test_a_damaged_config_is_one_line_with_its_remedy(workdir, name):
  """A command that reads the run gives the same line, before anything is trained."""
  damage_config(workdir, name)
  assert start_devices(workdir, tiny_digits()) in (None, 8)
  with config_error("; ", match=r"config\.json.*(another --|a new )workdir"):
    claim_workdir(workdir, tiny_digits())
  if not name.startswith(("steps", "devices", "derived")):  # it needs none of these
    with config_error(match=r"config\.json"):
      describe_run(workdir)


@pytest.mark.parametrize("name", [*EVERY, *NUMBERS])
def test_where_nothing_was_saved_a_damaged_config_is_no_error(workdir, name):
  damage_config(workdir, name)
  shutil.rmtree(workdir / "checkpoints")
  assert start_devices(workdir, tiny_digits()) in (None, 8)
  claim_workdir(workdir, tiny_digits(optimizer__lr="0.2"))
  put(workdir / "batch_sizes.json", b"[64]")
  forget_unsaved(workdir, tiny_digits(optimizer__lr="0.2"))
  assert not (workdir / "batch_sizes.json").exists()
  assert length_before(workdir, tiny_digits(epochs="2")) == {"epochs": 2, "steps": None}


def test_a_run_that_is_done_without_epochs_is_another(workdir):
  path, whole = workdir / "config.json", (workdir / "config.json").read_bytes()
  for content, says in (
    (
      changed(whole, "config", to={"class": "X", "model": {"class": "MLP"}}),
      "class is 'X' in the workdir",
    ),
    (changed(whole, "config", "epochs", to=-1.0), "epochs is -1.0 in the workdir"),
    (changed(whole, "config", "epochs", to="1"), "epochs is '1' in the workdir"),
  ):
    put(path, content)
    assert start_devices(workdir, tiny_digits()) is None
    with config_error(f"a different experiment: {says}"):
      claim_workdir(workdir, tiny_digits())


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_takes_the_place_of_a_config_until_it_is_moved(workdir, name):
  damage_config(workdir, name)
  shutil.rmtree(workdir / "checkpoints")
  with config_error("config.json: not a file; move"):
    fit(tiny_digits(), workdir)


def test_a_config_that_may_not_be_read_is_one_line(workdir, monkeypatch):
  opened = os.open

  def refuse(path, *args, **options):
    if str(path).endswith("config.json"):
      raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *args, **options)

  monkeypatch.setattr(os, "open", refuse)
  with config_error(match=r"Permission denied; .*readable \(chmod\)"):
    claim_workdir(workdir, tiny_digits())


def test_a_config_is_recorded_only_where_the_checkpoints_are_of_it(workdir):
  (workdir / "config.json").unlink()
  with config_error(match="saved by a different experiment"):
    fit(tiny_digits(model="CNN", model__features="8"), workdir)
  assert not (workdir / "config.json").exists()
  assert fit(tiny_digits(), workdir).summary["outcome"] == "done"
  assert describe_run(workdir).config["model"]["class"] == "MLP"


def test_a_checkpoint_after_the_last_step_of_a_config_is_of_another_run(workdir):
  """It was "saved", with the code of a Ctrl-C that nobody had typed."""
  (workdir / "config.json").unlink()
  line = f"^--workdir={workdir}: the checkpoint is at step 45, but --config has only 23 steps; use"
  with config_error(match=line):
    fit(tiny_digits(epochs="2"), workdir)
  assert not (workdir / "config.json").exists()


GOOD = '{"step": 5, "train/loss": 0.5, "time": 1.0}'
LINES = {
  "numbers": "5",
  "lists": "[1]",
  "no step": '{"train/loss": 1.0, "time": 1.0}',
  "deep": DEEP.decode(),
  "digits": '{"step": 5, "time": ' + HUGE.decode() + "}",
}
for step in ('"5"', "true", "-1", "Infinity", "9" * 300):
  LINES[f"step {step[:9]}"] = f'{{"step": {step}, "time": 1.0}}'
for moment in ('"now"', "NaN"):
  LINES[f"time {moment}"] = f'{{"step": 5, "time": {moment}}}'


@pytest.mark.parametrize("name", LINES)
def test_a_damaged_line_of_metrics_is_left_out(tmp_path, name):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(f"{LINES[name]}\n{GOOD}\n".encode() + b"\xff\xfe\0\n")
  (line,) = read_metrics(path)
  assert line == json.loads(GOOD)
  MetricWriter(tmp_path, start=5, tensorboard=False).close()
  assert path.read_text().strip() == GOOD


# Files besides the config and the metrics: what reads each, and damage of its own.
STEPS = "[1]", '[{"step": "1", "what": "x"}]'
SKIPPED = [f'{{"skipped": {steps}, "passed_over": []}}'.encode() for steps in STEPS]
SKIPPED += [b'{"skipped": [], "passed_over": [{"after": 1}]}']
DAMAGED_FILES = {
  "skipped_steps.json": (lambda folder: NanPolicy(folder, "skip"), *SKIPPED),
  "batch_sizes.json": (read_chosen, b'["64"]', b"[64.5]", b"[0]", b"[-64]", b"[true]"),
}
IS_RIGHT = [("batch_sizes.json", b"[]")]


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_a_damaged_file_of_what_was_decided_is_one_line(tmp_path, name):
  read, *contents = DAMAGED_FILES[name]
  for content in (*EVERY.values(), *contents):
    if (name, content) not in IS_RIGHT:
      put(tmp_path / name, content)
      with config_error("; ", match=re.escape(name)):
        read(tmp_path)


def counted(key, value):
  one = {"damaged": {key: value}, "unusual": {key: value}}
  return json.dumps({"training": one, "held-out": one}).encode()


COUNTS = {"x": "n", "²": "n", "-1": "n", "9" * 5000: "n", "1": 5}


def test_damaged_counts_begin_anew(tmp_path):
  for content in (*EVERY.values(), *map(counted, COUNTS, COUNTS.values())):
    put(tmp_path / "damaged.json", content)
    assert DamageRecord(tmp_path, start=5).count == 0, content[:50]
  for content in (*EVERY.values(), b'{"step": "1", "idle": 0}'):
    put(tmp_path / "restarts.json", content)
    assert count_start(tmp_path, Job("slurm", "7", 1), 40) == 0, content[:50]
    assert count_start(tmp_path, Job("slurm", "7", 2), 40) == 1


def manifest(workdir, **changes):
  """Change the newest checkpoint's manifest as somebody who knows its checksum."""
  path = workdir / "checkpoints" / newest(workdir) / MANIFEST
  found = json.loads(path.read_text()) | changes
  found.pop("crc32", None)
  crc32 = zlib.crc32(json.dumps(found, sort_keys=True).encode())
  path.write_text(json.dumps(found | {"crc32": crc32}))


def newest(workdir):
  return str(max(int(p.name) for p in (workdir / "checkpoints").iterdir()))


def file_for_folder(path):
  shutil.rmtree(path, ignore_errors=True)
  put(path, b"")


REFUSED = {"checkpoints": "checkpoints: Not a directory; move"}
REFUSED |= {"lock": "cannot be written", ".": "File exists"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_in_the_place_of_a_folder_is_one_line(workdir, name):
  file_for_folder(workdir / name)
  with config_error(REFUSED[name]):
    fit(tiny_digits(), workdir)


@pytest.mark.parametrize("name", all_slow_except(["summary.json", "metrics.png"]))
def test_a_directory_in_the_place_of_a_file_is_one_line(workdir, name):
  """The trained state is saved before."""
  put(workdir / name, None)
  with pytest.raises(OSError) as error:
    fit(tiny_digits(log__plot="True"), workdir)
  line = user_message(error.value).line
  assert line.endswith(
    f"{name}: Is a directory; move this directory away, since a file is needed in its place"
  )


def piped(path):
  path.unlink(missing_ok=True)
  os.mkfifo(path)


# Each leaves a run that resumes: from its last checkpoint, and from the one before.
RESUMED = {
  "a name of another digit": lambda w: (w / "checkpoints" / "²").mkdir(),
  "a name with zeros": lambda w: (w / "checkpoints" / "0099").mkdir(),
  "a lock's name": lambda w: put(w / "lock" / "²", b"{}"),
  "an owner of a lock": lambda w: put(w / "lock" / "9.released", b"[]"),
  "a summary": lambda w: put(w / "summary.json", DEEP),
  "a summary of other types": lambda w: put(w / "summary.json", b'{"target_step": []}'),
  "a summary's seconds as text": lambda w: put(w / "summary.json", b'{"seconds": "x"}'),
  "metrics": lambda w: put(w / "metrics.jsonl", b"[]\n" + DEEP + b"\n\xff"),
  "starts that are a pipe": lambda w: piped(w / "starts.jsonl"),
  "a summary that is a pipe": lambda w: piped(w / "summary.json"),
  "a picture that is a pipe": lambda w: piped(w / "metrics.png"),
  "faults that are a file": lambda w: put(w / "faults", b""),
  "damage that is a directory": lambda w: put(w / "damaged.json", None),
  "events that are a file": lambda w: file_for_folder(w / "tensorboard"),
}
RESUMED_BEFORE = {
  f"a manifest: {name}": lambda w, c=content: put(w / "checkpoints" / newest(w) / MANIFEST, c)
  for name, content in EVERY.items()
} | {
  "a manifest without leaves": lambda w: manifest(w, leaves=None),
  "leaves that are text": lambda w: manifest(w, leaves={"step": "x"}),
  "metrics that are text": lambda w: manifest(w, metrics={"loss": "1"}),
  "a split that is text": lambda w: manifest(w, split="x"),
  "a checkpoint that is a file": lambda w: file_for_folder(w / "checkpoints" / newest(w)),
}
QUICK = ("a name of another digit", "metrics", "a manifest: deep")


@pytest.mark.parametrize("name", all_slow_except(RESUMED | RESUMED_BEFORE, *QUICK))
def test_a_run_resumes_with_damage(workdir, finished, name, capsys):
  is_whole = name in RESUMED
  (RESUMED | RESUMED_BEFORE)[name](workdir)
  config = tiny_digits(log__plot=str("picture" in name))
  assert fit(config, workdir).summary["outcome"] == "done"
  printed = capsys.readouterr().out
  assert ("all 45 steps are already done" in printed) is is_whole
  assert is_whole or "checkpoint 45 is damaged (the manifest" in printed
