"""Settings refuse what cannot be, in one line that says what to do."""

import copy
import dataclasses
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale.cli.parser import Parser, directory, file
from jaxscale.config import loading
from jaxscale.config.help import entries, settings_help
from jaxscale.config.loading import load_config, override
from jaxscale.config.validation import bounds, closest, nearest, settings
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.jobs.job_handle import _path_and_source
from jaxscale.run.workdir import describe_text
from support.configs import small_config
from support.errors import config_error
from support.tables import assignments, columns, literal, table

GOOD = columns(assignments, str, literal)("""
 | batch_size | 128
epochs=3 | epochs | 3.0
optimizer.lr=1e-2 | optimizer.lr | 0.01
optimizer.nesterov=False | optimizer.nesterov | False
clip_norm=1 | clip_norm | 1.0
ema_decay=None | ema_decay | None
model.features=(8,16) | model.features | (8, 16)
model.features=8 | model.features | (8,)
dtype=bfloat16 | dtype | 'bfloat16'
model=ResNet model.depth=18 | model.depth | 18
optimizer.lr=4 optimizer=LARS | optimizer.lr | 4.0
optimizer=LARS | optimizer.trust_coefficient | 0.001
epochs=1 schedule.warmup_epochs=0 | epochs | 1.0
schedule.warmup_epochs=50 epochs=60 | epochs | 60.0
data=ImageFolder data.path=x | data.path | 'x'
data.name=mnist data=TFDS | data.name | 'mnist'
data=TFDS data.name=x data.augment=crop data.image_size=8 | data.image_size | 8
seed=4294967295 | seed | 4294967295
phases.epochs=0,39 | phases.epochs | (0.0, 39.0)
optimizer=LARS optimizer.include=kernel$ | optimizer.include | 'kernel$'
""")


@pytest.mark.parametrize("overrides, path, value", GOOD)
def test_overrides_that_are_taken(overrides, path, value):
  node = load_config("configs/digits.py", overrides)
  for name in path.split("."):
    node = getattr(node, name)
  assert node == value and type(node) is type(value)


TEXT, DIGITS = "configs/text.py", "configs/digits.py"
CARRIER = """
import dataclasses
from jaxscale.config import *

class Sign(Optimizer):
  \"\"\"Its own default of nesterov, and all of its fields set.\"\"\"
  nesterov: bool = False

def get_config(arg=""):
  chosen = {
    "all": Sign(lr=1.0, nesterov=False),
    "eps": AdamW(lr=1.0, eps=1e-6),
    "replaced": dataclasses.replace(SGD(lr=1.0, nesterov=True), lr=2.0),
    "default": dataclasses.replace(Sign(lr=1.0), lr=2.0),
  }
  model = ResNet(width=32)
  return Config(model=model, data=Digits(), batch_size=8, epochs=9,
                optimizer=chosen[arg],
                schedule=Cosine(warmup_epochs=1, restart=False),
                exchange=OneBit(bucket_bytes=4096), sync=EveryStep())
"""
# What the file sets, with which class instead, and what that then has.
CARRIED = [
  (TEXT, {"optimizer": "LARS"}, dict(lr=3e-3, weight_decay=0.1, eps=0.0)),
  (TEXT, {"optimizer": "LAMB"}, dict(b1=0.9, b2=0.95, weight_decay=0.1, eps=1e-6)),
  (DIGITS, {"optimizer": "LARS"}, dict(nesterov=False, weight_decay=5e-4)),
  (DIGITS, {"optimizer": "LARS", "optimizer.lr": "9"}, dict(lr=9.0, momentum=0.9)),
  ("all", {"optimizer": "SGD"}, dict(lr=1.0, nesterov=False, momentum=0.9)),
  ("eps", {"optimizer": "LAMB"}, dict(eps=1e-6)),
  ("eps", {"optimizer": "LARS"}, dict(eps=0.0)),
  ("replaced", {"optimizer": "LARS"}, dict(lr=2.0, nesterov=True)),
  ("default", {"optimizer": "SGD"}, dict(lr=2.0, nesterov=True)),
  ("eps", {"schedule": "Polynomial"}, dict(warmup_epochs=1.0, restart=False, end_lr=1e-4)),
  ("eps", {"model": "ViT"}, dict(width=cfg.ViT().width)),
  ("eps", {"exchange": "Int8"}, dict(bucket_bytes=4096, block=256)),
]


@pytest.mark.parametrize("source", ["file", "object"])
@pytest.mark.parametrize("name, overrides, wanted", CARRIED)
def test_only_what_was_set_is_carried_over(tmp_path, source, name, overrides, wanted):
  file = tmp_path / "own.py"
  file.write_text(CARRIER)
  path = name if name.endswith(".py") else f"{file}:{name}"
  config = load_config(path, overrides)
  if source == "object":  # copied, and written to a file as a notebook's job does
    made = copy.deepcopy(load_config(path))
    if name not in ("all", "default"):  # whose class only the file has
      exec(str(_path_and_source(made)[1]), names := {})
      made = names["get_config"]()
    config = override(made, overrides)
  (field,) = (name for name in overrides if "." not in name)
  new = getattr(config, field)
  assert {name: getattr(new, name) for name in wanted} == wanted


def test_what_is_carried_over_is_printed(tmp_path, capfd):
  file = tmp_path / "own.py"
  file.write_text(CARRIER)
  loading.print_note.cache_clear()
  load_config(f"{file}:eps", {"optimizer": "LARS", "optimizer.weight_decay": "0.5"})
  load_config(TEXT, {"optimizer": "LARS"})
  load_config(TEXT, {"optimizer.lr": "0.5"})
  load_config(TEXT, {"optimizer": "AdamW"})  # as it is
  assert capfd.readouterr().err.splitlines() == [
    "note: optimizer=LARS keeps from AdamW: lr=1.0, not eps=1e-06 (the constant added to the "
    "denominator of the trust ratio)",
    "note: optimizer=LARS keeps from AdamW: lr=0.003, weight_decay=0.1 (the L2 coefficient, "
    "added to the gradient)",
  ]


POLYNOMIAL = "schedule=Polynomial schedule.decay_steps=9"
BAD = columns(assignments, str, str)(f"""
optimzer.lr=1 | optimzer | did you mean 'optimizer'?
optimizer.lrr=1 | optimizer.lrr | did you mean 'lr'?
optimizer.lr=fast | optimizer.lr=fast | expected float
log.plot=false | log.plot=false | expected True or False
optimizer.lr=-1 | SGD.lr=-1.0 | > 0
optimizer.lr=1e999 | SGD.lr=inf | > 0
optimizer.trust_coefficient=1 | SGD | no field
optimizer=Adm | optimizer=Adm | did you mean 'AdamW'?
optimizer=LARS optimizer.b1=1 | LARS | no field 'b1'
batch_size=1.5 | batch_size=1.5 | expected int
batch_size=True | batch_size=True | expected int
batch_size=0 | Config.batch_size=0 | >= 1
batch_size=100 accumulate_steps=3 | Config.batch_size=100 | divisible
epochs=-3 | Config.epochs=-3.0 | > 0
epochs=nan | epochs=nan | expected float
epochs=2 | warmup_epochs=2.0 | shorter
epochs=None | Config.epochs and Config.steps are not set | set one
steps=9 | Config.steps=9 and epochs=40.0 | one of them to None
epochs=None steps=0 | Config.steps=0 | >= 1
epochs=None steps=9.5 | steps=9.5 | expected int
epochs=None steps=9 schedule.warmup_steps=9 | Cosine.warmup_steps=9 | too long for a run of 9 steps
epochs=None steps=9 phases=AdaptiveBatch | Config.steps=9 | set epochs instead
epochs=None steps=9 phases.steps=0,9 | Phases.steps=(0, 9) | only 9 steps
phases.steps=0,9 phases.epochs=0,1 | Phases.steps=(0, 9) | leave out
phases.steps=1,9 | Phases.steps=(1, 9) | add a phase at 0
evaluation.every_steps=9 evaluation.every_epochs=2 | Evaluation.every_steps=9 | one of them to None
checkpoint.every_steps=9 checkpoint.every_epochs=2 | Checkpoint.every_steps=9 | one of them to None
checkpoint.every_epochs=None | Checkpoint.every_steps=None | set one
{POLYNOMIAL} schedule.decay_epochs=1 | Polynomial.decay_steps=9 | leave out one
{POLYNOMIAL} schedule.restart=False | Polynomial.decay_steps=9 | set restart=True
dtype=fp8 | dtype=fp8 | 'bfloat16'
seed.x=3 | seed | no fields
mesh.data=0 | Mesh.data=0 | -1
mesh.replica=-1 | Mesh.replica=-1 | only one
model.dropout=1 | CNN.dropout=1.0 | [0, 1)
=1 | Config | no field
data=ImageFolder | ImageFolder.path is not set | expected str
data=ImageFolder data.pth=x | ImageFolder has no field | 'path'
optimizer=LAMB optimizer.eps=-1 | LAMB.eps=-1.0 | > 0
seed=4294967296 | Config.seed=4294967296 | [0, 4294967296)
phases.epochs=0,40 | Phases.epochs=(0.0, 40.0) | only 40.0 epochs
optimizer=Muon optimizer.ns_coeffs=1,2 | Muon.ns_coeffs=(1.0, 2.0) | must be three
ema_decay=None ema_warmup=True | Config.ema_warmup=True | ema_decay
optimizer=AdamW optimizer.include=[ | AdamW.include='[' | kernel$
optimizer=LAMB optimizer.include=a{{9999999999}} | LAMB.inc | 'all'
data=Text data.sequence_length=0 | Text.sequence_length=0 | >= 1
optimizer=Optax | --config.optimizer=Optax | write it in the config file
data=Arrays | --config.data=Arrays | write it in the config file
data=Txt | data=Txt | did you mean 'Text'
data=TFDSText | TFDSText.name is not set | expected str
data=TextFiles data.path=x data.vocab_size=0 | TextFiles.vocab_size=0 | >= 1
data=TextFiles data.path=x data.separator=</s> | TextFiles.separator='</s>' | byte 0
target_loss=0 | Config.target_loss=0.0 | > 0
target_loss=1.5 | Config.target_loss=1.5 | set one of them to None
model=Transformer model.num_heads=5 | Transformer.num_heads=5 | does not divide width=256
model=Transformer model.num_kv_heads=3 | Transformer.num_kv_heads=3 | divide num_heads=4
model=Transformer model.width=36 | Transformer | choose an even width
model=Transformer model.head_width=7 | Transformer.head_width=7 | even width
model=ViT model.num_heads=5 | ViT.num_heads=5 | does not divide width=384
layer_decay=0.5 layer_order=('(','a') | Config.layer_order='(' | not a regular expression
""")


LONG = [
  ({"seed": "9" * 400}, "Config.seed=999", "[0, 4294967296)"),
  ({"batch_size": "-1" + "0" * 400}, "Config.batch_size=-1000", ">= 1"),
  ({"epochs": "1" + "0" * 400}, "epochs=1000", "expected float"),
]


@pytest.mark.parametrize("overrides, where, remedy", BAD + LONG)
def test_overrides_that_are_refused(overrides, where, remedy):
  with config_error(where, remedy):
    load_config("configs/digits.py", overrides)


def source(cell):
  """Text of a config file; `=> x` is a get_config that returns x, `My: x` a model of this body."""
  text = cell.replace("My: ", "from jaxscale.config import *\nclass My(Model):\n  ")
  text = text.replace("=> ", "from jaxscale.config import *\ndef get_config():\n  return ")
  return text.replace(r"\n", "\n")


FILES = columns(source, str, str)(r"""
def get_config(: | :1: | invalid syntax
x = 1 | define get_config |
=> 3 | returned int | Config
=> nope | :3: | NameError
=> SGD(lrr=1) | :3: SGD.lrr=1 | did you mean 'lr'?
=> SGD(lr='x') | :3: SGD.lr='x' | expected float
=> SGD() | :3: SGD.lr is not set | expected float
=> SGD(1.0) | by name | SGD(lr=1.0)
import dataclasses\n=> dataclasses.replace(SGD(lr=1), momentm=2) | :4: SGD.momentm=2 | 'momentum'?
import sys\nsys.exit(3) | :2: | calls sys.exit(3); remove it
def get_config():\n  raise SystemExit | :2: | calls sys.exit(); remove it
=> exit('no GPU') | :3: | calls sys.exit('no GPU')
import sys\n=> sys.argv[1] | :4: IndexError |
from argparse import *\np = ArgumentParser()\np.add_argument('x')\n=> p.parse_args() | :6: | (arg)
import os\nos.chdir('/')\n=> 3 | changes the working directory | os.chdir
import jaxscale\n=> jaxscale.models.MPL() | :4: | did you mean 'MLP'?
from jaxscale import optim\n=> optim.SDG(lr=1) | :4: | did you mean 'SGD'?
momentum = 1\n=> momentun | :4: | did you mean 'momentum'?
My: width = 3\n=> My(width=5) | :6: My.width=5 | write `width: int = 3`
My: n: list = [1] | :2: | mutable default
My: def __init__(self, width): pass | :2: My.__init__ | __post_init__
My: pass\n=> My(4) | My(4) | it has no fields
My: pass\n=> My(n=4) | My.n=4 | `n: int = 3`
""")


@pytest.mark.parametrize("text, where, remedy", FILES)
def test_files_that_are_refused(tmp_path, text, where, remedy):
  path = tmp_path / "c.py"
  path.write_text(text)
  with config_error("c.py", where, remedy):
    load_config(str(path))


CHOSEN = table("""
models.MLP | ; give an instance, MLP()
'MLP' | did you mean MLP()?
'MPL' | did you mean MLP()?
Mine | ; give an instance, Mine()
models.MLPModule | a class of yours that extends Model; give an instance, MLPModule()
3 | a class of yours
""")


@pytest.mark.parametrize("model, remedy", CHOSEN)
def test_a_class_in_place_of_its_settings_is_refused(tmp_path, model, remedy):
  (tmp_path / "c.py").write_text(
    "from jaxscale import config, models\nclass Mine(config.Model):\n  n: int = 3\n"
    f"def get_config():\n  return config.Config(model={model})"
  )
  with config_error(remedy, match=r"c.py:5: Config\.model="):
    load_config(str(tmp_path / "c.py"))


def test_a_file_is_run_as_if_it_were_alone(tmp_path, monkeypatch):
  """Its argparse read jaxscale's command line, and blamed the user for it."""
  parses = (
    "from argparse import ArgumentParser as A\np = A()\np.add_argument('--lr', default=0.5)\n"
  )
  (tmp_path / "c.py").write_text(f"{parses}lr = p.parse_args().lr\n{OWN}")
  (tmp_path / "width_of_mine.py").write_text("WIDTH = 24\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "argv", asked := ["jaxscale", "train", "--config", "c.py"])
  assert load_config("c.py").batch_size == 8 and sys.argv is asked


NUMBERS = [
  ("batch_size", 64, [np.int64(64), np.uint8(64), np.array(64)]),
  ("epochs", 2.5, [np.float32(2.5), np.float64(2.5), jnp.bfloat16(2.5), jnp.float32(2.5)]),
  ("epochs", 3.0, [np.int32(3)]),
  ("noise_scale", True, [np.bool_(True)]),
  ("seed", 7, [jnp.int32(7)]),
  ("init_from", "a", [Path("a")]),
]


@pytest.mark.parametrize("field, plain, values", NUMBERS)
def test_numbers_of_numpy_are_taken(field, plain, values):
  for value in values:
    found = getattr(small_config(**{field: value}), field)
    assert found == plain and type(found) is type(plain)


def test_arrays_are_shown_by_dtype_and_shape(tmp_path):
  """The log had up to 1,000 numbers of each."""
  x, y = np.zeros((400, 2), np.float32), [[float(i)] for i in range(400)]
  config = small_config(data=cfg.Arrays(x=x, y=y), loss=cfg.SquaredError())
  page = describe_text(build.experiment(config), tmp_path)
  assert "x=float32[400, 2]" in page and "y=[[0.0], [1.0]" in page
  assert max(map(len, page.splitlines())) < 300


def test_arrays_are_tuples():
  assert cfg.Log(profile_processes=np.array([0, 1])).profile_processes == (0, 1)
  x = np.linspace(0, 1, 3, dtype=np.float32)
  phases = cfg.Phases(epochs=x, batch_sizes=np.array([1, 2, 3]))
  assert phases == cfg.Phases(epochs=(0.0, 0.5, 1.0), batch_sizes=(1, 2, 3))


@pytest.mark.parametrize(
  "field, values",
  [
    ("batch_size", [np.float64(64), np.array([64]), np.bool_(True)]),
    ("epochs", ["3", np.complex64(3), np.ones(2)]),
  ],
)
def test_numbers_of_another_kind_are_refused(field, values):
  for value in values:
    with pytest.raises(ConfigError, match=rf"^Config.{field}=.*: expected (int|float)( \| None)?$"):
      small_config(**{field: value})


def test_a_tilde_is_the_home_wherever_a_path_is(tmp_path, monkeypatch):
  """`--workdir=~/x`, which no shell expands, made a folder named ~."""
  monkeypatch.setenv("HOME", str(tmp_path))
  shutil.copy("configs/digits.py", tmp_path)
  folder = {"data": "ImageFolder", "data.path": "~/photos", "data.image_size": "8"}
  changes = folder | {"init_from": "~/w", "checkpoint.local": "~/fast"}
  config = load_config("~/digits.py", changes)
  assert config.init_from == f"{tmp_path}/w" and config.data.path == f"{tmp_path}/photos"
  assert config.checkpoint.local == f"{tmp_path}/fast"
  assert cfg.Wandb(project="~").project == "~"  # no path
  args = Parser("x", "x")
  kinds = {"workdir DIR": directory, "out FILE": file, "prompt TEXT": str}
  for option, kind in kinds.items():
    args.option(f"--{option}", "", kind)
  args.option("--plan FILE", "")
  args.words("names", "RUN", "")
  given = args.read(["--workdir=~/a", "--out=~/b", "--plan=~/c", "--prompt=~/d", "~/e"])
  found = given.workdir, given.out, given.plan, given.prompt, *given.names
  home = str(tmp_path)
  assert found == (f"{home}/a", f"{home}/b", f"{home}/c", "~/d", f"{home}/e")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "~/x"])
def test_a_tilde_without_a_home_is_refused(path, monkeypatch):
  monkeypatch.setattr(os.path, "expanduser", lambda path: path)
  with pytest.raises(ConfigError, match="has no home directory"):
    load_config("configs/digits.py", {"init_from": path})
  args = Parser("x", "x")
  args.option("--workdir DIR", "", directory)
  with pytest.raises(ConfigError, match=f"^--workdir={path}: give a path without ~"):
    args.read([f"--workdir={path}"])


def test_file_arguments():
  assert load_config("configs/fashion_mnist.py:lars").batch_size == 4096
  for path, remedy in table("""
    configs/digits.py:big | takes no argument
    configs/digit.py | did you mean 'configs/digits.py'
    configs/fashion_mnist.py:adam | 'sgd' or 'lars'
    configs/nothing_of_the_kind.py | no such file, check the path
    no_folder/digits.py | no such file, check the path
"""):
    with config_error(remedy):
      load_config(path)


def test_settings_are_frozen_and_equal_by_value():
  assert cfg.SGD(lr=1) == cfg.SGD(lr=1.0)
  assert override(cfg.SGD(lr=1), {"lr": "2"}) == cfg.SGD(lr=2)
  with pytest.raises(AttributeError):
    cfg.SGD(lr=1).lr = 2  # pyright: ignore


def test_help_lists_every_field_with_its_meaning():
  text = settings_help(load_config("configs/digits.py"))
  assert "--config.optimizer.lr = 0.1  (float > 0; required)" in text
  assert "eak learning rate" in text
  everything = settings_help(None)
  for name in ("trust_coefficient", "depth", "power", "data_dir", "keep_best", "b2"):
    assert f".{name}" in everything


def test_every_setting_has_its_default_and_its_meaning_in_the_help():
  found = [e for e in entries(None) if e.path]
  assert len(found) > 200
  classes = {name: c for name, c in vars(cfg).items() if isinstance(c, type)}
  for base in (cfg.Model, cfg.Data, cfg.Optimizer, cfg.Schedule, cfg.Loss, cfg.Exchange):
    classes |= base.built_in()
  for base in (cfg.Sync, cfg.Tracker, cfg.Metric, cfg.Callback, cfg.Growth, cfg.Parametrization):
    classes |= base.built_in()
  for entry in found:
    assert re.search(r"; (required|default: .+)\)$", entry.head), entry.head
    assert entry.text, entry.topic
    *_, kind, name = ["config", *entry.topic.split(".")]
    cls = classes.get(kind) or classes[kind.capitalize()]
    (field,) = [f for f in dataclasses.fields(cls) if f.name == name]
    if isinstance(field.default, (int, float, str, tuple)):
      assert entry.head.endswith(f"default: {field.default!r})"), entry.head


HELP = {
  "optimizer": ("optimizer.LARS: ", "trust_coefficient  (float > 0; default: 0.001)"),
  "data.TFDS": ("data.TFDS: ", "--config.data.name  (str; required)"),
  "optimizer.lr": ("", "--config.optimizer.lr  (float > 0; required)"),
  "log.trackers": ("log.trackers.Wandb: ", "--config.log.trackers.Wandb.mode"),
  "config": ("", "--config.clip_norm  (float > 0 | None; default: None)"),
  "mesh": ("mesh: ", "--config.mesh.data  (int; default: -1)"),
}


def test_the_help_says_what_special_values_do():
  for entry in (e for e in entries(None) if e.path):
    kind = entry.head.partition("; ")[0]
    assert re.match("(the|an?|whether) ", entry.text), entry.topic
    assert "None" in entry.text or "| None" not in kind, entry.topic
    for value in re.findall(r"'(\w+)'", kind):
      assert f'"{value}"' in entry.text, (entry.topic, value)
    assert "second" in entry.text or not entry.path.endswith("_s"), entry.topic


@pytest.mark.parametrize("topic", HELP)
def test_help_of_a_topic_shows_its_settings_alone(topic):
  text = settings_help(topic=topic)
  assert all(part in text for part in HELP[topic])
  assert "--config.checkpoint.keep_last" not in text


def test_a_class_keeps_the_bounds_of_the_one_it_extends():
  @settings
  class Base:
    a: Annotated[float, "> 0"] = 1.0
    b: Annotated[int, ">= 0"] = 0

  @settings
  class Other(Base):
    a: float = 2.0
    b: Annotated[int, ">= 1"] = 1

  assert bounds(Other) == {"a": "> 0", "b": ">= 1"} and Other().a == 2.0
  for value in ({"a": -1.0}, {"b": 0}):
    with pytest.raises(ConfigError, match="give a value >"):
      Other(**value)
  with pytest.raises(ConfigError, match=r"a=inf: give a finite value > 0"):
    Other(a=math.inf)


def test_a_class_is_chosen_without_what_it_does_not_allow():
  """LARS has eps=0, which AdamW and LAMB would divide by."""
  lars = load_config("configs/digits.py", {"optimizer": "LARS"})
  assert override(lars, {"optimizer": "LAMB"}).optimizer.eps == 1e-6
  assert override(lars, {"optimizer": "AdamW", "optimizer.lr": "3"}).optimizer.lr == 3


def test_only_what_is_close_is_suggested():
  assert closest("--drop", ["--help", "--config"]) is None
  assert closest("--hlep", ["--help", "--config"]) == "--help"
  assert nearest("--drop", ["--help", "--config"]) == "give one of --config, --help"
  many = [f"n{i:03}" for i in range(1000)]
  assert len(nearest("x", many)) < 300 and nearest("x", many).endswith("960 more")


OWN = """
import width_of_mine
from jaxscale import config
from support.configs import small_config

class Undocumented(config.Model):
  width: config.Count = width_of_mine.WIDTH

def get_config():
  return small_config(model=Undocumented(), batch_size=8)
"""


def test_a_config_file_imports_from_its_folder_and_needs_no_docstring(tmp_path):
  (tmp_path / "mine.py").write_text(OWN)
  (tmp_path / "width_of_mine.py").write_text("WIDTH = 24\n")
  config = load_config(str(tmp_path / "mine.py"))
  assert config.model.width == 24  # pyright: ignore[reportAttributeAccessIssue]
  text = "\n  model.Undocumented:\n  --config.model.width = 24  (int >= 1; default: 24)\n"
  assert text in settings_help(config)
  own = loading.own_classes(str(tmp_path / "mine.py"))
  digits = load_config("configs/digits.py")  # with a class that the file does not use
  for node, topic in ((None, "model"), (digits, "model.Undocumented"), (config, "model.width")):
    assert "--config.model.width" in settings_help(node, own, topic)


def test_an_own_sync_is_treated_as_its_class_says():
  class Apart(cfg.Sync):
    pass

  class Together(cfg.Sync):
    is_local_sgd = False

  config = load_config("configs/digits.py")
  assert config.ema_decay is not None
  assert not dataclasses.replace(config, sync=Together()).is_local_sgd
  with pytest.raises(ConfigError, match="ema_decay"):
    dataclasses.replace(config, sync=Apart())


def test_a_class_of_ones_own_is_treated_as_what_it_extends():
  class Buckets(cfg.AllReduce):
    bucket_bytes: int | None = 4096

  class Plain(cfg.AllReduce):
    pass

  class Other(cfg.AllReduce):
    def build(self, context):
      return super().build(context)

  class Smooth(cfg.CrossEntropy):
    label_smoothing: float = 0.1

  class Weighted(cfg.CrossEntropy):
    def build(self, info):
      return super().build(info)

  class Declared(Weighted):
    is_cross_entropy = True

  assert Plain().is_plain and Buckets().sends_whole and not Buckets().is_plain
  for exchange in (Other(), cfg.HalfPrecision(), cfg.Int8()):  # not the sum as it is
    assert not exchange.sends_whole and not exchange.is_plain
  assert Smooth().is_cross_entropy and Declared().is_cross_entropy
  assert not Weighted().is_cross_entropy and not cfg.Huber().is_cross_entropy
  fsdp = assignments("mesh.data=2 mesh.fsdp=4 layout.shard=fsdp")
  config = load_config("configs/digits.py", fsdp)
  layout = dataclasses.replace(config.layout, slow_axes="in_backward")
  dataclasses.replace(config, layout=layout, exchange=Plain())
  for exchange in (Other(), Buckets()):
    with pytest.raises(ConfigError, match=r"would bypass Config\.exchange=\w+; use 'after'"):
      dataclasses.replace(config, layout=layout, exchange=exchange)
