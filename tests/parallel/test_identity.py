"""Changes between stop and resume: refused, reported or harmless."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from jaxscale.checkpoint.checkpoint_files import read_manifest
from jaxscale.cluster.rendezvous.handshake import digests_of
from jaxscale.config import Arrays, Checkpoint, Cosine, Mesh
from jaxscale.config.loading import load_config
from jaxscale.data import token_files
from jaxscale.data.tokenizer import byte_tokenizer
from jaxscale.metrics import read_json, read_json_lines, write_json
from jaxscale.run import identity as identities
from jaxscale.run import workdir as workdirs
from jaxscale.run.fit import fit
from support.configs import small_config
from support.errors import config_error

CONFIG = '''"""A user's config."""
import flax.linen as nn
import helper
from jaxscale import config, data, optim
from jaxscale.config import Checkpoint, Config, Log, Mesh

SCALE = 1.0
EPOCHS = 2.0


class Net(nn.Module):
  """A net."""
  outputs: int

  @nn.compact
  def __call__(self, x, train):
    from late import narrow  # not loaded before
    x = narrow(x.reshape(len(x), -1))
    return nn.Dense(self.outputs)(helper.scaled(SCALE * x))


class Own(config.Model):
  hidden: int = 8

  def build(self, context):
    return Net(context.info.num_classes)


class Mine(config.Tracker):
  def build(self, *context):
    return None


def get_config():
  # A comment.
  tokenizer, of_images = FOLDER + "/tokenizer", KIND == "images"
  datasets = {
    "images": data.ImageFolder(path=FOLDER + "/set", image_size=8, augment="flip"),
    "text": data.TextFiles(path=FOLDER + "/text", tokenizer=tokenizer, sequence_length=16),
    "tokens": data.TextFiles(path=FOLDER + "/bin", vocab_size=300, sequence_length=16),
  }
  words = config.Transformer(num_layers=1, width=16, num_heads=2)
  return Config(
    model=Own() if of_images else words, data=datasets[KIND], optimizer=optim.SGD(lr=0.1),
    batch_size=8, epochs=EPOCHS, mesh=Mesh(data=8), checkpoint=Checkpoint(every_epochs=1),
    log=Log(every_steps=50, trackers=(Mine(),)),
  )
'''
HELPER = '''"""Of a user's own."""
def doubled(x):
  """Twice."""
  return 2 * x  # of all


def scaled(x):
  return doubled(x)


def unused(x):
  return x
'''


def write_images(folder, split, name, count, level):
  where = folder / "set" / split / name
  where.mkdir(parents=True, exist_ok=True)
  pixels = np.arange(10 * 10 * 3, dtype=np.uint8).reshape(10, 10, 3) // 3 + level
  for i in range(count):
    Image.fromarray(pixels + i).save(where / f"{i}.png")


def fake_tokenizer(name, separator=None, *, field=""):
  """Return a tokenizer whose key is the hash of its file, as with Hugging Face's."""
  content = Path(name).read_bytes()
  return byte_tokenizer()._replace(key=hashlib.sha256(content).hexdigest())


@pytest.fixture
def project(tmp_path, monkeypatch):
  """Return a folder with a config, its helper, and images, text and tokens."""
  monkeypatch.setattr(token_files, "read_tokenizer", fake_tokenizer)
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  for name in ("helper", "late"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  folder = tmp_path / "project"
  for split, count in (("train", 12), ("val", 8)):
    for level, name in enumerate(("ant", "bee")):
      write_images(folder, split, name, count, 100 * level)
  for split in ("train", "val"):
    for name in ("text", "bin"):
      (folder / name).mkdir(exist_ok=True)
    (folder / "text" / f"{split}.txt").write_text("To be, or not to be. " * 50)
    tokens = np.arange(2000) % 300
    tokens.astype("<u2").tofile(folder / "bin" / f"{split}.bin")
  (folder / "tokenizer").write_text("{}")
  (folder / "helper.py").write_text(HELPER)
  (folder / "late.py").write_text("def narrow(x):\n  return x / 255\n")
  return folder


def load(folder, kind="images", edit=lambda text: text, overrides=None):
  head = f"FOLDER, KIND = {str(folder)!r}, {kind!r}\n"
  text = edit(CONFIG).replace("class Net(", f"{head}\n\nclass Net(", 1)
  (folder / "own.py").write_text(text)
  return load_config(str(folder / "own.py"), overrides or {})


def began(workdir, config):
  """Write a workdir with a checkpoint, without training."""
  experiment = workdirs.experiment_in(workdir, config)
  described = workdirs.describe(experiment, identities.identity_of(experiment))
  (workdir / "checkpoints" / "5").mkdir(parents=True)
  workdirs.write_config(workdir, described, config)


def resumed(workdir, config, accept=()):
  """Return the notes of a start in the same workdir; raise its refusal."""
  experiment = workdirs.experiment_in(workdir, config, accept)
  identity = identities.identity_of(experiment)
  return workdirs.claim_workdir(workdir, config, identity, accept)


def edit(name, old, new):
  """Edits a file of the project, "own.py" included."""

  def change(folder):
    if name == "own.py":
      return {"edit": lambda text: text.replace(old, new)}
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))

  return change


def rename_class(folder):
  for split in ("train", "val"):
    (folder / "set" / split / "ant").rename(folder / "set" / split / "cat")


def other_pixels(folder):
  path = folder / "set" / "train" / "ant" / "3.png"
  pixels = np.random.default_rng(0).integers(0, 255, (30, 30, 3)).astype("uint8")
  Image.fromarray(pixels).save(path)


def touch(folder):
  for path in folder.rglob("*.*"):
    os.utime(path, (1e9, 1e9))


def longer(name):
  def change(folder):
    path = folder / name
    path.write_bytes(2 * path.read_bytes())

  return change


def swap_tokens(folder):
  tokens = np.fromfile(folder / "bin" / "train.bin", "<u2")
  tokens[1000:1002] = tokens[[1001, 1000]]
  tokens.tofile(folder / "bin" / "train.bin")


def wider(folder):
  for path in [*(folder / "bin").iterdir()]:
    np.save(path.with_suffix(".npy"), np.fromfile(path, "<u2").astype("<u4"))
    path.unlink()


def moved(folder):
  target = folder.with_name("elsewhere")
  folder.rename(target)
  return {"folder": target}


def settings(**overrides):
  return lambda _: {"overrides": {k.replace("__", "."): v for k, v in overrides.items()}}


def recorded(*path, to):
  """Change what config.json says of the run as it began."""

  def change(folder):
    where = folder.parent / "run" / "config.json"
    described = node = read_json(where)
    for key in path[:-1]:
      node = node[key]
    node[path[-1]] = to
    write_json(where, described)

  return change


def class_more(folder):
  for split in ("train", "val"):
    write_images(folder, split, "cow", 8, 9)


def rename_image(folder):
  path = folder / "set" / "train" / "ant" / "0.png"
  path.rename(path.with_name("z.png"))


def data_and_code(folder):
  rename_class(folder)
  edit("helper.py", "2 * x", "3 * x")(folder)


def comments(folder):
  edit("helper.py", "# of all", "# of each")(folder)
  edit("helper.py", '"""Twice."""', '"""Two times."""')(folder)
  return edit("own.py", '"""A net."""', '"""The net."""')(folder)


class Change(NamedTuple):
  """A change between stop and resume.

  Attributes:
    change: of the project's folder; it returns options of `load`.
    error: a pattern, if the resume is refused.
    note: the beginning of the one line that is printed, if there is one.
    kind: of the run's data.
  """

  change: object
  error: str = ""
  note: str = ""
  kind: str = "images"


def data(change, says, kind="images"):
  says = rf"was trained with different data \(.*{says}.*; restore the data, .*=data$"
  return Change(change, says, kind=kind)


def code(name, old, new, says):
  says = rf"was trained with different code \(.*{says}.*; restore the code, .*=code$"
  return Change(edit(name, old, new), says)


def setting(says, kind="images", **overrides):
  return Change(settings(**overrides), f"belongs to a different experiment: {says}", kind=kind)


def reported(*path, to, says):
  return Change(recorded(*path, to=to), note=f"note: resuming with {says}")


PRECISION = "jax_default_matmul_precision"
ENVIRONMENT = "identity", "environment"
VERSIONS = "versions"
LOGS = settings(log__every_steps="1", checkpoint__keep_last="5", evaluation__every_epochs="1")
PATCH = "Net.outputs = 2\n\n\ndef get_config"
MORE_IMAGES = "train.examples is 24 in the workdir and 32 now"
MORE_TOKENS = "train.examples is 125 in the workdir and 250 now"
LESS, CONTENT = "evaluation.examples is 16 in the workdir and 15", "train.content differs"
BOTH = r"different data and different code .*--accept-changes=data,code$"
X64 = "JAX_ENABLE_X64 is 1 in the workdir and 0 now; restore the setting"
HIGHEST = f"{PRECISION} highest in the workdir and None now"
NO_IDENTITY = "note: config.json has no identity of data and code"
CHANGES = {
  "nothing": Change(lambda _: None),
  # Data.
  "a class renamed": data(rename_class, "class 0 is 'ant' in the workdir and 'bee"),
  "a class more": data(class_more, "there are 2 classes in the workdir and 3 now"),
  "images more": data(lambda f: write_images(f, "train", "ant", 20, 0), MORE_IMAGES),
  "an image less": data(lambda f: (f / "set/val/ant/0.png").unlink(), LESS),
  "an image renamed, which reorders": data(rename_image, "train.files differs"),
  "another image under a name": data(other_pixels, "train.sizes differs"),
  "text longer": data(
    longer("text/train.txt"), "train.tokens is 1051 in the workdir and 2101 now", "text"
  ),
  "text of that length": data(edit("text/train.txt", "not", "but"), CONTENT, "text"),
  "another tokenizer": data(edit("tokenizer", "{}", "{ }"), "train.tokenizer differs", "text"),
  "tokens longer": data(longer("bin/train.bin"), MORE_TOKENS, "tokens"),
  "two tokens swapped": data(swap_tokens, CONTENT, "tokens"),
  "dtype of tokens": data(wider, "train.dtype differs", "tokens"),
  "dtype of tokens by name": Change(settings(data__dtype="uint16"), kind="tokens"),
  "the vocabulary": setting("data.vocab_size is 300", kind="tokens", data__vocab_size="301"),
  "data and code": Change(data_and_code, BOTH),
  "files touched": Change(touch),
  "data in another folder": Change(moved),
  "text in another folder": Change(moved, kind="text"),
  # The user's own code.
  "a constant": code("own.py", "SCALE = 1.0", "SCALE = 3.0", "SCALE in own"),
  "the model": code("own.py", "(self.outputs)(", "(self.outputs)(1 + ", "Net in own differs"),
  "a helper": code("helper.py", "2 * x", "3 * x", "doubled in helper differs"),
  "a late import": code("late.py", "255", "256", "narrow in late differs"),
  "a model patched": code("own.py", "def get_config", PATCH, "Net in own differs"),
  "comments and docstrings": Change(comments),
  "a tracker": Change(edit("own.py", "return None", "return 1")),
  "code that is not used": Change(edit("helper.py", "return x\n", "return -x\n")),
  "how it is written": Change(edit("own.py", "EPOCHS = 2.0", "EPOCHS = 1 + 1.0")),
  # Settings.
  "another rate": setting("optimizer.lr is 0.1", optimizer__lr="0.2"),
  "more epochs before the end": Change(settings(epochs="3")),
  "fewer epochs": setting("epochs is 2.0", epochs="1"),
  "a seed": setting("seed is 0", seed="1"),
  "activations in bfloat16": setting("dtype is 'float32'", dtype="bfloat16"),
  "what is logged and saved": Change(LOGS),
  # Environment.
  "x64": Change(recorded(*ENVIRONMENT, "jax_enable_x64", to=True), X64),
  "precision of products": reported(*ENVIRONMENT, PRECISION, to="highest", says=HIGHEST),
  "version of JAX": reported(VERSIONS, "jax", to="0.9.0", says="jax 0.9.0 in the workdir and "),
  "ours": reported(VERSIONS, "jaxscale", to="0.0.9", says="jaxscale 0.0.9 in the workdir and "),
  "kind of devices": reported(
    "device_kind", to="TPU v4", says="devices TPU v4 in the workdir and cpu now"
  ),
  "number of devices": Change(recorded("derived", "num_devices", to=4)),
  "number of processes": Change(recorded("processes", to=2)),
  "an earlier version": Change(recorded("identity", to=None), note=NO_IDENTITY),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_stop_and_resume(name, project, tmp_path):
  change, error, note, kind = CHANGES[name]
  began(tmp_path / "run", load(project, kind))
  for module in ("helper", "late"):
    sys.modules.pop(module, None)  # a resumed run is another process
  options = change(project) or {}
  config = load(options.pop("folder", project), kind, **options)
  if error:
    with config_error(match=error):
      resumed(tmp_path / "run", config)
    return
  notes = resumed(tmp_path / "run", config)
  assert [note] == [line[: len(note)] for line in notes] if note else notes == []


@pytest.mark.parametrize("name", ["a class renamed", "a helper", "data and code"])
def test_an_accepted_change_resumes(name, project, tmp_path):
  began(tmp_path / "run", load(project))
  CHANGES[name].change(project)
  config = load(project)
  kinds = {"a class renamed": ["data"], "a helper": ["code"]}.get(name, ["data", "code"])
  for wrong in {"data", "code"} - {*kinds} or {"data"}:
    with config_error(match="--accept-changes"):
      resumed(tmp_path / "run", config, {wrong})
  notes = resumed(tmp_path / "run", config, kinds)
  assert notes and all(line.startswith("accepted: ") for line in notes)


# Through `fit`, and from one process to another.


def arrays_config(x, **fields):
  arrays = Arrays(x=x, y=(x[:, 0] > 0).astype("int32"))
  usual = dict(data=arrays, schedule=Cosine(), batch_size=8, epochs=1, mesh=Mesh(data=8))
  return small_config(**usual | fields, checkpoint=Checkpoint(every_epochs=1))


def test_a_run_on_arrays_resumes_and_knows_them(tmp_path, capsys):
  """A notebook's cell that is run twice, with more epochs, and with other arrays."""
  x = np.random.default_rng(0).standard_normal((44, 3)).astype("float32")
  first = fit(arrays_config(x), tmp_path)
  assert first.summary["outcome"] == "done"
  assert "Arrays(x=float32[44, 3], y=int32[44])" in capsys.readouterr().out
  assert fit(arrays_config(x.copy()), tmp_path).summary["step"] == first.summary["step"]
  more = fit(arrays_config(x, epochs=2), tmp_path)
  assert more.summary["step"] == 2 * first.summary["step"]
  with config_error(match=r"different data \(data.[xy].sha256 is .*=data$"):
    fit(arrays_config(x + 1, epochs=3), tmp_path)
  # Without config.json the checkpoint knows.
  (tmp_path / "config.json").unlink()
  manifest = read_manifest(tmp_path / "checkpoints" / str(more.summary["step"]))
  assert manifest["identity"]["data"]["train"]["examples"] == 40
  with config_error(match=r"different data \(train.content differs"):
    fit(arrays_config(x + 1, epochs=3), tmp_path)
  capsys.readouterr()
  done = fit(arrays_config(x + 1, epochs=3), tmp_path, accept_changes=["data"])
  assert done.summary["step"] == 3 * first.summary["step"]
  assert "accepted: train.content differs" in capsys.readouterr().out
  starts = read_json_lines(tmp_path / "starts.jsonl")
  (accepted,) = [line["accepted_changes"] for line in starts if "accepted_changes" in line]
  assert accepted[0] == "accepted: train.content differs"
  # Recorded, the change is one no longer.
  assert fit(arrays_config(x + 1, epochs=3), tmp_path).summary["outcome"] == "done"


def test_class_names_reach_the_summary_and_config_json(project, tmp_path):
  config = load(project, overrides={"epochs": "1", "log.tensorboard": "False", "log.plot": "False"})
  summary = fit(config, tmp_path / "run").summary
  described = read_json(tmp_path / "run" / "config.json")
  assert summary["class_names"] == described["data"]["class_names"] == ["ant", "bee"]
  files = {path.name for path in (tmp_path / "run" / "code").iterdir()}
  assert files == {"own.py", "helper.py", "late.py"}


def test_processes_of_one_start_compare_settings_and_own_code(project):
  first = digests_of(load(project))
  assert digests_of(load(project)) == first
  assert {"own code in own", "own code in helper", "own code in late"} < first.keys()
  edit("helper.py", "2 * x", "3 * x")(project)
  second = digests_of(load(project))
  assert {n for n in first if first[n] != second[n]} == {"own code in helper"}
  x = np.zeros((40, 3), "float32")
  a, b = (digests_of(arrays_config(array)) for array in (x, x + 1))
  assert {n for n in a if a[n] != b[n]} == {"config"}


def test_processes_of_one_start_compare_their_data(project, monkeypatch):
  experiment = workdirs.experiment_in(project, load(project))
  alike = identities.identity_of(experiment)
  other = json.loads(json.dumps(alike))
  monkeypatch.setattr(identities.cluster, "gather", lambda mine: [mine, alike, other])
  identities.check_alike(alike)
  other["data"]["train"]["examples"] = 25
  examples = "train.examples is 24 in process 0 and 25 in process 2; "
  with config_error(match=f"^processes 0 and 2 differ: {examples}"):
    identities.check_alike(alike)
