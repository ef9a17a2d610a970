"""Each file of a workdir, damaged: one line says so, or the run resumes."""

import json
import os
import shutil
import zlib

import pytest

from jaxscale.checkpoint.checkpoint_files import MANIFEST
from jaxscale.cluster.requeue import count_start
from jaxscale.config.record import describe_run
from jaxscale.errors import ConfigError, user_message
from jaxscale.metrics import MetricWriter, read_metrics
from jaxscale.run.adaptive_batch import read_chosen
from jaxscale.run.damaged_examples import DamageRecord
from jaxscale.run.fit import fit
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.workdir import claim_workdir, forget_unsaved, length_before, start_devices
from support.bad_files import DEEP, EVERY, HUGE, OTHER_JSON, put
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


def one_line(error):
  assert "\n" not in str(error.value) and "; " in str(error.value)
  return str(error.value)


def changed(content, *path, to):
  """config.json, or any JSON, with one value replaced."""
  node = content = json.loads(content)
  for key in path[:-1]:
    node = node[key]
  node[path[-1]] = to
  return json.dumps(content).encode()


NUMBERS = {
  "settings that are a number": (("config",), 5),
  "a model that is text": (("config", "model"), "MLP"),
  "no class": (("config", "model", "class"), None),
  "steps as text": (("derived", "total_steps"), "45"),
  "devices as text": (("derived", "num_devices"), "8"),
  "derived that is a list": (("derived",), []),
  "data that are text": (("data",), "digits"),
  "versions that are a list": (("format",), []),
}


NO_FILES = "a directory", "a pipe"


def damage_config(workdir, name):
  path, whole = workdir / "config.json", (workdir / "config.json").read_bytes()
  if name == "a pipe":
    path.unlink()
    os.mkfifo(path)
  else:
    where, value = NUMBERS.get(name, ((), None))
    put(path, changed(whole, *where, to=value) if where else EVERY.get(name))


@pytest.mark.parametrize("name", [*EVERY, *NUMBERS, *NO_FILES])
def test_a_damaged_config_is_one_line_with_its_remedy(workdir, name):
  """A command that reads the run gives the same line, before anything is trained."""
  damage_config(workdir, name)
  assert start_devices(workdir, tiny_digits()) in (None, 8)
  with pytest.raises(ConfigError, match=r"config\.json") as error:
    claim_workdir(workdir, tiny_digits())
  line, is_old = one_line(error), "a new --workdir" in str(error.value)
  assert "another --workdir" in line or is_old
  if not name.startswith(("steps", "devices", "derived")):  # it needs none of these
    with pytest.raises(ConfigError, match=r"config\.json"):
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


@pytest.mark.parametrize(
  "key, value, says",
  [
    (["config"], {"class": "X", "model": {"class": "MLP"}}, "class is 'X' there"),
    (["config", "epochs"], -1.0, "epochs is -1.0 there"),
    (["config", "epochs"], "1", "epochs is '1' there"),
  ],
)
def test_a_run_that_is_done_without_epochs_is_another(workdir, key, value, says):
  path = workdir / "config.json"
  put(path, changed(path.read_bytes(), *key, to=value))
  assert start_devices(workdir, tiny_digits()) is None
  with pytest.raises(ConfigError, match=f"another experiment, {says}"):
    claim_workdir(workdir, tiny_digits())


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_takes_the_place_of_a_config_until_it_is_moved(workdir, name):
  damage_config(workdir, name)
  shutil.rmtree(workdir / "checkpoints")
  with pytest.raises(ConfigError, match=r"config\.json: not a file; move") as error:
    fit(tiny_digits(), workdir)
  one_line(error)


def test_a_config_that_may_not_be_read_is_one_line(workdir, monkeypatch):
  opened = os.open

  def refuse(path, *args, **options):
    if str(path).endswith("config.json"):
      raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *args, **options)

  monkeypatch.setattr(os, "open", refuse)
  with pytest.raises(ConfigError, match=r"Permission denied; .*readable \(chmod\)"):
    claim_workdir(workdir, tiny_digits())


def test_a_run_with_a_cut_config_and_nothing_saved_begins_anew(tmp_path):
  put(tmp_path / "config.json", b'{"conf')
  assert fit(tiny_digits(), tmp_path).summary["outcome"] == "done"
  assert describe_run(tmp_path).config["epochs"] == 4


def test_a_config_is_recorded_only_where_the_checkpoints_are_of_it(workdir):
  (workdir / "config.json").unlink()
  with pytest.raises(ConfigError, match="a checkpoint of another experiment"):
    fit(tiny_digits(model="CNN", model__features="8"), workdir)
  assert not (workdir / "config.json").exists()
  assert fit(tiny_digits(), workdir).summary["outcome"] == "done"
  assert describe_run(workdir).config["model"]["class"] == "MLP"


def test_a_checkpoint_after_the_last_step_of_a_config_is_of_another_run(workdir):
  """It was "saved", with the code of a Ctrl-C that nobody had typed."""
  (workdir / "config.json").unlink()
  with pytest.raises(ConfigError, match="45, and --config has 23 steps; give") as e:
    fit(tiny_digits(epochs="2"), workdir)
  assert one_line(e).startswith(f"--workdir={workdir}: its checkpoint is of step ")
  assert not (workdir / "config.json").exists()


GOOD = '{"step": 5, "train/loss": 0.5, "time": 1.0}'
LINES = {
  "numbers": "5",
  "lists": "[1]",
  "no step": '{"train/loss": 1.0, "time": 1.0}',
  "step as text": '{"step": "5", "time": 1.0}',
  "step that is true": '{"step": true, "time": 1.0}',
  "step below zero": '{"step": -1, "time": 1.0}',
  "step without end": '{"step": Infinity, "time": 1.0}',
  "step of 300 digits": '{"step": ' + "9" * 300 + ', "time": 1.0}',
  "time as text": '{"step": 5, "time": "now"}',
  "time that is NaN": '{"step": 5, "time": NaN}',
  "deep": DEEP.decode(),
  "digits": '{"step": 5, "time": ' + HUGE.decode() + "}",
}


@pytest.mark.parametrize("name", LINES)
def test_a_damaged_line_of_metrics_is_left_out(tmp_path, name):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(f"{LINES[name]}\n{GOOD}\n".encode() + b"\xff\xfe\0\n")
  (line,) = read_metrics(path)
  assert line == json.loads(GOOD)
  MetricWriter(tmp_path, start=5, tensorboard=False).close()
  assert path.read_text().strip() == GOOD


def test_a_metric_that_is_no_number_is_left_out(tmp_path):
  line = '{"step": 5, "time": 1, "a": "1", "b": [1], "c": true, "d": NaN, "e": null}'
  (tmp_path / "metrics.jsonl").write_text(line)
  (found,) = read_metrics(tmp_path / "metrics.jsonl")
  assert sorted(found) == ["d", "step", "time"]


SKIPPED = [
  *EVERY.values(),
  b'{"skipped": [1], "passed_over": []}',
  b'{"skipped": [{"step": "1", "what": "x"}], "passed_over": []}',
  b'{"skipped": [], "passed_over": [{"after": 1}]}',
]


@pytest.mark.parametrize("content", SKIPPED, ids=range(len(SKIPPED)))
def test_damaged_skipped_steps_are_one_line(tmp_path, content):
  put(tmp_path / "skipped_steps.json", content)
  with pytest.raises(ConfigError, match=r"skipped_steps\.json") as error:
    NanPolicy(tmp_path, "skip")
  one_line(error)


SIZES = [*EVERY.values(), b'["64"]', b"[64.5]", b"[0]", b"[-64]", b"[true]"]


@pytest.mark.parametrize("content", [s for s in SIZES if s != b"[]"], ids=lambda c: repr(c[:12]))
def test_damaged_batch_sizes_are_one_line(tmp_path, content):
  put(tmp_path / "batch_sizes.json", content)
  with pytest.raises(ConfigError, match=r"batch_sizes\.json") as error:
    read_chosen(tmp_path)
  one_line(error)


COUNTED = [*EVERY.values()]
for key, value in (("x", "n"), ("²", "n"), ("-1", "n"), ("9" * 5000, "n"), ("1", 5)):
  one = {"damaged": {key: value}, "unusual": {key: value}}
  COUNTED.append(json.dumps({"training": one, "held-out": one}).encode())


@pytest.mark.parametrize("content", COUNTED, ids=range(len(COUNTED)))
def test_damaged_counts_of_damage_begin_anew(tmp_path, content):
  put(tmp_path / "damaged.json", content)
  assert DamageRecord(tmp_path, start=5).count == 0


@pytest.mark.parametrize("content", [*EVERY.values(), b'{"step": "1", "idle": 0}'])
def test_damaged_counts_of_restarts_begin_anew(tmp_path, content):
  put(tmp_path / "restarts.json", content)
  assert count_start(tmp_path, "7", 1, 40) == 0
  assert count_start(tmp_path, "7", 2, 40) == 1


def manifest(workdir, step, **changes):
  """Change a checkpoint's manifest as somebody who knows its checksum."""
  path = workdir / "checkpoints" / str(step) / MANIFEST
  found = json.loads(path.read_text()) | changes
  found.pop("crc32", None)
  crc32 = zlib.crc32(json.dumps(found, sort_keys=True).encode())
  path.write_text(json.dumps(found | {"crc32": crc32}))


def newest(workdir):
  return max(int(p.name) for p in (workdir / "checkpoints").iterdir())


def no_checkpoints(workdir):
  shutil.rmtree(workdir / "checkpoints")
  (workdir / "checkpoints").write_text("")


REFUSED = {
  "checkpoints that are a file": (no_checkpoints, "checkpoints: Not a directory; move"),
  "a lock that is a file": (
    lambda workdir: (shutil.rmtree(workdir / "lock"), put(workdir / "lock", b"")),
    "cannot be written",
  ),
  "a workdir that is a file": (
    lambda workdir: (shutil.rmtree(workdir), put(workdir, b"")),
    "File exists",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repaired_is_one_line(workdir, name):
  damage, says = REFUSED[name]
  damage(workdir)
  with config_error(match=says):
    fit(tiny_digits(), workdir)


@pytest.mark.parametrize("name", all_slow_except(["summary.json", "metrics.png"]))
def test_a_directory_in_the_place_of_a_file_is_one_line(workdir, name):
  """The trained state is saved before."""
  put(workdir / name, None)
  with pytest.raises(OSError) as error:
    fit(tiny_digits(), workdir)
  line = user_message(error.value).line
  assert line.endswith(f"{name}: Is a directory; a file is to be there, move it away")


def piped(path):
  path.unlink(missing_ok=True)
  os.mkfifo(path)


# Each leaves a run that resumes, and whether from its last checkpoint.
RESUMED = {
  "a name of another digit": (lambda w: (w / "checkpoints" / "²").mkdir(), True),
  "a name with zeros": (lambda w: (w / "checkpoints" / "0099").mkdir(), True),
  "a lock's name": (lambda w: put(w / "lock" / "²", b"{}"), True),
  "an owner of a lock": (lambda w: put(w / "lock" / "9.released", b"[]"), True),
  "a summary": (lambda w: put(w / "summary.json", DEEP), True),
  "a summary of other types": (
    lambda w: put(w / "summary.json", b'{"target_step": [], "seconds": "x"}'),
    True,
  ),
  "metrics": (lambda w: put(w / "metrics.jsonl", b"[]\n" + DEEP + b"\n\xff"), True),
  "starts that are a pipe": (lambda w: piped(w / "starts.jsonl"), True),
  "a summary that is a pipe": (lambda w: piped(w / "summary.json"), True),
  "a picture that is a pipe": (lambda w: piped(w / "metrics.png"), True),
  "faults that are a file": (lambda w: put(w / "faults", b""), True),
  "damage that is a directory": (lambda w: put(w / "damaged.json", None), True),
  "events that are a file": (
    lambda w: (shutil.rmtree(w / "tensorboard", True), put(w / "tensorboard", b"")),
    True,
  ),
  **{
    f"a manifest: {name}": (
      lambda w, c=content: put(w / "checkpoints" / str(newest(w)) / MANIFEST, c),
      False,
    )
    for name, content in EVERY.items()
  },
  "a manifest without leaves": (lambda w: manifest(w, newest(w), leaves=None), False),
  "leaves that are text": (lambda w: manifest(w, newest(w), leaves={"step": "x"}), False),
  "metrics that are text": (lambda w: manifest(w, newest(w), metrics={"loss": "1"}), False),
  "a split that is text": (lambda w: manifest(w, newest(w), split="x"), False),
  "a checkpoint that is a file": (
    lambda w: (
      shutil.rmtree(w / "checkpoints" / str(newest(w))),
      put(w / "checkpoints" / "45", b""),
    ),
    False,
  ),
}
QUICK = ("a name of another digit", "metrics", "a manifest: deep")


@pytest.mark.parametrize(
  "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RESUMED]
)
def test_a_run_resumes_with_damage(workdir, finished, name, capsys):
  damage, is_whole = RESUMED[name]
  damage(workdir)
  assert fit(tiny_digits(), workdir).summary["outcome"] == "done"
  printed = capsys.readouterr().out
  assert ("all 45 steps are done already" in printed) is is_whole
  assert is_whole or "checkpoint 45 is damaged (its manifest" in printed


def test_other_types_are_all_of_json():
  kinds = {type(json.loads(text)) for text in OTHER_JSON.values()}
  assert kinds == {list, type(None), str, int, float, dict}
