"""Runs whose config holds a module itself, and scripts that are loaded for their classes."""

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as jxs
from jaxscale import data
from jaxscale.files import read_json_lines
from support.commands import run_python
from support.configs import small_config
from support.errors import config_error

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3)).astype("float32")
Y = np.arange(48) % 2


class Linen(nn.Module):
  """A layer without settings of its own."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)


class Nnx(nnx.Module):
  """A layer with dropout."""

  def __init__(self, *, rngs):
    self.dense, self.drop = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return self.dense(self.drop(x))


class Equinox(eqx.Module):
  """A layer with BatchNorm."""

  dense: eqx.nn.Linear
  norm: eqx.nn.BatchNorm

  def __init__(self, *, key):
    self.dense = eqx.nn.Linear(3, 2, key=key)
    self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")

  def __call__(self, x, state):
    return self.norm(self.dense(x), state)


GIVEN = {
  "linen": Linen,
  "nnx class": lambda: Nnx,
  "nnx": lambda: Nnx(rngs=nnx.Rngs(0)),
  "equinox class": lambda: Equinox,
  "equinox": lambda: Equinox(key=jax.random.key(0)),
}


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
def test_a_run_with_a_given_module_resumes(make, tmp_path):
  def train(epochs):
    settings = small_config(model=make(), data=data.Arrays(x=X, y=Y), batch_size=8, epochs=epochs)
    return jxs.fit(settings, tmp_path)

  with jax.numpy_dtype_promotion("standard"):
    assert train(1).summary["step"] == 6
    assert train(2).summary["step"] == 11
    assert jxs.load(tmp_path, model=make()).predict(X[:3]).labels.shape == (3,)


SCRIPT = """
import sys
import numpy as np
import jaxscale as jxs
from jaxscale import config, data, models

class Net(config.Model):
  def build(self, context):
    return models.MLPModule(num_classes=2, hidden=(4,))

x = np.arange(24, dtype="float32").reshape(8, 3)
arrays = data.Arrays(x=x, y=np.arange(8) % 2, eval_share=0.5)
options = dict(optimizer=config.SGD(lr=0.1), batch_size=4, log=config.Log(plot=False))
jxs.fit(config.Config(model=Net(), data=arrays, epochs=2, **options), sys.argv[1])
"""


def test_a_script_is_loaded_for_its_classes_and_does_not_train(tmp_path):
  script, run = tmp_path / "script.py", tmp_path / "run"
  script.write_text(SCRIPT)
  assert run_python(script, run).returncode == 0
  starts = read_json_lines(run / "starts.jsonl")
  trained = jxs.load(run)
  assert trained.step == 2 and trained.predict(np.ones((1, 3), "float32")).labels.shape == (1,)
  assert read_json_lines(run / "starts.jsonl") == starts
  code = run / "code" / "__main__.py"
  script = code.read_text()
  for call, does in ("fit('digits', 'x')", "trains"), ("jobs.submit('digits')", "submits a job"):
    code.write_text(f"import jaxscale, jaxscale.jobs\njaxscale.{call}\n{script}")
    with config_error(f"{does} before it defines the class"):
      jxs.load(run)


def test_a_script_that_catches_errors_ends_where_it_would_train(tmp_path):
  """The copy of a sweep went on behind its first `fit`."""
  script, run, done = tmp_path / "script.py", tmp_path / "run", tmp_path / "done"
  head, call, rest = SCRIPT.partition("jxs.fit(")
  sweep = f"try:\n  {call}{rest}except Exception:\n  pass\nopen({str(done)!r}, 'x')\n"
  script.write_text(head + sweep.replace("sys.argv[1]", repr(str(run))))
  assert run_python(script).returncode == 0
  done.unlink()
  assert jxs.load(run).step == 2 and not done.exists()
  code = run / "code" / "__main__.py"
  sweep = "try:\n  jxs.fit('digits', 'x')\nexcept Exception:\n  pass\n"
  code.write_text(code.read_text().replace("class Net", f"{sweep}class Net"))
  with config_error("trains before it defines the class"):
    jxs.load(run)
  assert not done.exists()


DEFINED_AGAIN = """
def told(function, *args, **options):
  try:
    function(*args, **options)
    print("told: nothing")
  except jxs.ConfigError as error:
    print("told:", error)

class Net(config.Model):
  def build(self, context):
    return models.MLPModule(num_classes=2, hidden=(4, 4))

now = config.Config(model=Net(), data=arrays, epochs=2, **options)
told(jxs.load, sys.argv[1])  # its copy of the script ends at the first run
told(jxs.load, sys.argv[1], model=Net())
told(jxs.fit, now, sys.argv[1])
jxs.fit(now, sys.argv[1] + "-2")
told(jxs.load, sys.argv[1] + "-2")
"""


def test_a_class_that_a_script_defines_again_is_noticed(tmp_path):
  script, run = tmp_path / "script.py", tmp_path / "run"
  script.write_text(SCRIPT + DEFINED_AGAIN)
  done = run_python(script, run)
  assert done.returncode == 0, done.stderr
  lines = [x for x in done.stdout.splitlines() if x.startswith("told: ")]
  different = "was trained with different code of Net in __main__; restore it, or pass model="
  assert lines[0] == "told: nothing" and lines[1].startswith(f"told: run={run} {different}")
  assert "was trained with different code (Net in __main__ differs)" in lines[2]
  assert lines[3].startswith(f"told: run={run}-2 {different}")


def test_a_script_may_train_longer_and_print_more(tmp_path):
  script, run = tmp_path / "script.py", tmp_path / "run"
  longer = SCRIPT.replace("epochs=2", "epochs=3")
  printing = f"{longer}\nprint(jxs.load(sys.argv[1], model=Net()))"
  for text, code in (
    (SCRIPT, 0),
    (printing, 0),
    (longer.replace("jxs.fit", "Net.x = 3; jxs.fit"), 1),
  ):
    script.write_text(text)
    done = run_python(script, run)
    assert done.returncode == code, done.stderr
    assert ("step=3" in done.stdout) == (text == printing)
  assert "different code (Net in __main__ differs)" in done.stderr
