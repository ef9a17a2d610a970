"""Own code that differs between processes, or changes before a run resumes."""

import shlex

import pytest

from jaxscale.metrics import read_json_lines
from support.commands import error_line, run_train, train_command, trained
from support.processes import run_group

OWN = """
import flax.linen as nn
from jaxscale import config, data, optim
from jaxscale.config import Checkpoint, Config

SCALE = 1.0


class Net(nn.Module):
  outputs: int

  @nn.compact
  def __call__(self, x, train):
    return nn.Dense(self.outputs)(SCALE * x.reshape(len(x), -1))


class Own(config.Model):
  def build(self, context):
    return Net(context.info.num_classes)


def get_config():
  return Config(
    model=Own(), data=data.Digits(), optimizer=optim.SGD(lr=0.1), batch_size=128,
    epochs=2, checkpoint=Checkpoint(every_epochs=1),
  )
"""


def edited(path):
  path.write_text(OWN.replace("SCALE = 1.0", "SCALE = 3.0"))


@pytest.mark.slow
def test_own_code_that_differs_between_processes_is_refused(tmp_path):
  for rank in range(2):
    (tmp_path / str(rank)).mkdir()
    (tmp_path / str(rank) / "own.py").write_text(OWN)
  edited(tmp_path / "1" / "own.py")
  config = f"{tmp_path}/$JAXSCALE_PROCESS_ID/own.py"
  command = train_command(tmp_path / "run", config="CONFIG")
  script = shlex.join(command).replace("CONFIG", config)
  ended = run_group(["sh", "-c", f"exec {script}"])
  assert {code for *_, code in ended} == {2}
  assert any("own code in own differs from process 0" in err for _, err, _ in ended)
  assert not (tmp_path / "run" / "checkpoints").exists()
  # Comments may differ, and where the file is.
  (tmp_path / "1" / "own.py").write_text(OWN + "# The copy of a node.\n")
  ended = run_group(["sh", "-c", f"exec {script}"])
  assert [code for *_, code in ended] == [0, 0], ended


@pytest.mark.slow
def test_own_code_or_x64_that_changes_before_a_resume_is_refused(tmp_path):
  config, workdir = tmp_path / "own.py", tmp_path / "run"
  config.write_text(OWN)
  assert run_train(workdir, config=str(config)).returncode == 0
  edited(config)
  line = error_line(run_train(workdir, "--config.epochs=3", config=str(config)), 2)
  assert "was trained with different code (SCALE in own differs)" in line
  wrong = run_train(workdir, "--accept-changes=code,all", config=str(config))
  assert "--accept-changes=code,all: give data, code or data,code" in wrong.stderr
  accept = "--accept-changes=code"
  out = trained(workdir, "--config.epochs=3", accept, config=str(config))
  assert "accepted: SCALE in own differs" in out
  starts = read_json_lines(workdir / "starts.jsonl")
  assert starts[-1]["accepted_changes"] == ["accepted: SCALE in own differs"]
  # In a process as users start it, both ways.
  for before, after in (("0", "1"), ("1", "0")):
    folder = tmp_path / f"x64-{before}"
    trained(folder, config=str(config), JAX_ENABLE_X64=before)
    more = "--config.epochs=3"
    second = run_train(folder, more, config=str(config), JAX_ENABLE_X64=after)
    line = error_line(second, 2)
    assert f"JAX_ENABLE_X64 is {before} in the workdir and {after} now" in line
