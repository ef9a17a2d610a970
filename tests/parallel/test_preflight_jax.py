"""Checks of the preflight that ask JAX, in child processes: devices, flags, data, configs."""

import re

import pytest

from jaxscale.jobs.preflight import child, devices
from support.images import write_folder
from support.preflight_process import HOSTS, only, preflight, wrong

FOLDER = """
import os
from jaxscale.config import *

def get_config():
  data = ImageFolder(path=os.environ["DATA"], image_size=16)
  return Config(model=CNN(), data=data, optimizer=SGD(lr=0.1), batch_size=8, epochs=1)
"""


def folder(root, number):
  """Write a dataset of two classes for ImageFolder; return its folder."""
  for split in ("train", "val"):
    write_folder(root, split, number // 2)
  return str(root)


@pytest.mark.slow
def test_flags_devices_and_data_are_named_where_they_differ(tmp_path):
  config = tmp_path / "config.py"
  config.write_text(FOLDER)
  good, small = folder(tmp_path / "good", 16), folder(tmp_path / "small", 12)
  (tmp_path / "none").mkdir()
  rank_env = {
    0: {"DATA": good},
    1: {"DATA": good, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_nonsense=1"},
    2: {"DATA": str(tmp_path / "none"), "JAX_NUM_CPU_DEVICES": "3"},
    3: {"DATA": small},
  }
  options = only("devices"), f"--config={config}"
  findings = preflight(HOSTS, *options, rank_env=rank_env)
  reported = wrong(findings)
  assert reported[0] == ("process 1 (n2): XLA_FLAGS: unknown to this jaxlib: --xla_nonsense=1")
  assert findings[0].remedy.startswith("remove it from XLA_FLAGS")
  assert reported[1] == "devices: 3 x cpu in process 2 (n3), 2 x cpu in the others"
  assert re.match(r"data: process 2 \(n3\): .*train_split=train: no such dir", reported[2])
  differ = r"data: .* has 1\d \+ 1\d examples in process [03] .*, .* in the others"
  assert re.fullmatch(differ, reported[3])
  assert len(reported) == 4  # and no word on whether the config fits


@pytest.mark.slow
def test_a_config_says_how_large_its_checkpoints_are(tmp_path):
  options = [only("devices", "disk"), f"--workdir={tmp_path}", "--config=configs/digits.py"]
  options += ["--config.model=MLP", "--config.model.hidden=(64,)", "--config.ema_decay=0.9"]
  findings = preflight(HOSTS[:2], *options)
  assert not wrong(findings), findings
  text = {f.text.split(" ")[0]: f.text for f in findings}
  assert text["devices:"] == "devices: 2 x cpu in each of 2 processes, tested"
  assert text["data:"] == "data: digits, 1,437 + 360 examples"
  assert "fits 4 devices" in text["config"]
  # 64 x 64 + 64 + 64 x 10 + 10 parameters in float32, their velocity and average.
  size = 3 * 4 * (64 * 64 + 64 + 64 * 10 + 10)
  assert f"have {size / 1e3:.1f} KB" in text["config"]
  # Two last ones, the best one, and the one that is being written.
  assert any(f.text.endswith(f"{4 * size / 1e3:.1f} KB needed") for f in findings)


def test_a_config_that_does_not_fit_is_refused():
  options = only("devices"), "--config=configs/digits.py", "--config.batch_size=9"
  *good, last = preflight(HOSTS[:1], *options)
  assert not wrong(good)
  assert last.text.startswith("config configs/digits.py on 2 devices: ")
  assert not last.ok and "batch_size=9" in last.text


UNKNOWN = "F1 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --xla_a=1 --xla_b"
VALUE = "E1 line_flags.cc:63] Couldn't interpret value abc for flag xla_x.\nusage:"
FILE = 'F1 x.cc:171] Could not open file "junk" to read flags for environment variable'
BACKEND = "RuntimeError: Unable to initialize backend 'cuda'"
WORDS = [
  (UNKNOWN, "XLA_FLAGS: unknown to this jaxlib: --xla_a=1 --xla_b"),
  (VALUE, "XLA_FLAGS: invalid value of --xla_x: abc"),
  (FILE, "XLA_FLAGS=junk: not a file; flags begin with --"),
  (f"Traceback\n  at\n{BACKEND}\n\nnoise", BACKEND),
  ("", "JAX ended with code -6"),
]


@pytest.mark.parametrize("text, says", WORDS)
def test_what_ended_jax_is_read_from_its_words(text, says):
  assert child.cause_of(text, -6) == says


def test_a_gpu_that_jax_does_not_see_is_reported(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  found = {"kind": "cpu", "count": 1, "wrong": [], "gpu_problem": ""}

  def reported_on(result):
    (finding,) = devices._devices([result], ["n1"])
    return finding

  reported = reported_on(found | {"gpu_problem": "GPU: 1 on this machine; install it"})
  assert reported[:2] == (False, "devices: n1: GPU: 1 on this machine")
  assert reported_on(found).ok
  reported = reported_on(found | {"wrong": ["cuda:3: 14335.0"]})
  assert reported.text == "devices: n1 computes wrong results: cuda:3: 14335.0"
