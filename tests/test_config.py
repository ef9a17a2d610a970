"""Settings refuse what cannot be, in one line that says what to do."""

import pytest

from jaxscale import config as cfg
from jaxscale.overrides import help_text, load_config, override, parse_args
from jaxscale.settings import ConfigError

GOOD = [
  ({}, "batch_size", 128),
  ({"epochs": "3"}, "epochs", 3.0),
  ({"optimizer.lr": "1e-2"}, "optimizer.lr", 0.01),
  ({"optimizer.nesterov": "False"}, "optimizer.nesterov", False),
  ({"clip_norm": "1"}, "clip_norm", 1.0),
  ({"ema_decay": "None"}, "ema_decay", None),
  ({"model.features": "(8, 16)"}, "model.features", (8, 16)),
  ({"model.features": "8"}, "model.features", (8,)),
  ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
  ({"model": "ResNet", "model.depth": "18"}, "model.depth", 18),
  ({"optimizer.lr": "4", "optimizer": "LARS"}, "optimizer.lr", 4.0),
  ({"optimizer": "LARS"}, "optimizer.trust_coefficient", 0.001),
  # One at a time, either of these two would be refused.
  ({"epochs": "1", "schedule.warmup_epochs": "0"}, "epochs", 1.0),
  ({"schedule.warmup_epochs": "50", "epochs": "60"}, "epochs", 60.0),
]


@pytest.mark.parametrize("overrides, path, value", GOOD)
def test_overrides_that_are_taken(overrides, path, value):
  node = load_config("configs/digits.py", overrides)
  for name in path.split("."):
    node = getattr(node, name)
  assert node == value and type(node) is type(value)


BAD = [
  ({"optimzer.lr": "1"}, "optimzer", "did you mean 'optimizer'?"),
  ({"optimizer.lrr": "1"}, "optimizer.lrr", "did you mean 'lr'?"),
  ({"optimizer.lr": "fast"}, "optimizer.lr=fast", "give float"),
  ({"optimizer.lr": "-1"}, "SGD.lr=-1.0", "> 0"),
  ({"optimizer.lr": "1e999"}, "SGD.lr=inf", "> 0"),
  ({"optimizer.trust_coefficient": "1"}, "SGD", "no field"),
  ({"optimizer": "Adm"}, "optimizer=Adm", "did you mean 'AdamW'?"),
  ({"optimizer": "LARS", "optimizer.b1": "1"}, "LARS", "no field 'b1'"),
  ({"batch_size": "1.5"}, "batch_size=1.5", "give int"),
  ({"batch_size": "True"}, "batch_size=True", "give int"),
  ({"batch_size": "0"}, "Config.batch_size=0", ">= 1"),
  (
    {"batch_size": "100", "accumulate_steps": "3"},
    "Config.batch_size=100",
    "divisible",
  ),
  ({"epochs": "-3"}, "Config.epochs=-3.0", "> 0"),
  ({"epochs": "nan"}, "epochs=nan", "give float"),
  ({"epochs": "2"}, "warmup_epochs=2.0", "shorter"),
  ({"dtype": "fp8"}, "dtype=fp8", "'bfloat16'"),
  ({"seed.x": "3"}, "seed", "no fields"),
  ({"mesh.data": "0"}, "Mesh.data=0", "-1"),
  ({"mesh.replica": "-1"}, "Mesh.replica=-1", "only one"),
  ({"model.dropout": "1"}, "CNN.dropout=1.0", "[0, 1)"),
  ({"": "1"}, "Config", "no field"),
]


@pytest.mark.parametrize("overrides, where, remedy", BAD)
def test_overrides_that_are_refused(overrides, where, remedy):
  with pytest.raises(ConfigError) as error:
    load_config("configs/digits.py", overrides)
  message = str(error.value)
  assert where in message and remedy in message and "\n" not in message


FILES = [
  ("def get_config(:", ":1: ", "invalid syntax"),
  ("x = 1", "define get_config", ""),
  ("def get_config():\n  return 3", "returned int", "Config"),
  ("def get_config():\n  return nope", ":2: ", "NameError"),
  ("from jaxscale.config import *\ndef get_config():\n  return SGD(lrr=1)",
   ":3: SGD.lrr=1", "did you mean 'lr'?"),
  ("from jaxscale.config import *\ndef get_config():\n  return SGD(lr='x')",
   ":3: SGD.lr='x'", "give float"),
  ("from jaxscale.config import *\ndef get_config():\n  return SGD()",
   ":3: SGD.lr is not set", "give float"),
  ("from jaxscale.config import *\ndef get_config():\n  return SGD(1.0)",
   "by name", "SGD(lr=1.0)"),
  ("import dataclasses\nfrom jaxscale.config import *\ndef get_config():\n"
   "  return dataclasses.replace(SGD(lr=1), momentm=2)",
   ":4: SGD.momentm=2", "did you mean 'momentum'?"),
]  # fmt: skip


@pytest.mark.parametrize("text, where, remedy", FILES)
def test_files_that_are_refused(tmp_path, text, where, remedy):
  path = tmp_path / "c.py"
  path.write_text(text)
  with pytest.raises(ConfigError) as error:
    load_config(str(path))
  message = str(error.value)
  assert "c.py" in message and where in message and remedy in message
  assert "\n" not in message


def test_file_arguments():
  assert load_config("configs/fashion_mnist.py:lars").batch_size == 4096
  with pytest.raises(ConfigError, match="takes no argument"):
    load_config("configs/digits.py:big")
  with pytest.raises(ConfigError, match=r"did you mean 'configs/digits.py'"):
    load_config("configs/digit.py")
  with pytest.raises(ConfigError, match="'sgd' or 'lars'"):
    load_config("configs/fashion_mnist.py:adam")


def test_settings_are_frozen_and_equal_by_value():
  assert cfg.SGD(lr=1) == cfg.SGD(lr=1.0)
  assert override(cfg.SGD(lr=1), {"lr": "2"}) == cfg.SGD(lr=2)
  with pytest.raises(AttributeError):
    cfg.SGD(lr=1).lr = 2  # pyright: ignore


def test_command_line_is_split():
  argv = [
    "--config",
    "a.py:x",
    "--workdir=w",
    "--config.epochs",
    "3",
    "--config.a.b=c=d",
  ]
  options, overrides, wants_help = parse_args(argv)
  assert options == {"config": "a.py:x", "workdir": "w"}
  assert overrides == {"epochs": "3", "a.b": "c=d"} and not wants_help
  for bad in (
    ["--confg", "a.py"],
    ["--config"],
    ["a.py"],
    ["--workdir", "--config=x"],
  ):
    with pytest.raises(ConfigError):
      parse_args(bad)


def test_help_lists_every_field_with_its_meaning():
  text = help_text(load_config("configs/digits.py"))
  assert "--config.optimizer.lr = 0.1  (float > 0)" in text
  assert "peak learning rate" in text
  everything = help_text(None)
  for name in (
    "trust_coefficient",
    "depth",
    "power",
    "data_dir",
    "keep_best",
    "b2",
  ):
    assert f".{name}" in everything
